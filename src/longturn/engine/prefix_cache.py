"""The prefix cache: from the chained hash of a page's content to the page that holds it.

A chained hash names the page's tokens and everything before them, so that the longest cached prefix of a request is
found by looking its hashes up in order until one is missing. A page stands here from when its content is computed
until it is evicted, whether requests refer to it or not.
"""

from __future__ import annotations

from collections.abc import Sequence

from longturn.engine.pages import Page


class PrefixCache:
    """hash -> page."""

    __slots__ = ("_pages",)

    def __init__(self) -> None:
        self._pages: dict[bytes, Page] = {}

    def __len__(self) -> int:
        return len(self._pages)

    def __contains__(self, page_hash: bytes) -> bool:
        return page_hash in self._pages

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
        page.hash = None
        page.protected = False

    def check(self, pages: Sequence[Page]) -> None:
        """Raises RuntimeError unless the names of `pages` (the whole pool) and this table agree."""
        named = {page.hash: page for page in pages if page.hash is not None}
        if named != self._pages:
            raise RuntimeError(f"prefix cache holds {len(self._pages)} hashes, pages hold {len(named)}")
