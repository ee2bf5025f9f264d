"""Names of conversations: hashes of what a client will send back, message by message.

Everything is hashed under the tenant and its cache salt, so that no name of one means anything to another.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longturn.engine.hashing import salt_key
from longturn.frontend.conversation_calls import Forms, argument_forms, canonical_call
from longturn.frontend.records import ChatPrompt

SYSTEM_ROLES = ("system", "developer")
_UNGUESSABLE = re.compile(r"[0-9a-f]{8}(?:-?[0-9a-f]{4}){3}-?[0-9a-f]{12}", re.I)
"""A UUID, written with or without its dashes."""


@dataclass(frozen=True, slots=True)
class History:
    """The names of one request's conversation."""

    keys: tuple[bytes, ...]
    """keys[k] stands for the first k messages, with everything else that shapes a rendering."""
    answers: tuple[int, ...]
    """Numbers of messages k, descending, for which message k is the assistant's: where a remembered turn may end."""
    names: tuple[bytes, ...]
    """What this conversation's latest turn can be found by, the surest first: its session and its beginning, its
    beginning with or without system messages, and its session alone."""
    tools: bytes = b""
    """Stands for the tools."""
    arguments: bytes = b""
    """Stands for the template's arguments."""
    body: bytes = b""
    """Stands for the first message that is not the system's; empty for a prompt that the client has rendered."""
    session: bytes | None = None
    """Stands for the tenant's session under any salt, where its name is one that nobody guesses."""
    scope: bytes = b""
    """Stands for the tenant and its salt."""
    forms: Forms = field(default_factory=dict)
    """Of the tools' arguments."""


def history_of(prompt: ChatPrompt, *, tenant: str | None, cache_salt: str | None, session_id: str | None) -> History:
    """Hash a request's conversation, message by message; O(its bytes)."""
    scope = scope_of(tenant, cache_salt)
    tools, arguments = list(prompt.tools), dict(prompt.template_kwargs)
    keys = [_hash(scope, {"tools": tools, "kwargs": arguments})]
    root, forms = None, argument_forms(prompt.callable_tools)
    for message in prompt.messages:
        keys.append(_chain(keys[-1], message, forms))
        if root is None and message.get("role") == "user":
            root = keys[-1]
    answers = tuple(
        count for count in range(len(prompt.messages), 0, -1) if prompt.messages[count - 1].get("role") == "assistant"
    )
    body = body_of(prompt, scope)
    return History(
        keys=tuple(keys),
        answers=answers,
        names=_names(scope, session_id, (_hash(root or keys[-1], "root"), body)),
        tools=_hash(scope, tools),
        arguments=_hash(scope, arguments),
        body=body,
        session=_secret_session(tenant, session_id),
        scope=scope,
        forms=forms,
    )


def text_history(
    text: str, ends: Sequence[str], *, tenant: str | None, cache_salt: str | None, session_id: str | None
) -> History:
    """The history of a prompt that a client has rendered itself: each end of a turn in it may be one of ours.

    Args:
        text: the prompt.
        ends: the model's end tokens as they are written. Where a prompt has none of them it is no conversation: what
            follows an answer there may belong to the answer's last word, and its tokens must not depend on the past.
        tenant: as for `history_of`.
        cache_salt: as for `history_of`.
        session_id: as for `history_of`.
    """
    scope = scope_of(tenant, cache_salt)
    digest = hashlib.blake2b(digest_size=32, key=scope, person=b"longturn text")
    keys, begin = [digest.digest()], 0
    pattern = re.compile("|".join(re.escape(end) for end in sorted(ends, key=len, reverse=True) if end) or r"(?!)")
    for found in pattern.finditer(text):
        digest.update(text[begin : found.end()].encode("utf-8", "surrogatepass"))
        keys.append(digest.digest())
        begin = found.end()
    return History(
        keys=tuple(keys),
        answers=tuple(range(len(keys) - 1, 0, -1)),
        names=_names(scope, session_id, ()),
        session=_secret_session(tenant, session_id),
        scope=scope,
    )


def text_key(text: str, scope: bytes) -> bytes:
    """The key that `text_history` will have for a text that ends here."""
    digest = hashlib.blake2b(digest_size=32, key=scope, person=b"longturn text")
    digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.digest()


def answer_key(history: History, answer: Mapping[str, Any]) -> bytes:
    """The key of a history once the client sends the answer back behind it."""
    return _chain(history.keys[-1], answer, history.forms)


def scope_of(tenant: str | None, cache_salt: str | None) -> bytes:
    """Stands for a tenant and its salt; 32 bytes."""
    return salt_key("conversation", tenant, cache_salt)


def body_of(prompt: ChatPrompt, scope: bytes) -> bytes:
    """Stands for the first message that is not the system's, whatever stands before it."""
    first = next((m for m in prompt.messages if m.get("role") not in SYSTEM_ROLES), None)
    return _hash(scope, {"body": None if first is None else canonical_message(first)})


def canonical_message(message: Mapping[str, Any], forms: Forms | None = None) -> dict[str, Any]:
    """A message without what clients change on the way back.

    Of an assistant message only its text (surrounding space aside: clients trim) and its tool calls' names and
    arguments (`conversation_calls`) count; null fields and identifiers of calls are the client's business. Other
    messages count whole.
    """
    if message.get("role") != "assistant":
        return {key: value for key, value in message.items() if value is not None}
    content = message.get("content")
    if isinstance(content, (list, tuple)) and all(isinstance(p, Mapping) and p.get("type") == "text" for p in content):
        content = "".join(str(part.get("text", "")) for part in content)
    plain: dict[str, Any] = {
        "role": "assistant",
        "content": content.strip() if isinstance(content, str) else content or "",
    }
    if calls := message.get("tool_calls"):
        plain["tool_calls"] = [canonical_call(call, forms or {}) for call in calls]
    return plain


def _names(scope: bytes, session_id: str | None, beginnings: tuple[bytes, ...]) -> tuple[bytes, ...]:
    if session_id is None:
        return beginnings
    session = _hash(scope, {"session": session_id})
    # A session may hold several conversations (subagents), so its own name comes last.
    return (*(_join(session, beginning) for beginning in beginnings), *beginnings, session)


def _secret_session(tenant: str | None, session_id: str | None) -> bytes | None:
    if session_id is None or _UNGUESSABLE.search(session_id) is None:
        return None
    return _hash(salt_key("session", tenant), session_id)


def _chain(parent: bytes, message: Mapping[str, Any], forms: Forms) -> bytes:
    return _hash(parent, canonical_message(message, forms))


def _join(a: bytes, b: bytes) -> bytes:
    return hashlib.blake2b(b, digest_size=32, key=a).digest()


def _hash(key: bytes, value: Any) -> bytes:
    # Anything that is no JSON was refused when the prompt was rendered; key order is the template's input, so it stays.
    return _join(key, json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode())
