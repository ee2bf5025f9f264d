"""Host memory as a second tier of the page pool, as far as an engine without one can be used to show it.

The engine is given the pages of both tiers as one pool, so it keeps and evicts as if all were alike. The executor
remembers which of them are in the chips' own memory, by last use, and a request whose prefix has left it waits for the
copy. A real tier copies before a request joins a step; here the step that it joins waits, so the copies cost more than
they would. That requests in flight together fit into the chips' own memory is for the caller to check.
"""

from __future__ import annotations

from collections.abc import Callable

from longturn.config import PAGE_TOKENS
from longturn.engine.records import StepPlan


class HostTier:
    """Which pages of one engine are on its chips."""

    __slots__ = ("_near", "_near_pages", "_transfer_ns", "fetched_pages")

    def __init__(self, near_pages: int, transfer_ns: Callable[[int], int]) -> None:
        """
        Args:
            near_pages: pages that fit into the chips' own memory.
            transfer_ns: time of copying so many pages from the host, on every chip at once.
        """
        self._near: dict[int, None] = {}
        """Pages on the chips, the longest unused first."""
        self._near_pages = near_pages
        self._transfer_ns = transfer_ns
        self.fetched_pages = 0

    def fetch_ns(self, plan: StepPlan) -> int:
        """How long a plan's new rows wait for pages that lie in host memory."""
        near = self._near
        if not plan.new_rows and not plan.new_pages:
            return 0
        starts = {item.row: item.start for item in plan.work} if plan.new_rows else {}
        missing = 0
        for row in plan.new_rows:
            filled = starts.get(row.row, 0) // PAGE_TOKENS
            for place, page in enumerate(row.pages):
                if page in near:
                    del near[page]
                elif place < filled:
                    missing += 1
                near[page] = None
        for _, pages in plan.new_pages:
            for page in pages:
                near.pop(page, None)
                near[page] = None
        while len(near) > self._near_pages:
            del near[next(iter(near))]
        self.fetched_pages += missing
        return self._transfer_ns(missing)
