"""The prefix cache: from the chained hash of a page's content to the page that holds it.

A chained hash names the page's tokens and everything before them, so that the longest cached prefix of a request is
found by looking its hashes up in order until one is missing. A page stands here from when its content is computed
until it is evicted, whether requests refer to it or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from longturn.engine.pages import Page


class PrefixCache:
    """hash -> page."""

    __slots__ = ("_on_forget", "_pages")

    def __init__(self, on_forget: Callable[[bytes], None] | None = None) -> None:
        """`on_forget` is told the hash of every page that is no longer findable."""
        self._pages: dict[bytes, Page] = {}
        self._on_forget = on_forget

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page_hash: bytes) -> bool:
        return page_hash in self._pages

    def get(self, page_hash: bytes) -> Page | None:
        """The page that holds this content."""
        return self._pages.get(page_hash)

    def longest(self, hashes: Sequence[bytes], limit: int) -> list[Page]:
        """Pages that hold the longest cached prefix, at most `limit` of them."""
        found: list[Page] = []
        get = self._pages.get
        for page_hash in hashes[:limit]:
            page = get(page_hash)
            if page is None:
                break
            found.append(page)
        return found

    def put(self, page: Page, page_hash: bytes) -> bool:
        """Make a computed page findable.

        Two requests may compute equal content at once. The first page keeps the name; the other stays private to its
        request and holds nothing reusable once that ends. Returns whether `page` got the name.
        """
        if page.hash is not None or page_hash in self._pages:
            return False
        self._pages[page_hash] = page
        page.hash = page_hash
        return True

    def forget(self, page: Page) -> None:
        """The page is about to be overwritten."""
        if page.hash is None or self._pages.pop(page.hash) is not page:
            raise RuntimeError(f"{page!r} is not the cache's page for its hash")
        if self._on_forget is not None:
            self._on_forget(page.hash)
        page.hash = None
        page.protected = False

    def clear(self) -> list[Page]:
        """Forget every page, without telling of each; the pages that were known."""
        pages = list(self._pages.values())
        self._pages.clear()
        for page in pages:
            page.hash = None
            page.protected = False
        return pages

    def check(self, pages: Sequence[Page]) -> None:
        """Raises RuntimeError unless the names of `pages` (the whole pool) and this table agree."""
        named = {page.hash: page for page in pages if page.hash is not None}
        if named != self._pages:
            raise RuntimeError(f"prefix cache holds {len(self._pages)} hashes, pages hold {len(named)}")
