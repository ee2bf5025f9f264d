"""How much of a prompt was cached, is cached now, and why no more was: the parts of usage that every dialect tells."""

from __future__ import annotations

from typing import Any

from longturn.frontend.records import Usage


def written_tokens(usage: Usage, page_tokens: int) -> int:
    """Prompt tokens that were computed and are kept for later prompts: those of whole pages that were not cached.

    Args:
        usage: of one prompt.
        page_tokens: tokens of a cached page; 0 if nothing is cached.
    """
    if not page_tokens:
        return 0
    return max(0, usage.prompt_tokens // page_tokens * page_tokens - usage.cached_tokens)


def reuse_fields(usage: Usage) -> dict[str, Any]:
    """Longturn's own words on how a prompt met its conversation, the same in every dialect.

    They belong into the usage itself: of what stands in its details clients expect that it is a number of tokens.
    """
    fields: dict[str, Any] = {}
    if usage.diverged_at is not None:
        fields["diverged_at"] = usage.diverged_at
    if usage.reuse_reason is not None:
        fields["reuse"] = usage.reuse_reason.value
    return fields
