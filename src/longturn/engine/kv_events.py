"""What becomes of cached pages, for whoever routes requests to the engine that has their prefix.

The engine collects events in the order in which they happened and hands them over once a step. Whoever applies them
to an empty set knows at any time which page hashes a prompt may hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Successive pages of one prompt can be hit from now on."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    """Hash of the page before the first; None where the prompt begins with it."""
    tokens: bytes
    """Their token ids, int32 little-endian, PAGE_TOKENS for each page."""


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """These pages cannot be hit any more."""

    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """No page can be hit any more."""


CacheEvent = PagesStored | PagesRemoved | CacheCleared


class CacheEvents:
    """Events that were not handed over yet."""

    __slots__ = ("_events", "_removed")

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []
        self._removed: list[bytes] = []
        """Removed in a row: one event for all."""

    def stored(self, parent: bytes | None, pages: Sequence[tuple[bytes, bytes]]) -> None:
        """`pages`: hash and token ids of each, in order, at least one."""
        self._flush()
        hashes = tuple(page_hash for page_hash, _ in pages)
        self._events.append(PagesStored(hashes, parent, b"".join(tokens for _, tokens in pages)))

    def removed(self, page_hash: bytes) -> None:
        self._removed.append(page_hash)

    def cleared(self) -> None:
        self._flush()
        self._events.append(CacheCleared())

    def take(self) -> tuple[CacheEvent, ...]:
        """Events since the last call, in order."""
        self._flush()
        events = tuple(self._events)
        self._events.clear()
        return events

    def _flush(self) -> None:
        if self._removed:
            self._events.append(PagesRemoved(tuple(self._removed)))
            self._removed.clear()


class CacheListener(Protocol):
    """Whoever wants to know what becomes of cached pages. Called on the engine's thread, so it must not wait."""

    def tell(self, events: tuple[CacheEvent, ...]) -> None:
        """At least one event, in the order in which they happened."""
        ...

    def close(self) -> None:
        """The engine has ended."""
        ...
