"""Copies between the tiers: lanes that run when they like, against plans carried out one after the other."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest

from longturn.config import PAGE_TOKENS
from longturn.engine.records import NewRow, RowWork, SamplingParams, StepPlan
from longturn.errors import ConfigError
from longturn.executor.cpu_offload import cpu_offload
from longturn.executor.offload import CopyReport, Offload, slots_of

PAGES, SLOTS = 14, 6


class LaneMark:
    def __init__(self, lane: DelayedLane) -> None:
        self.lane = lane
        self.reached = False

    def done(self) -> bool:
        return self.reached

    def wait(self) -> None:
        while not self.reached:
            self.lane.advance()


class DelayedLane:
    """Keeps operations until it is advanced; an operation may be to wait for another lane."""

    def __init__(self) -> None:
        self.operations: deque[Callable[[], None] | LaneMark] = deque()

    def copy(self, target: list[int], source: list[int]) -> None:
        def now() -> None:
            target[:] = source

        self.operations.append(now)

    def do(self, operation: Callable[[], None]) -> None:
        self.operations.append(operation)

    def mark(self) -> LaneMark:
        mark = LaneMark(self)

        def reach() -> None:
            mark.reached = True

        self.operations.append(reach)
        return mark

    def wait(self, mark: LaneMark) -> None:
        self.operations.append(mark)

    def advance(self) -> None:
        """Carry out one operation, or let the lane that it waits for go on."""
        if not self.operations:
            return
        head = self.operations[0]
        if isinstance(head, LaneMark):
            if not head.reached:
                head.lane.advance()
                return
            self.operations.popleft()
        else:
            self.operations.popleft()
            head()


class Machine:
    """Random plans as the engine may make them, on delayed lanes and on the oracle's plain lists."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.pool = [[page, page] for page in range(PAGES)]
        self.host = [[-1, -1] for _ in range(SLOTS)]
        self.lanes = [DelayedLane() for _ in range(3)]
        steps, saves, loads = self.lanes
        self.offload = Offload(
            self.pool, self.host, SLOTS, steps=steps, saves=saves, loads=loads,
            burst_pages=rng.choice([1, 3, 100]), group_pages=rng.choice([1, 2, 16]),
        )  # fmt: skip
        self.true_pool = [list(page) for page in self.pool]
        self.true_host: list[list[int] | None] = [None] * SLOTS
        self.loading: dict[int, list[int]] = {}
        self.unread: deque[tuple[StepPlan, set[int], LaneMark]] = deque()
        self.value = 1000
        self.step_id = 0
        self.loads = self.saves = 0

    def launch(self) -> None:
        rng = self.rng
        busy = set(self.loading).union(*(pages for _, pages, _ in self.unread))
        free = [page for page in range(1, PAGES) if page not in busy]
        rng.shuffle(free)
        readable = [page for page in range(1, PAGES) if page not in self.loading]
        from_slots = [slot for slot in range(SLOTS) if self.true_host[slot] is not None and rng.random() < 0.3]
        to_slots = [slot for slot in range(SLOTS) if slot not in from_slots and rng.random() < 0.4]
        saves = tuple(zip(rng.sample(free, min(len(free), len(to_slots))), to_slots, strict=False))
        targets = deque(free)  # pages just saved may be overwritten at once, in any way
        loads = tuple((slot, targets.pop()) for slot in from_slots if targets)
        copies = ()
        if targets and readable and rng.random() < 0.3:
            copies = ((rng.choice(readable), targets.pop()),)
        written = [targets.pop() for _ in range(rng.randrange(3)) if targets]
        target_pages = {page for _, page in loads} | {page for _, page in copies} | set(written)
        read = [page for page in rng.sample(readable, min(2, len(readable))) if page not in target_pages]
        rows, work = (), ()
        if written:
            pages = (*read, *written)
            work = (RowWork(0, len(read) * PAGE_TOKENS, len(written) * PAGE_TOKENS, False),)
            rows = (NewRow(0, "r", b"", 0, pages, SamplingParams(1)),)
        self.step_id += 1
        plan = StepPlan(
            self.step_id, work, rows, copied_pages=copies, save_pages=saves, load_pages=loads,
            freed_rows=(0,) if self.step_id > 1 else (),
        )  # fmt: skip
        self.loads += len(loads)
        self.saves += len(saves)
        self.offload.begin(plan)
        for source, target in copies:
            self.lanes[0].copy(self.pool[target], self.pool[source])
        self.offload.copied(plan)
        # The oracle, in the order that the contract gives.
        for page, slot in saves:
            self.true_host[slot] = list(self.true_pool[page])
        for source, target in copies:
            self.true_pool[target] = list(self.true_pool[source])
        for slot, page in loads:
            self.true_pool[page] = list(self.true_host[slot] or ())
            self.loading[page] = self.true_pool[page]
        if work:
            values = []
            for page in written:
                self.value += 1
                values.append((page, self.value))
            expected = [(page, list(self.true_pool[page])) for page in read]
            for page, value in values:
                self.true_pool[page] = [value, value]

            def step() -> None:
                for page, content in expected:
                    assert self.pool[page] == content, f"the step reads wrong content in page {page}"
                for page, value in values:
                    self.pool[page][:] = [value, value]

            self.lanes[0].do(step)
        mark = self.lanes[0].mark()
        self.offload.end()
        self.unread.append((plan, set(read) | set(written) | {page for pair in copies for page in pair}, mark))

    def read(self) -> None:
        plan, _, mark = self.unread.popleft()
        mark.wait()
        pending = dict(self.loading)
        report = self.offload.ended(plan)
        assert not report.lost_pages and not report.lost_slots
        for page in report.loaded_pages:
            assert self.pool[page] == self.loading.pop(page), f"page {page} is said to be loaded and is not"
        assert plan.work or report.loaded_pages or not pending, "it was to wait"

    def finish(self) -> None:
        while self.unread:
            self.read()
        while self.loading:
            self.unread.append((StepPlan(0, ()), set(), self.lanes[0].mark()))
            self.read()
        self.offload.close()
        assert self.pool == self.true_pool
        assert all(true is None or held == true for held, true in zip(self.host, self.true_host, strict=True))


