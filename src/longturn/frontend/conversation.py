"""Conversation memory: turn N+1's prompt is turn N's exact token ids and the new part, never re-rendered.

Rendering and tokenising a history again does not give the tokens that the model wrote: "hel" + "lo" comes back as
"hello", and from there on every cached page is lost. So each finished turn leaves its ids here (prompt and output),
under a hash of the messages that a client will send back. What makes this safe is checked on every use: the new
rendering must begin with exactly the text that the remembered ids stand for; the rest of it is the new part. Where it
does not (the template drops old reasoning, the date has changed), the caller renders plainly and the first differing
token is reported.

Entries are found by (tenant, cache salt, tools, template arguments, messages), so nothing crosses between tenants.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from longturn.engine.hashing import salt_key
from longturn.frontend.records import ChatPrompt

_ENTRY_BYTES = 1024
"""Bytes counted for an entry's own objects."""


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    max_bytes: int = 64 << 20
    """Token ids, hashes and texts of all entries."""
    max_entries: int = 4096
    ttl_s: float = 3600.0
    """An entry that was not used for this long is gone."""


@dataclass(frozen=True, slots=True)
class History:
    """The names of one request's conversation."""

    keys: tuple[bytes, ...]
    """keys[k] stands for the first k messages, with everything else that shapes a rendering."""
    answers: tuple[int, ...]
    """Numbers of messages k, descending, for which message k is the assistant's: where a remembered turn may end."""
    root: bytes
    """Stands for the conversation from its beginning to the first user message."""
    session: bytes | None
    """Stands for the client's session, if it names one."""


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

    @property
    def nbytes(self) -> int:
        return _ENTRY_BYTES + len(self.ids) + 16 * len(self.page_hashes) + 4 * (len(self.text) + len(self.reasoning))


@dataclass(frozen=True, slots=True)
class Found:
    """What the memory knows of a request's history."""

    turn: Turn | None
    """A turn that the history repeats unchanged."""
    is_last: bool
    """It is the last answer in the history: nothing after it was edited."""
    latest: Turn | None
    """What this conversation left behind last, edited since or not."""


class ConversationMemory:
    """Bounded and expiring. To be used from one thread."""

    def __init__(self, limits: MemoryLimits | None = None, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits or MemoryLimits()
        self._now_s = now_s
        # Turns that a later one has extended go first; each in order of last use.
        self._older: OrderedDict[bytes, tuple[float, Turn]] = OrderedDict()
        self._newest: OrderedDict[bytes, tuple[float, Turn]] = OrderedDict()
        self._latest: OrderedDict[bytes, bytes] = OrderedDict()
        self.nbytes = 0
        self.hits = 0
        """Requests that extended a remembered turn."""
        self.divergences = 0
        """Requests whose prompt left what their conversation had before."""

    def __len__(self) -> int:
        return len(self._older) + len(self._newest)

    def find(self, history: History) -> Found:
        """The longest remembered beginning of a history."""
        self._expire()
        found, is_last = None, False
        for count in history.answers:
            if (found := self._get(history.keys[count])) is not None:
                is_last = count == history.answers[0]
                break
        latest = None
        if history.answers:  # without an answer in it a request begins a conversation; there is nothing to differ from
            for name in (history.session, history.root):
                key = self._latest.get(name) if name is not None else None
                if key is not None and (latest := self._get(key)) is not None:
                    break
        return Found(found, is_last, latest)

    def reasoning(self, history: History) -> dict[int, str]:
        """Reasoning of the answers in a history that are remembered, by the index of their message."""
        self._expire()
        turns = {count - 1: self._get(history.keys[count]) for count in reversed(history.answers)}
        return {index: turn.reasoning for index, turn in turns.items() if turn is not None and turn.reasoning}

    def remember(self, history: History, answer: Mapping[str, Any], turn: Turn) -> None:
        """Keep a finished turn: `history` is the request's, `answer` the message that the client will send back."""
        limits = self._limits
        if turn.nbytes > limits.max_bytes or limits.max_entries < 1:
            return
        key = _chain(history.keys[-1], answer)
        self._drop(key)
        if history.answers:
            parent = history.keys[history.answers[0]]
            if (entry := self._newest.pop(parent, None)) is not None:
                self._older[parent] = entry
        self._newest[key] = (self._now_s(), turn)
        self.nbytes += turn.nbytes
        for name in (history.session, history.root):
            if name is not None:
                self._latest[name] = key
                self._latest.move_to_end(name)
        while self.nbytes > limits.max_bytes or len(self) > limits.max_entries:
            self._drop(next(iter(self._older or self._newest)))
        while len(self._latest) > 2 * limits.max_entries:
            self._latest.popitem(last=False)

    def clear(self) -> None:
        self._older.clear()
        self._newest.clear()
        self._latest.clear()
        self.nbytes = 0

    def _get(self, key: bytes) -> Turn | None:
        for place in (self._newest, self._older):
            if (entry := place.get(key)) is not None:
                place[key] = (self._now_s(), entry[1])
                place.move_to_end(key)
                return entry[1]
        return None

    def _drop(self, key: bytes) -> None:
        for place in (self._newest, self._older):
            if (entry := place.pop(key, None)) is not None:
                self.nbytes -= entry[1].nbytes

    def _expire(self) -> None:
        before = self._now_s() - self._limits.ttl_s
        for place in (self._older, self._newest):
            while place and next(iter(place.values()))[0] < before:
                self._drop(next(iter(place)))


# --- names of histories ----------------------------------------------------------------------------------------------


def history_of(prompt: ChatPrompt, *, tenant: str | None, cache_salt: str | None, session_id: str | None) -> History:
    """Hash a request's conversation, message by message; O(its bytes)."""
    scope = salt_key("conversation", tenant, cache_salt)
    shape = {
        "tools": list(prompt.tools),
        "kwargs": dict(prompt.template_kwargs),
    }
    keys = [_hash(scope, shape)]
    root = None
    for message in prompt.messages:
        keys.append(_chain(keys[-1], message))
        if root is None and message.get("role") == "user":
            root = keys[-1]
    answers = tuple(
        count for count in range(len(prompt.messages), 0, -1) if prompt.messages[count - 1].get("role") == "assistant"
    )
    session = None if session_id is None else _hash(scope, {"session": session_id})
    return History(tuple(keys), answers, _hash(root or keys[-1], "root"), session)


def canonical_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without what clients change on the way back.

    Of an assistant message only its text (surrounding space aside: clients trim) and its tool calls' names and
    arguments count; null fields and identifiers of calls are the client's business. Other messages count whole.
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
        plain["tool_calls"] = [_canonical_call(call) for call in calls]
    return plain


def _canonical_call(call: Any) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else call
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError):  # what is no JSON is compared as the text that it is
            arguments = json.loads(arguments)
    return {"name": function.get("name"), "arguments": arguments}


def _chain(parent: bytes, message: Mapping[str, Any]) -> bytes:
    return _hash(parent, canonical_message(message))


def _hash(key: bytes, value: Any) -> bytes:
    # Anything that is no JSON was refused when the prompt was rendered; key order is the template's input, so it stays.
    data = json.dumps(value, ensure_ascii=True, separators=(",", ":")).encode()
    return hashlib.blake2b(data, digest_size=32, key=key).digest()


# --- texts and ids ---------------------------------------------------------------------------------------------------


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
    rest = rendered[turn.prompt_chars :]
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
