"""Where a prompt leaves what its conversation has in the cache, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from longturn.config import PAGE_TOKENS
from longturn.frontend.chat_template import REASONING_FIELDS
from longturn.frontend.conversation import Found
from longturn.frontend.conversation_ids import Turn, common_tokens
from longturn.frontend.conversation_keys import History
from longturn.frontend.records import ChatPrompt, Reuse, ReuseReason, VolatileSpan


@dataclass(frozen=True, slots=True)
class Comparison:
    """A prompt beside what its conversation left behind."""

    reason: ReuseReason | None
    """As if nothing had been evicted; None for prompts that are no conversation."""
    diverged_at: int | None = None
    known_hashes: tuple[bytes, ...] = ()
    """Of the whole pages that both begin with."""
    computed_tokens: int = 0
    """Tokens at the prompt's beginning that were computed for the conversation, in whole pages."""
    volatile: VolatileSpan | None = None


def compare(
    ids: bytes,
    history: History | None,
    found: Found | None,
    volatile: VolatileSpan | None,
    *,
    extends: bool,
    edited: bool = False,
) -> Comparison:
    """Compare a prompt with its conversation.

    Args:
        ids: the prompt's token ids, int32 little-endian.
        history: its conversation's names; None if it is no conversation.
        found: what the memory knows of it.
        volatile: a volatile part of its beginning.
        extends: the prompt was made of the ids that its last answer left behind.
        edited: the client has changed what `found` does not look at (see `edited_reasoning`).
    """
    if history is None or found is None:
        return Comparison(None)
    is_text = not history.body  # which has no roles: nobody knows whether an answer stands in it
    if not history.answers:
        return Comparison(None if is_text else ReuseReason.FIRST_TURN, volatile=volatile)
    before = found.turn if found.is_last else found.latest or found.turn
    if before is None:
        unknown = ReuseReason.OTHER_SALT if found.other_salt else None if is_text else ReuseReason.NOT_REMEMBERED
        # What is remembered of its beginning has no name of its own, so nothing can be said of where it parts.
        return Comparison(unknown, volatile=volatile)
    common = common_tokens(ids, before.ids)
    # The last token of a turn was sampled and never computed, and one token of a prompt always is.
    computed = min(common, len(before.ids) // 4 - 1, len(ids) // 4 - 1)
    diverged_at = None if extends or common == len(before.ids) // 4 else common
    return Comparison(
        reason=ReuseReason.EXTENDED if diverged_at is None else _why(history, found, before, volatile, edited),
        diverged_at=diverged_at,
        known_hashes=before.page_hashes[: common // PAGE_TOKENS],
        computed_tokens=max(0, computed) // PAGE_TOKENS * PAGE_TOKENS,
        volatile=volatile,
    )


def edited_reasoning(prompt: ChatPrompt, turns: Mapping[int, Turn]) -> bool:
    """Whether a client sends back other reasoning than the model's; most send none, which says nothing.

    Args:
        prompt: the conversation.
        turns: those that wrote its answers, by the index of their message.
    """
    for index, turn in turns.items():
        sent = next(
            (prompt.messages[index].get(name) for name in REASONING_FIELDS if name in prompt.messages[index]), None
        )
        if isinstance(sent, str) and sent.strip() != turn.reasoning.strip():
            return True
    return False


def _why(history: History, found: Found, before: Turn, volatile: VolatileSpan | None, edited: bool) -> ReuseReason:
    if found.is_last:
        return ReuseReason.EDITED_HISTORY if edited else ReuseReason.RERENDERED
    if history.tools != before.tools:
        return ReuseReason.TOOLS_CHANGED
    if history.arguments != before.template_arguments:
        return ReuseReason.TEMPLATE_CHANGED
    return ReuseReason.EDITED_HISTORY if volatile is None else ReuseReason.VOLATILE_HEADER


def reuse_of(compared: Comparison, cached_tokens: int, *, caches: bool = True) -> Reuse:
    """What to tell of a prompt once it is known how much of it was cached.

    Args:
        compared: from `compare`.
        cached_tokens: prompt tokens from the prefix cache.
        caches: whether the engine keeps pages at all.
    """
    reason = compared.reason
    if reason is ReuseReason.EXTENDED and caches and cached_tokens < compared.computed_tokens:
        reason = ReuseReason.EVICTED
    return Reuse(cached_tokens, compared.diverged_at, reason, compared.volatile)
