"""The page pool: who holds which page, and what becomes of a page that nobody holds.

A page is in exactly one of three states: referenced by requests; free and blank; free and cached (in `Retention`,
findable in `PrefixCache`). Page 0 is the null page that padded rows point at; it is never handed out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from longturn.engine.pages import Page
from longturn.engine.prefix_cache import PrefixCache
from longturn.engine.retention import Retention


class PagePool:
    """All pages of one executor."""

    __slots__ = ("_blank", "_retention", "cache", "evictions", "pages", "releases", "used")

    def __init__(self, pages: int, half_life_ns: int) -> None:
        """
        Args:
            pages: ids 0 .. pages-1; 0 is the null page.
            half_life_ns: of a session's claim on its pages, see `Retention`.
        """
        self.pages = tuple(Page(i) for i in range(pages))
        self._blank = list(reversed(self.pages[1:]))
        self._retention = Retention(pages - 1, half_life_ns)
        self.cache = PrefixCache()
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
        if self._blank:
            page = self._blank.pop()
        else:
            evicted = self._retention.evict(now_ns)
            if evicted is None:
                return None
            self.cache.forget(evicted)
            self.evictions += 1
            page = evicted
        page.refs = 1
        self.used += 1
        return page

    def share(self, pages: Iterable[Page]) -> None:
        """One more request refers to these cached pages (a hit): they are protected from now on."""
        for page in pages:
            page.protected = True
            if page.refs == 0:
                self._retention.remove(page)
                self.used += 1
            page.refs += 1

    def release(self, pages: Sequence[Page], now_ns: int, claimed: bool, distrust: bool = False) -> None:
        """A request gives its pages back, in its page table's order.

        Args:
            claimed: the request or its session is expected back.
            distrust: the request failed: content that no other request uses is forgotten, because it may be why.

        They are freed tail first, so that among pages released together the end of a prefix is evicted before its
        beginning: the beginning is useful without the end, and to more requests.
        """
        for page in reversed(pages):
            if page.refs <= 0:
                raise RuntimeError(f"{page!r} is released more often than it was taken")
            page.refs -= 1
            if page.refs == 0:
                self.used -= 1
                if distrust and page.hash is not None:
                    self.cache.forget(page)
                if page.hash is None:
                    page.protected = False
                    self._blank.append(page)
                else:
                    self._retention.add(page, now_ns, claimed)
        self.releases += 1

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