@pytest.mark.parametrize("seed", range(60))
def test_lanes_that_run_when_they_like_equal_plans_in_order(seed: int) -> None:
    machine = Machine(seed)
    for _ in range(120):
        machine.launch()
        for _ in range(machine.rng.choice([0, 1, 4, 30])):
            machine.rng.choice(machine.lanes).advance()
        while len(machine.unread) > 1:
            machine.read()
    machine.finish()
    assert machine.loads > 40 and machine.saves > 60


def plan(step: int, *, saves: tuple[tuple[int, int], ...] = (), loads: tuple[tuple[int, int], ...] = ()) -> StepPlan:
    return StepPlan(step, (), save_pages=saves, load_pages=loads)


def run(offload: Offload, step: StepPlan) -> CopyReport:
    offload.begin(step)
    offload.copied(step)
    offload.end()
    return offload.ended(step)


def test_bytes_go_out_and_come_back() -> None:
    pool = np.random.default_rng(0).integers(0, 256, (6, 1000), np.uint8)
    before = pool.copy()
    offload = cpu_offload(pool, 3)
    assert offload.host_pages == 3
    assert run(offload, plan(1, saves=((4, 0), (2, 2)))) == CopyReport()
    pool[:] = 0
    assert run(offload, plan(2, loads=((2, 5), (0, 1)))) == CopyReport(loaded_pages=(5, 1))
    assert (pool[5] == before[2]).all() and (pool[1] == before[4]).all()
    assert not pool[[0, 2, 3, 4]].any()


def test_the_loads_of_a_step_that_failed_come_with_the_next() -> None:
    pool = np.ones((6, 8), np.uint8)
    offload = cpu_offload(pool, 3)
    run(offload, plan(1, saves=((4, 0),)))
    offload.begin(plan(2, loads=((0, 5),)))  # and the step raises: neither `end` nor `ended`
    assert run(offload, plan(3)) == CopyReport(loaded_pages=(5,))


def test_a_load_from_a_slot_that_holds_nothing_is_lost() -> None:
    offload = cpu_offload(np.zeros((4, 8), np.uint8), 3)
    assert run(offload, plan(1, loads=((1, 2),))) == CopyReport(lost_pages=(2,))


def test_a_save_that_fails_takes_its_slots_loads_with_it() -> None:
    pool = np.ones((4, 8), np.uint8)
    offload = cpu_offload(pool, 2)
    run(offload, plan(1, saves=((1, 0),)))
    failing = plan(2, saves=((99, 0), (2, 1)), loads=((0, 3), (1, 1)))  # there is no page 99
    assert run(offload, failing) == CopyReport(loaded_pages=(1,), lost_pages=(3,), lost_slots=(0,))


def test_a_burst_is_all_that_one_step_loads() -> None:
    pool = np.zeros((100, 8 << 20), np.uint8)  # 4 pages are the CPU's burst
    offload = cpu_offload(pool, 12)
    run(offload, plan(1, saves=tuple((i + 1, i) for i in range(12))))
    step = StepPlan(2, (RowWork(0, 0, 1, False),), (NewRow(0, "r", b"", 0, (99,), SamplingParams(1)),),
                    load_pages=tuple((i, 50 + i) for i in range(12)))  # fmt: skip
    offload.begin(step)
    offload.end()
    assert len(offload.ended(step).loaded_pages) <= 8
    # A slot whose load has not begun is saved into only after that load.
    report = run(offload, plan(3, saves=((20, 11),)))
    assert 61 in report.loaded_pages


def test_settings() -> None:
    assert slots_of(0, 100) == 0
    assert slots_of(1050, 100) == 10
    with pytest.raises(ConfigError, match=r"too small for one page of 100 bytes"):
        slots_of(99, 100)
    with pytest.raises(ConfigError, match=r"more than fits"):
        slots_of(1 << 60, 100)
