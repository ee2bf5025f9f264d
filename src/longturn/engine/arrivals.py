"""What admission finds of a request's prompt in the two tiers, and who waits for pages on their way between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from longturn.config import PAGE_TOKENS
from longturn.engine.pages import Page
from longturn.engine.pool import PagePool, Prefix
from longturn.engine.sequence import Sequence


class Hits(NamedTuple):
    """Pages that need not be computed."""

    prefix: Prefix
    shared: list[Page]
    """Those of the prefix that are on the device."""
    last: Page | None = None
    """The page of the device that holds the end of a sequence whose every page is cached. It must be copied, because
    the last token is computed again."""
    last_slot: Page | None = None
    """The host slot that holds it, if the device does not."""


NO_HITS = Hits(Prefix([], []), [])


def find_hits(pool: PagePool, sequence: Sequence, copies_pages: bool) -> Hits:
    """What is cached of a waiting `sequence`. `copies_pages`: the executor can copy a page on the device."""
    prefix = pool.longest(sequence.hashes, sequence.hit_limit)
    hits = len(prefix.pages)
    shared = [page for page in prefix.pages if page is not None]
    if sequence.seen % PAGE_TOKENS or hits != sequence.hit_limit or hits >= len(sequence.hashes):
        return Hits(prefix, shared)
    host, page_hash = pool.host, sequence.hashes[hits]
    page = pool.cache.get(page_hash)
    if page is not None and (host is None or page.id not in host.loading):
        return Hits(prefix, shared, last=page if copies_pages else None)
    return Hits(prefix, shared, last_slot=None if host is None else host.find(page_hash))


def place_hits(pool: PagePool, hits: Hits, fresh: list[Page]) -> tuple[list[Page], list[Page]]:
    """The pages of the prefix in order, and what is left of `fresh`; loads what rests on the host into fresh pages."""
    host = pool.host
    if host is None or not (hits.prefix.slots or hits.last_slot):
        return hits.shared, fresh
    targets = iter(fresh)
    slots = iter(hits.prefix.slots)
    filled: list[Page] = []
    for page in hits.prefix.pages:
        if page is None:
            slot, page = next(slots), next(targets)
            # Findable from now on: who hits it waits for the same copy.
            pool.cache.put(page, host.load(slot, page))
            page.protected = True
        filled.append(page)
    rest = list(targets)
    if hits.last_slot is not None:
        host.load(hits.last_slot, rest[0])  # private, since it is written to
    return filled, rest


class Arrivals:
    """Requests that wait for pages on their way from host memory."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: dict[int, list[Sequence]] = {}

    def expect(self, sequence: Sequence, loading: Iterable[int]) -> None:
        """`sequence` has nothing to compute before the page ids in `loading` that it holds have arrived."""
        on_their_way = set(loading)
        for page in sequence.pages:
            if page.id in on_their_way:
                self._waiting.setdefault(page.id, []).append(sequence)
                sequence.arriving += 1

    def arrived(self, page_id: int) -> list[Sequence]:
        """The requests that waited for this page, in the order of their admission."""
        sequences = self._waiting.pop(page_id, [])
        for sequence in sequences:
            sequence.arriving -= 1
        return sequences

    def check(self, holders: Iterable[Sequence], loading: Iterable[int]) -> None:
        """Raises RuntimeError unless exactly the holders of pages in `loading` wait for them."""
        on_their_way = set(loading)
        if on_their_way != set(self._waiting):
            raise RuntimeError(f"{len(on_their_way)} pages are being loaded, {len(self._waiting)} are waited for")
        for sequence in holders:
            pages = [page.id for page in sequence.pages if page.id in on_their_way]
            if len(pages) != sequence.arriving or any(sequence not in self._waiting[page] for page in pages):
                raise RuntimeError(f"request {sequence.request_id} miscounts the pages that it waits for")
