"""The page pool: who holds which page, and what becomes of a page that nobody holds.

A page is in exactly one of three states: referenced by requests; free and blank; free and cached (in `Retention`,
findable in `PrefixCache`). Page 0 is the null page that padded rows point at; it is never handed out.

With a host tier, cached content that is evicted lives on there, and the longest cached prefix is found in both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from longturn.engine.host_tier import HostTier
from longturn.engine.pages import Page, unlink
from longturn.engine.prefix_cache import PrefixCache
from longturn.engine.retention import Retention


class Prefix(NamedTuple):
    """The longest cached prefix of a request."""

    pages: list[Page | None]
    """Of each cached page in order, the page of the device, or None where it rests in host memory."""
    slots: list[Page]
    """Host slots of those that rest there, in order."""


class PagePool:
    """All pages of one executor."""

    __slots__ = ("_blank", "_on_forget", "_retention", "cache", "evictions", "host", "pages", "releases", "used")

    def __init__(
        self,
        pages: int,
        half_life_ns: int,
        on_forget: Callable[[bytes], None] | None = None,
        *,
        host_slots: int = 0,
    ) -> None:
        """
        Args:
            pages: ids 0 .. pages-1; 0 is the null page.
            half_life_ns: of a session's claim on its pages, see `Retention`.
            on_forget: told the hash of every page that can no longer be hit.
            host_slots: pages that host memory holds beside; 0: there is no host tier.
        """
        self.pages = tuple(Page(i) for i in range(pages))
        self._blank = deque(reversed(self.pages[1:]))
        """The right end is handed out first."""
        self._retention = Retention(pages - 1, half_life_ns)
        self._on_forget = on_forget
        forgot = None if on_forget is None else self._forgot
        self.host = HostTier(host_slots, half_life_ns, forgot) if host_slots else None
        self.cache = PrefixCache(forgot)
        self.used = 0
        """Pages with references."""
        self.evictions = 0
        self.releases = 0
        """Counts up whenever pages came free: an allocation that failed may be tried again."""

    @property
    def capacity(self) -> int:
        """Pages that can be handed out."""
        return len(self.pages) - 1

    @property
    def free(self) -> int:
        """Pages that `allocate` can hand out now, those with cached content included."""
        return len(self.pages) - 1 - self.used

    @property
    def cached(self) -> int:
        """Free pages that hold a reusable prefix."""
        return self.free - len(self._blank)

    def allocate(self, now_ns: int) -> Page | None:
        """A page for one request to write, evicting cached content if no blank page is left; None if all are held."""
        page = self._blank.pop() if self._blank else self._evict(now_ns)
        if page is None:
            return None
        page.refs = 1
        self.used += 1
        return page

    def _evict(self, now_ns: int) -> Page | None:
        """Take out the cached page with the least worth; its content lives on in the host tier, if there is one."""
        page = self._retention.evict(now_ns)
        if page is None:
            return None
        if self.host is not None:
            self.host.keep(page, now_ns)
        self.cache.forget(page)
        self.evictions += 1
        return page

    def keep_blank(self, count: int, now_ns: int) -> None:
        """Evict until `count` pages are blank, so that who takes them later need not wait for their copy to the host.

        They are handed out after all others, so that their copies are the older ones when they are.
        """
        while len(self._blank) < count:
            page = self._evict(now_ns)
            if page is None:
                return
            self._blank.appendleft(page)

    # --- cached content ---------------------------------------------------------------------------------------------

    def longest(self, hashes: Sequence[bytes], limit: int) -> Prefix:
        """The longest cached prefix in both tiers, at most `limit` pages."""
        found = self.cache.longest(hashes, limit)
        pages: list[Page | None] = [*found]
        slots: list[Page] = []
        if self.host is not None:
            for page_hash in hashes[len(found) : limit]:
                page = self.cache.get(page_hash)
                if page is None:
                    slot = self.host.find(page_hash)
                    if slot is None:
                        break
                    slots.append(slot)
                pages.append(page)
        return Prefix(pages, slots)

    def cached_prefix(self, hashes: Sequence[bytes], limit: int) -> int:
        """Pages of the longest cached prefix in both tiers."""
        if self.host is None:
            return len(self.cache.longest(hashes, limit))
        return len(self.longest(hashes, limit).pages)

    def put(self, page: Page, page_hash: bytes) -> bool:
        """Make a page findable, as `PrefixCache.put`; a copy of it that rests in host memory need not stay there."""
        named = self.cache.put(page, page_hash)
        if named and self.host is not None:
            self.host.doubled(page_hash)
        return named

    def forget(self, page: Page) -> None:
        """Forget content that is not to be trusted, in both tiers."""
        page_hash = page.hash
        if self.host is not None and page_hash is not None:
            self.host.forget(page_hash)
        self.cache.forget(page)

    def lose(self, page: Page) -> None:
        """The load of this page has failed: nothing can be hit of what it was to hold."""
        if self.host is not None:
            self.host.forget(self.host.loading.pop(page.id))
        if page.hash is not None:
            self.cache.forget(page)

    def _forgot(self, page_hash: bytes) -> None:
        """One tier has forgotten a page: tell, unless the other still knows it."""
        known = page_hash in self.cache or (self.host is not None and page_hash in self.host)
        if not known and self._on_forget is not None:
            self._on_forget(page_hash)

    # --- references -------------------------------------------------------------------------------------------------

    def share(self, pages: Sequence[Page]) -> None:
        """One more request refers to these cached pages (a hit): they are protected from now on."""
        free = [page for page in pages if page.refs == 0]
        unlink(free)
        self.used += len(free)
        for page in pages:
            page.protected = True
            page.refs += 1

    def release(self, pages: Sequence[Page], now_ns: int, claimed: bool, distrust: bool = False) -> None:
        """A request gives its pages back, in its page table's order.

        Args:
            claimed: the request or its session is expected back.
            distrust: the request failed: content that no other request uses is forgotten, because it may be why.

        They are freed tail first, so that among pages released together the end of a prefix is evicted before its
        beginning: the beginning is useful without the end, and to more requests.
        """
        cached: list[Page] = []
        for page in reversed(pages):
            refs = page.refs - 1
            if refs < 0:
                raise RuntimeError(f"{page!r} is released more often than it was taken")
            page.refs = refs
            if refs == 0:
                self.used -= 1
                if distrust and page.hash is not None:
                    self.forget(page)
                if page.hash is None:
                    page.protected = False
                    self._blank.append(page)
                else:
                    cached.append(page)
        self._retention.extend(cached, now_ns, claimed)
        self.releases += 1

    def unclaim(self, hashes: Sequence[bytes], now_ns: int) -> None:
        """Nobody is expected back for these pages of one chain, in order; those in use or used again keep their place.

        The tail first, as in `release`.
        """
        for page_hash in reversed(hashes):
            page = self.cache.get(page_hash)
            if page is not None and page.home is not None and page.claimed and not page.protected:
                self._retention.unclaim(page, now_ns)

    def clear_cache(self) -> int:
        """Forget all cached content, in both tiers; the number of pages of the device that were known.

        Pages that requests hold stay theirs. What they compute from now on is known again.
        """
        if self.host is not None:
            self.host.clear()
        pages = self.cache.clear()
        for page in pages:
            if page.refs == 0:
                self._retention.remove(page)
                self._blank.append(page)
        # An admission that found no room for what it shared with the cache may look different now.
        self.releases += 1
        return len(pages)

    def check(self, references: dict[int, int]) -> None:
        """Compare with the references that requests hold (page id -> count).

        Raises:
            RuntimeError: a page is lost, owned without reference, or free while in use.
        """
        blank = [page.id for page in self._blank]
        if len(set(blank)) != len(blank):
            raise RuntimeError("a page is in the blank list twice")
        blanks = set(blank)
        used = 0
        for page in self.pages[1:]:
            if page.refs != references.get(page.id, 0):
                raise RuntimeError(f"{page!r}: requests hold {references.get(page.id, 0)} references")
            states = (page.refs > 0) + (page.home is not None) + (page.id in blanks)
            if states != 1:
                raise RuntimeError(f"{page!r} is in {states} states instead of one (held, cached, blank)")
            if page.home is not None and page.hash is None:
                raise RuntimeError(f"{page!r} is kept without reusable content")
            used += page.refs > 0
        if self.pages[0].refs or 0 in references or self.pages[0].home is not None or 0 in blanks:
            raise RuntimeError("the null page was handed out")
        if used != self.used or len(self._retention) != self.cached:
            raise RuntimeError(f"counters are off: {used} held (counted {self.used}), {len(self._retention)} cached")
        self.cache.check(self.pages)
        if self.host is not None:
            self.host.check(self.cache)
            for page_id in self.host.loading:
                if self.pages[page_id].refs == 0:
                    raise RuntimeError(f"{self.pages[page_id]!r} is being loaded for nobody")
