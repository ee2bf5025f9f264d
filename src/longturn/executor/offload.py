"""Copies between an executor's page pool and host memory, beside its steps.

Copies run in two lanes of their own (`executor.copy_lanes`), one to the host and one back, and steps in a third. A step
waits only for copies of pages that it writes: what it reads, the engine has been told is loaded.

On a GPU lanes are streams (`executor.gpu.offload`), on a CPU they copy at once (`executor.cpu_offload`). How a plan's
copies are meant is said at `engine.records.StepPlan.save_pages` and `load_pages`.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from longturn.config import PAGE_TOKENS
from longturn.engine.records import StepPlan
from longturn.errors import ConfigError
from longturn.executor.copy_lanes import CopiesUnderWay, Group, Lane
from longturn.executor.memory import usable_memory_bytes

_log = logging.getLogger(__name__)


class CopyReport(NamedTuple):
    """What a `StepResult` says of copies, in the order of its fields."""

    loaded_pages: tuple[int, ...] = ()
    lost_pages: tuple[int, ...] = ()
    lost_slots: tuple[int, ...] = ()


class Offload:
    """Copies of one executor. Not thread-safe: whoever launches steps calls it, for each plan in this order:

    `begin`, before anything that may fail; `copied`, once the plan's page copies are in the lane of steps; `end`, once
    the whole step is; `ended`, when its result is read.
    """

    def __init__(
        self,
        pool: Any,
        host: Any,
        host_pages: int,
        *,
        steps: Lane,
        saves: Lane,
        loads: Lane,
        burst_pages: int,
        group_pages: int = 16,
    ) -> None:
        """
        Args:
            pool: indexed by page id, the bytes of each page.
            host: indexed by slot, the bytes of each of `host_pages` slots.
            steps: the lane that steps run in; saves, loads: lanes for copies.
            burst_pages: loads given to their lane at a time, and on their way at once. What is ordered beyond that
                waits here, so that giving never takes long.
            group_pages: copies before a mark.
        """
        self._pool = pool
        self._host = host
        self.host_pages = host_pages
        self._steps, self._saves, self._loads = steps, saves, loads
        self._burst_pages = burst_pages
        self._copies = CopiesUnderWay((steps, saves, loads), group_pages)
        self._queue: deque[tuple[int, int]] = deque()
        """(slot, page): loads that their lane has not been given."""
        self._queued: Counter[int] = Counter()
        """Slots of those."""
        self._ordered: tuple[tuple[int, int], ...] = ()
        """The last plan's loads, until its page copies are in their lane."""
        self._loading = 0
        """Loads in their lane."""
        self._filled: set[int] = set()
        """Slots that hold something, or will."""
        self._tables: dict[int, list[int]] = {}
        """Pages of each row."""
        self._loaded: list[int] = []
        self._lost_pages: list[int] = []
        self._lost_slots: list[int] = []

    # --- a plan -----------------------------------------------------------------------------------------------------

    def begin(self, plan: StepPlan) -> None:
        """Give a plan's saves to their lane, keep its loads for later, and make its step wait for what it needs."""
        self._settle()
        self._take_ordered()  # of a step that failed before its end
        if plan.save_pages:
            self._save(plan.save_pages)
        self._ordered = plan.load_pages
        for row in plan.freed_rows:
            self._tables.pop(row, None)
        for new in plan.new_rows:
            self._tables[new.row] = list(new.pages)
        for row, pages in plan.new_pages:
            self._tables.setdefault(row, []).extend(pages)
        if self._copies.any_of_pages():
            self._copies.wait_for_pages(self._steps, self._written(plan))

    def _written(self, plan: StepPlan) -> set[int]:
        """Pages that the plan's step writes, and those of new rows, to be sure of what they read."""
        pages = {target for _, target in plan.copied_pages}
        new = {row.row for row in plan.new_rows}
        for work in plan.work:
            table = self._tables.get(work.row, [])
            first = 0 if work.row in new else work.start // PAGE_TOKENS
            pages.update(table[first : (work.start + work.count - 1) // PAGE_TOKENS + 1])
        return pages

    def copied(self, plan: StepPlan) -> None:
        """The plan's page copies are in the lane of steps: who overwrites their sources waits for them."""
        if plan.copied_pages:
            group = Group(self._steps)
            for source, _ in plan.copied_pages:
                group = self._copies.note(group, source, None)
            self._copies.close(group)

    def end(self) -> None:
        """Give loads to their lane, as many as may be on their way."""
        self._take_ordered()
        self._give()

    def _take_ordered(self) -> None:
        self._queue.extend(self._ordered)
        self._queued.update(slot for slot, _ in self._ordered)
        self._ordered = ()

    def _give(self) -> None:
        count = min(len(self._queue), self._burst_pages - self._loading)
        if count > 0:
            self._load(count)

    # --- results ----------------------------------------------------------------------------------------------------

    def ended(self, plan: StepPlan) -> CopyReport:
        """What has come to its end since the last report; waits for a load to report if the plan has no work.

        It may be called between another plan's `begin` and `end`.
        """
        self._settle()
        self._give()
        if not plan.work:
            self._wait()
        report = CopyReport(tuple(self._loaded), tuple(self._lost_pages), tuple(self._lost_slots))
        self._loaded.clear()
        self._lost_pages.clear()
        self._lost_slots.clear()
        return report

    def _wait(self) -> None:
        """Wait until there is a load to report, if any is ordered."""
        self._settle()
        while not (self._loaded or self._lost_pages):
            self._give()
            if self._copies.wait_for_first(self._loads):
                self._settle()
            elif not self._queue:
                return  # else all that were given failed at once

    def close(self) -> None:
        """Wait for every copy that a lane was given; the rest is dropped."""
        self._queue.clear()
        self._queued.clear()
        self._ordered = ()
        self._copies.wait_for_all()

    # --- copies -----------------------------------------------------------------------------------------------------

    def _save(self, pairs: Iterable[tuple[int, int]]) -> None:
        lane, group = self._saves, Group(self._saves)
        for page, slot in pairs:
            while self._queued[slot]:
                self._load(1)  # what the slot held is wanted on the device, and the load has not even begun
            self._copies.wait_for_slots(lane, (slot,))
            self._copies.wait_for_pages(lane, (page,))
            self._filled.discard(slot)
            if self._copy(lane, "save", page, slot):
                self._filled.add(slot)
                group = self._copies.note(group, page, slot)
            else:
                self._lost_slots.append(slot)
        self._copies.close(group)

    def _load(self, count: int) -> None:
        lane, group = self._loads, Group(self._loads)
        for _ in range(count):
            slot, page = self._queue.popleft()
            self._queued[slot] -= 1
            if not self._queued[slot]:
                del self._queued[slot]
            self._copies.wait_for_slots(lane, (slot,))
            self._copies.wait_for_pages(lane, (page,))
            if slot in self._filled and self._copy(lane, "load", page, slot):
                self._loading += 1
                group = self._copies.note(group, page, slot)
            else:
                self._lost_pages.append(page)
        self._copies.close(group)

    def _copy(self, lane: Lane, kind: str, page: int, slot: int) -> bool:
        """Whether it could be given to the lane."""
        try:
            if kind == "save":
                lane.copy(self._host[slot], self._pool[page])
            else:
                lane.copy(self._pool[page], self._host[slot])
        except Exception as error:
            # The cached page is lost; requests go on without it. Should the device be lost, the next step says so.
            _log.warning("could not %s page %d (host slot %d): %s", kind, page, slot, error)
            return False
        return True

    def _settle(self) -> None:
        """Take note of copies that are over."""
        for group in self._copies.over():
            if group.lane is self._loads:
                self._loading -= len(group.pages)
                self._loaded.extend(group.pages)


def slots_of(host_memory_bytes: int, page_bytes: int, *, beside_bytes: int = 0) -> int:
    """Pages of `page_bytes` that `cache.host_memory_bytes` holds; 0 if there is to be no host tier.

    Args:
        beside_bytes: of host memory that the executor takes for other things.

    Raises:
        ConfigError: it is too little for a page, or more than this machine has.
    """
    if not host_memory_bytes:
        return 0
    slots = host_memory_bytes // page_bytes
    if slots == 0:
        raise ConfigError(f"'cache.host_memory_bytes' is too small for one page of {page_bytes} bytes")
    usable = usable_memory_bytes()
    if usable is not None and host_memory_bytes + beside_bytes > usable:
        raise ConfigError(
            f"'cache.host_memory_bytes' {host_memory_bytes} is more than fits: {usable} bytes of memory, "
            f"{beside_bytes} of them for other things"
        )
    return slots
