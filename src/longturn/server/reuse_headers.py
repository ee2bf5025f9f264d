"""Response headers that say how much of a prompt came from the cache, and why no more did.

X-Longturn-Cached-Tokens   prompt tokens from the prefix cache
X-Longturn-Reuse           the reason, a `ReuseReason`; of conversations only
X-Longturn-Diverged-At     first prompt token that differs from what the conversation left behind; absent if none does
X-Longturn-Volatile        place (characters into the rendered prompt), length, kind and hash of a volatile header

They are about the first prompt of a request. A stream whose first token takes longer than the head of its answer may
wait goes out without them; its usage says the same.
"""

from __future__ import annotations

from longturn.frontend.records import Reuse
from longturn.server.request_context import RequestContext

NAMES = ("X-Longturn-Cached-Tokens", "X-Longturn-Reuse", "X-Longturn-Diverged-At", "X-Longturn-Volatile")


def note_reuse(context: RequestContext, reuse: Reuse) -> None:
    """Put a generation's reuse into the headers of its HTTP answer, unless an earlier one's is there."""
    headers = context.response_headers
    if NAMES[0] in headers:
        return
    headers[NAMES[0]] = str(reuse.cached_tokens)
    if reuse.reason is not None:
        headers[NAMES[1]] = reuse.reason.value
    if reuse.diverged_at is not None:
        headers[NAMES[2]] = str(reuse.diverged_at)
    if (span := reuse.volatile) is not None:
        headers[NAMES[3]] = f"at={span.at_chars}; length={span.chars}; kind={span.kind}; hash={span.digest}"
