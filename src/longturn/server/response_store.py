"""Responses that can be fetched and continued later: bounded, expiring, each client's apart from the others'.

A response that continues another one shares what came before with it, so a long conversation is kept once and not once
a turn. It is also why forgetting a response frees its part of the conversation only when nothing continues it.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

_ENTRY_BYTES = 1024
"""Bytes counted for an entry's own objects."""
_ITEM_BYTES = 256
"""Bytes counted for finding a response by an item of its output."""
_Key = tuple[str | None, str]
"""The client (see `gate`), and the id of a response or of an item."""


@dataclass(slots=True)
class Part:
    """What one response added to a conversation."""

    messages: tuple[Mapping[str, Any], ...]
    """Its input and its answer, as the chat API has them."""
    before: Part | None
    nbytes: int = 0
    users: int = 0
    """Stored responses and parts that need this one."""

    def conversation(self) -> list[Mapping[str, Any]]:
        """All messages from the beginning."""
        parts = []
        part: Part | None = self
        while part is not None:
            parts.append(part.messages)
            part = part.before
        return [message for messages in reversed(parts) for message in messages]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it is given out, and its conversation."""

    body: bytes
    part: Part
    items: tuple[str, ...] = ()
    """Ids of the items that its output consists of."""

    @property
    def nbytes(self) -> int:
        """What is counted for it, without its part of the conversation."""
        return _ENTRY_BYTES + len(self.body) + _ITEM_BYTES * len(self.items)


class ResponseStore:
    """To be used from one thread."""

    def __init__(self, max_bytes: int, ttl_s: float, *, now_s: Callable[[], float] = time.monotonic) -> None:
        """
        Args:
            max_bytes: bodies and messages of all responses, as JSON; 0 keeps none.
            ttl_s: a response that was not used for this long is forgotten.
            now_s: the time.
        """
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._now_s = now_s
        self._entries: OrderedDict[_Key, tuple[float, StoredResponse]] = OrderedDict()
        """In order of last use."""
        self._holders: dict[_Key, str] = {}
        """Ids of responses by those of their items."""
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def keeps(self) -> bool:
        """Whether anything can be stored at all."""
        return self._max_bytes > 0

    def get(self, tenant: str | None, response_id: str) -> StoredResponse | None:
        """A response of this client; None if there is none, or it was forgotten."""
        self._expire()
        entry = self._entries.pop((tenant, response_id), None)
        if entry is None:
            return None
        self._entries[tenant, response_id] = (self._now_s(), entry[1])
        return entry[1]

    def holder(self, tenant: str | None, item_id: str) -> StoredResponse | None:
        """The response of this client whose output has an item of that id."""
        response_id = self._holders.get((tenant, item_id))
        return None if response_id is None else self.get(tenant, response_id)

    def put(
        self,
        tenant: str | None,
        response_id: str,
        body: bytes,
        messages: tuple[Mapping[str, Any], ...],
        before: Part | None,
        items: tuple[str, ...] = (),
    ) -> None:
        """Keep a response, and forget those unused for longest if there is no room.

        Args:
            tenant: whose it is.
            response_id: by which it is asked for.
            body: its JSON.
            messages: its input and its answer.
            before: the end of the conversation that it continues.
            items: ids of the items that its output consists of.
        """
        self._drop((tenant, response_id))
        part = Part(messages, before, len(msgspec.json.encode(messages)))
        self._use(part)
        stored = StoredResponse(body, part, items)
        self._entries[tenant, response_id] = (self._now_s(), stored)
        self._holders |= {(tenant, item_id): response_id for item_id in items}
        self.nbytes += stored.nbytes
        self._expire()
        while self.nbytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def delete(self, tenant: str | None, response_id: str) -> bool:
        """Forget a response. Returns whether there was one."""
        self._expire()
        return self._drop((tenant, response_id))

    def _drop(self, key: _Key) -> bool:
        entry = self._entries.pop(key, None)
        if entry is None:
            return False
        stored = entry[1]
        for item_id in stored.items:
            self._holders.pop((key[0], item_id), None)
        self.nbytes -= stored.nbytes
        self._release(stored.part)
        return True

    def _use(self, part: Part) -> None:
        """Count one more user. A part that nobody used is counted again with all that comes before it."""
        current: Part | None = part
        while current is not None:
            current.users += 1
            if current.users > 1:
                return
            self.nbytes += current.nbytes
            current = current.before

    def _release(self, part: Part) -> None:
        current: Part | None = part
        while current is not None:
            current.users -= 1
            if current.users:
                return
            self.nbytes -= current.nbytes
            current = current.before

    def _expire(self) -> None:
        before_s = self._now_s() - self._ttl_s
        while self._entries and next(iter(self._entries.values()))[0] < before_s:
            self._drop(next(iter(self._entries)))
