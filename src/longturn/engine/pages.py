"""A page's bookkeeping, and the intrusive list that free pages wait in.

Pages are made once. They are linked through their own fields, so that a page leaves the middle of a list in O(1)
and a step allocates no memory for lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence


class Page:
    """One page of the pool: PAGE_TOKENS positions of every layer and lane, known here by its id alone."""

    __slots__ = ("claimed", "hash", "home", "id", "next", "prev", "protected", "refs", "stamp_ns")

    def __init__(self, page_id: int) -> None:
        self.id = page_id
        self.refs = 0
        """Requests whose page table holds this page."""
        self.hash: bytes | None = None
        """Chained hash of the content while the prefix cache knows this page."""
        self.protected = False
        """Its content was asked for again after it was computed."""
        self.claimed = False
        """Released by a session (or a preempted request) that is expected back."""
        self.stamp_ns = 0
        """When it was last released."""
        self.home: PageList | None = None
        """The list it is in, if any."""
        self.prev: Page | None = None
        self.next: Page | None = None

    def __repr__(self) -> str:
        return f"Page({self.id}, refs={self.refs}, hash={self.hash.hex()[:8] if self.hash else None})"


class PageList:
    """Doubly linked list of pages; the head leaves first."""

    __slots__ = ("_length", "head", "tail")

    def __init__(self) -> None:
        self.head: Page | None = None
        self.tail: Page | None = None
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Page]:
        page = self.head
        while page is not None:
            yield page
            page = page.next

    def append(self, page: Page) -> None:
        """Put `page`, which is in no list, at the tail."""
        if page.home is not None:
            raise RuntimeError(f"{page!r} is in a free list already")
        page.home = self
        page.prev = self.tail
        if self.tail is None:
            self.head = page
        else:
            self.tail.next = page
        self.tail = page
        self._length += 1

    def extend(self, pages: Sequence[Page]) -> None:
        """`append` of each, in order, at half of the time: a request has a thousand pages."""
        tail = self.tail
        for page in pages:
            if page.home is not None:
                raise RuntimeError(f"{page!r} is in a free list already")
            page.home = self
            page.prev = tail
            if tail is None:
                self.head = page
            else:
                tail.next = page
            tail = page
        self.tail = tail
        self._length += len(pages)

    def remove(self, page: Page) -> None:
        """Take `page` out, wherever it stands. O(1)."""
        if page.home is not self:
            raise RuntimeError(f"{page!r} is not in this free list")
        unlink((page,))


def unlink(pages: Sequence[Page]) -> None:
    """Take each page out of the list that it is in, in one loop: a prompt can have a thousand."""
    for page in pages:
        home = page.home
        if home is None:
            raise RuntimeError(f"{page!r} is not free")
        before, after = page.prev, page.next
        if before is None:
            home.head = after
        else:
            before.next = after
        if after is None:
            home.tail = before
        else:
            after.prev = before
        page.home = page.prev = page.next = None
        home._length -= 1
