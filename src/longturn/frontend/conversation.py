"""Conversation memory: turn N+1's prompt is turn N's exact token ids and the new part, never re-rendered.

Rendering and tokenising a history again does not give the tokens that the model wrote: "hel" + "lo" comes back as
"hello", and from there on every cached page is lost. So each finished turn leaves its ids here (prompt and output),
under a hash of the messages that a client will send back (`conversation_keys`). What makes this safe is checked on
every use: the new rendering must begin with exactly the text that the remembered ids stand for; the rest of it is the
new part (`conversation_ids`). Where it does not (the template drops old reasoning, the date has changed), the longest
earlier turn that it does continue is taken, and the first differing token is reported with the reason
(`conversation_reuse`).

Entries are found by (tenant, cache salt, tools, template arguments, messages), so nothing crosses between tenants.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from longturn.frontend.conversation_ids import Turn
from longturn.frontend.conversation_keys import History, answer_key

_NAMES = 5
"""Most names of one conversation."""


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    max_bytes: int = 64 << 20
    """Token ids, hashes and texts of all entries."""
    max_entries: int = 4096
    ttl_s: float = 3600.0
    """An entry that was not used for this long is gone."""


@dataclass(frozen=True, slots=True)
class Found:
    """What the memory knows of a request's history."""

    turn: Turn | None
    """A turn that the history repeats unchanged."""
    is_last: bool
    """It is the last answer in the history: nothing after it was edited."""
    latest: Turn | None
    """What this conversation left behind last, edited since or not."""
    other_salt: bool = False
    """Nothing is known under this salt, and the session was last seen under another one."""


class ConversationMemory:
    """Bounded and expiring. To be used from one thread."""

    def __init__(self, limits: MemoryLimits | None = None, *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits or MemoryLimits()
        self._now_s = now_s
        # Turns that a later one has extended go first; each in order of last use.
        self._older: OrderedDict[bytes, tuple[float, Turn]] = OrderedDict()
        self._newest: OrderedDict[bytes, tuple[float, Turn]] = OrderedDict()
        self._latest: OrderedDict[bytes, bytes] = OrderedDict()
        self._scopes: OrderedDict[bytes, bytes] = OrderedDict()
        """Where each session was last."""
        self.nbytes = 0
        self.hits = 0
        """Requests that extended a remembered turn."""

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
            for name in history.names:
                key = self._latest.get(name)
                if key is not None and (latest := self._get(key)) is not None:
                    break
        other_salt = False
        if latest is None and found is None and history.session is not None:
            other_salt = self._scopes.get(history.session, history.scope) != history.scope
        return Found(found, is_last, latest, other_salt)

    def answers(self, history: History) -> dict[int, Turn]:
        """The turns that wrote the answers in a history, those that are remembered, by the index of their message."""
        self._expire()
        turns = {count - 1: self._get(history.keys[count]) for count in reversed(history.answers)}
        return {index: turn for index, turn in turns.items() if turn is not None}

    def remember(self, history: History, answer: Mapping[str, Any] | bytes, turn: Turn) -> None:
        """Keep a finished turn.

        Args:
            history: the request's.
            answer: the message that the client will send back, or the key that the history will have with it.
            turn: what the request has left behind.
        """
        limits = self._limits
        if turn.nbytes > limits.max_bytes or limits.max_entries < 1:
            return
        key = answer if isinstance(answer, bytes) else answer_key(history, answer)
        self._drop(key)
        if history.answers:
            parent = history.keys[history.answers[0]]
            if (entry := self._newest.pop(parent, None)) is not None:
                self._older[parent] = entry
        self._newest[key] = (self._now_s(), turn)
        self.nbytes += turn.nbytes
        for name in history.names:
            self._latest[name] = key
            self._latest.move_to_end(name)
        if history.session is not None:
            self._scopes[history.session] = history.scope
            self._scopes.move_to_end(history.session)
        while self.nbytes > limits.max_bytes or len(self) > limits.max_entries:
            self._drop(next(iter(self._older or self._newest)))
        while len(self._latest) > _NAMES * limits.max_entries:
            self._latest.popitem(last=False)
        while len(self._scopes) > limits.max_entries:
            self._scopes.popitem(last=False)

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
