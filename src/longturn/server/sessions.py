"""Which session a request belongs to, in the many ways that agents have of saying so.

A session's pages are kept a little longer (`cache.retention_half_life_s`), its conversation is found again after its
beginning was edited, and a router in front of several servers can send it to the same one by the same name.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping

SESSION_HEADERS = (
    "x-session-id",
    "session_id",
    "session-id",
    "x-claude-code-session-id",
    "conversation_id",
    "x-conversation-id",
    "x-session-affinity",
    "x-smg-routing-key",
)
"""In order of precedence, all behind `session_id` in the body."""
MAX_CHARS = 256
"""Longer names are replaced by a digest: they are kept, logged and sent to the engine."""

_IN_USER_ID = re.compile(r"(?:\A|_)session_([0-9A-Za-z-]+)\Z")


def session_of(headers: Mapping[str, str], named: str | None, *others: str | None) -> str | None:
    """The session of a request; None if nothing names one.

    Args:
        headers: of the HTTP request, found whatever their case.
        named: `session_id` of the body.
        others: what the API dialect has for it, such as `prompt_cache_key`, in order of precedence.
    """
    session = named or next((value for name in SESSION_HEADERS if (value := headers.get(name))), None)
    session = session or next((value for value in others if value), None)
    if session is None or len(session) <= MAX_CHARS:
        return session
    return hashlib.blake2b(session.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


def session_in_user_id(user_id: str | None) -> str | None:
    """The session in the `metadata.user_id` of Anthropic's API.

    Agents put one behind the user's name (`user_..._session_ID`) or into an object of JSON (`{"session_id": ID}`);
    where there is none, the user stands for it.
    """
    if not user_id:
        return None
    if found := _IN_USER_ID.search(user_id):
        return found[1]
    if user_id.startswith("{") and len(user_id) <= 4096:
        try:
            value = json.loads(user_id)
        except (ValueError, RecursionError):
            return user_id
        session = value.get("session_id") if isinstance(value, dict) else None
        return session if isinstance(session, str) and session else user_id
    return user_id
