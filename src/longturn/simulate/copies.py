"""Copies between the chips' pages and host memory, in virtual time, as a plan of the engine orders them.

One link to the host and one back, each doing one page after the other, beside steps. Whoever touches a page or a slot
first waits for the copies that touch it, as `engine.records.StepPlan` wants it: a save for the load that still reads
its slot, a load for the save that still fills it, a step for the save of a page that it overwrites. Loads are given to
their link some at a time, when a step is launched or read, as an executor does that must not fall behind.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from longturn.config import PAGE_TOKENS
from longturn.engine.clock import VirtualClock
from longturn.engine.records import StepPlan

BURST_BYTES = 1 << 30
MOST_BURST_PAGES = 128
"""Loads on their way at once, as the GPU executor has it."""
GROUP_BYTES = 64 << 20
MOST_GROUP_PAGES = 16
"""Copies given together that are over together, likewise."""


class PageCopies:
    """Copies of one engine."""

    __slots__ = (
        "_burst", "_group", "_load_free_ns", "_loaded", "_loads", "_on_page", "_on_slot", "_page_ns", "_queue",
        "_queued", "_save_free_ns", "_tables",
    )  # fmt: skip

    def __init__(self, page_ns: int, page_bytes: int) -> None:
        """
        Args:
            page_ns: of one page in one direction, on every chip at once.
            page_bytes: of one page on one chip.
        """
        self._page_ns = page_ns
        self._burst = max(2, min(MOST_BURST_PAGES, BURST_BYTES // page_bytes))
        self._group = max(1, min(MOST_GROUP_PAGES, GROUP_BYTES // page_bytes))
        self._save_free_ns = self._load_free_ns = 0
        """When each link has done what it was given."""
        self._on_page = _Until()
        self._on_slot = _Until()
        self._queue: deque[tuple[int, int]] = deque()
        """(slot, page): loads that their link has not been given."""
        self._queued: Counter[int] = Counter()
        """Slots of those."""
        self._loads: deque[tuple[int, int]] = deque()
        """(end, page): loads on their way, in order."""
        self._loaded: list[int] = []
        """Pages whose load is over and that no result has told of."""
        self._tables: dict[int, list[int]] = {}
        """Pages of each row."""

    def begin(self, plan: StepPlan, start_ns: int, now_ns: int) -> int:
        """Give a plan's copies to their links.

        Args:
            plan: being launched.
            start_ns: when its step begins if it has nothing to wait for.
            now_ns: when it is launched.

        Returns:
            When its step begins.
        """
        self._settle(now_ns)
        self._on_page.forget(now_ns)
        self._on_slot.forget(now_ns)
        for first in range(0, len(plan.save_pages), self._group):
            pairs = plan.save_pages[first : first + self._group]
            while any(self._queued[slot] for _, slot in pairs):
                self._load(1, now_ns)  # what the slot holds is wanted on the chips first
            self._save_free_ns = self._copy(pairs, self._save_free_ns, now_ns)
        for row in plan.freed_rows:
            self._tables.pop(row, None)
        for new in plan.new_rows:
            self._tables[new.row] = list(new.pages)
        for row, pages in plan.new_pages:
            self._tables.setdefault(row, []).extend(pages)
        if self._on_page:
            start_ns = max(start_ns, self._on_page.last(self._written(plan)))
        if plan.load_pages:
            for source, _ in plan.copied_pages:
                self._on_page.add(source, start_ns)  # copied when the step begins, and not to be loaded into before
            self._queue.extend(plan.load_pages)
            self._queued.update(slot for slot, _ in plan.load_pages)
        self._give(now_ns)
        return start_ns

    def busy_pages(self, now_ns: int) -> int:
        """Pages that copies are touching."""
        self._on_page.forget(now_ns)
        return len(self._on_page)

    def ended(self, plan: StepPlan, clock: VirtualClock) -> tuple[int, ...]:
        """Pages that have been loaded since the last call; waits for one if the plan has no work and any is ordered."""
        self._settle(clock.now_ns())
        self._give(clock.now_ns())
        if not plan.work and not self._loaded and self._loads:
            clock.advance(self._loads[0][0] - clock.now_ns())
            self._settle(clock.now_ns())
        found = tuple(self._loaded)
        self._loaded.clear()
        return found

    def _settle(self, now_ns: int) -> None:
        """Take note of loads that are over."""
        while self._loads and self._loads[0][0] <= now_ns:
            self._loaded.append(self._loads.popleft()[1])

    def _give(self, now_ns: int) -> None:
        """Loads to their link, as many as may be on their way."""
        if self._queue:
            count = min(len(self._queue), self._burst - len(self._loads))
            while count > 0:
                self._load(min(count, self._group), now_ns)
                count -= self._group

    def _load(self, count: int, now_ns: int) -> None:
        """Give the next `count` loads to their link as one group."""
        pairs = [self._queue.popleft() for _ in range(count)]
        for slot, _ in pairs:
            self._queued[slot] -= 1
            if not self._queued[slot]:
                del self._queued[slot]
        pages = [(page, slot) for slot, page in pairs]
        self._load_free_ns = end_ns = self._copy(pages, self._load_free_ns, now_ns)
        self._loads.extend((end_ns, page) for page, _ in pages)

    def _copy(self, pairs: Sequence[tuple[int, int]], free_ns: int, now_ns: int) -> int:
        """When copies of (page, slot) are over on a link that is free from `free_ns` on."""
        begin_ns = max(now_ns, free_ns)
        for page, slot in pairs:
            begin_ns = max(begin_ns, self._on_slot.get(slot), self._on_page.get(page))
        end_ns = begin_ns + len(pairs) * self._page_ns
        for page, slot in pairs:
            self._on_slot.add(slot, end_ns)
            self._on_page.add(page, end_ns)
        return end_ns

    def _written(self, plan: StepPlan) -> Iterable[int]:
        """Pages that a plan's step writes, and all of new rows."""
        pages = [target for _, target in plan.copied_pages]
        new = {row.row for row in plan.new_rows}
        for work in plan.work:
            first = 0 if work.row in new else work.start // PAGE_TOKENS
            pages += self._tables.get(work.row, [])[first : (work.start + work.count - 1) // PAGE_TOKENS + 1]
        return pages


class _Until:
    """Until when something is touched by copies."""

    __slots__ = ("_order", "_until")

    def __init__(self) -> None:
        self._until: dict[int, int] = {}
        self._order: deque[tuple[int, int]] = deque()
        """(end, key) in the order of the orders: what has ended is forgotten from its left."""

    def __len__(self) -> int:
        return len(self._until)

    def get(self, key: int) -> int:
        return self._until.get(key, 0)

    def last(self, keys: Iterable[int]) -> int:
        until = self._until
        return max((until.get(key, 0) for key in keys), default=0)

    def add(self, key: int, end_ns: int) -> None:
        self._until[key] = max(end_ns, self._until.get(key, 0))
        self._order.append((end_ns, key))

    def forget(self, now_ns: int) -> None:
        while self._order and self._order[0][0] <= now_ns:
            end_ns, key = self._order.popleft()
            if self._until.get(key) == end_ns:
                del self._until[key]
