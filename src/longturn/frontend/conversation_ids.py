"""What a rendering adds to token ids that are known, and where two prompts part."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

_ENTRY_BYTES = 1024
"""Bytes counted for an entry's own objects."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One finished turn."""

    ids: bytes
    """Prompt and output token ids (int32 little-endian), the stop token among them if one was sampled."""
    page_hashes: tuple[bytes, ...]
    """Of the whole pages of `ids`."""
    prompt_chars: int
    prompt_digest: bytes
    """Length and `text_digest` of the rendered prompt."""
    text: str
    """What the output's ids stand for, without the stop token."""
    end_text: str
    """Text of the stop token at the end of `ids`; empty if there is none."""
    reasoning: str = ""
    """What the client was given as reasoning, and may not send back."""
    arguments: tuple[str, ...] = ()
    """Arguments of its tool calls as the model has spelled them; a client may send the same in another spelling."""
    tools: bytes = b""
    template_arguments: bytes = b""
    """As `History` has them."""

    @property
    def nbytes(self) -> int:
        chars = len(self.text) + len(self.reasoning) + sum(map(len, self.arguments))
        return _ENTRY_BYTES + len(self.ids) + 16 * len(self.page_hashes) + 4 * chars


def text_digest(text: str) -> bytes:
    """Digest of a text; unpaired surrogates, which only a client can bring, are hashed as they are."""
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=32).digest()


def continuation(turn: Turn, rendered: str) -> tuple[bool, str] | None:
    """What a rendering adds to a remembered turn.

    Args:
        turn: the remembered turn.
        rendered: the whole conversation's rendering, new messages and generation prompt included.

    Returns:
        (whether the stop token at the end of `turn.ids` stays, the text that follows), or None if the rendering does
        not continue the remembered ids.
    """
    prompt = rendered[: turn.prompt_chars]
    if len(prompt) < turn.prompt_chars or text_digest(prompt) != turn.prompt_digest:
        return None
    return _answer_in(turn, rendered[turn.prompt_chars :])


def last_continued(turns: Iterable[Turn], rendered: str) -> tuple[Turn, bool, str] | None:
    """Of several turns the one with the longest prompt that a rendering continues, and what `continuation` says of it.

    The rendering is hashed once for all of them: a conversation may have a hundred turns of half a million characters.
    """
    digest, at = hashlib.blake2b(digest_size=32), 0
    same: list[Turn] = []
    for turn in sorted(turns, key=lambda turn: turn.prompt_chars):
        if turn.prompt_chars > len(rendered):
            break
        digest.update(rendered[at : turn.prompt_chars].encode("utf-8", "surrogatepass"))
        at = turn.prompt_chars
        if digest.copy().digest() == turn.prompt_digest:
            same.append(turn)
    for turn in reversed(same):
        if (rest := _answer_in(turn, rendered[turn.prompt_chars :])) is not None:
            return turn, *rest
    return None


def _answer_in(turn: Turn, rest: str) -> tuple[bool, str] | None:
    """As `continuation`, from what follows the turn's prompt."""
    if rest.startswith(turn.text):
        after: str | None = rest[len(turn.text) :]
    else:
        after = _after_spaced(rest, turn.text)
    if after is None:
        return None
    if turn.end_text:
        # The template may trim the answer, or put space before its end-of-turn token; the model's ids stay as they are.
        if after.lstrip().startswith(turn.end_text):
            return True, after.lstrip()[len(turn.end_text) :]
        return False, after  # this template ends an answer with something else than what the model sampled
    return False, after


def _after_spaced(rest: str, text: str) -> str | None:
    """What follows `text` in `rest` if they differ in white space only: templates trim, and respace JSON."""
    at = 0
    for word in text.split():
        for char in word:
            while at < len(rest) and rest[at] != char:
                if not rest[at].isspace():
                    return None
                at += 1
            if at == len(rest):
                return None
            at += 1
    return rest[at:]


def common_tokens(a: bytes, b: bytes) -> int:
    """Number of equal tokens at the beginning of two sequences of int32 bytes."""
    count = min(len(a), len(b)) // 4
    differ = np.flatnonzero(np.frombuffer(a, dtype="<i4", count=count) != np.frombuffer(b, dtype="<i4", count=count))
    return int(differ[0]) if len(differ) else count
