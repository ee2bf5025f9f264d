"""An executor with a host tier whose copies take time, and a bench on it.

What a save copies is what the page holds when its plan is launched; a page that is being loaded holds rubbish until its
load is over, so that a step that reads it too early is found out. Copies can be made to fail.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from longturn.config import PAGE_TOKENS
from longturn.engine.kv_events import CacheListener
from longturn.engine.loop import Engine
from longturn.engine.records import StepPlan, StepResult
from longturn.executor.offload import CopyReport
from tests.engine.content import Bench, ContentExecutor, ContentHandle

_LOADING = [-3] * PAGE_TOKENS


@dataclass
class Pending:
    """A load on its way."""

    page: int
    content: list[int] | None
    """None: it will fail."""
    end_ns: int


@dataclass
class TieredExecutor(ContentExecutor):
    """Saves and loads beside steps; loads one after the other, each `load_ns` long."""

    load_ns: int = 3_000_000
    fail_copies: float = 0.0
    """Probability that a copy fails."""
    eager: bool = False
    """What a result says of copies is decided when its step is launched, as a worker of its own may, and not when it is
    read: what a later plan orders cannot be in it."""
    seed: int = 0
    answered: list[StepResult] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.host: list[list[int] | None] = [None] * self.info.host_pages
        self.pending: list[Pending] = []
        self.lost_slots: list[int] = []
        self.filled: set[int] = set()
        """Pages that hold something for a row that is not known yet."""
        self.writes: dict[int, set[int]] = {}
        """Pages that launched and unread steps write."""
        self.waits: set[int] = set()
        self.rng = random.Random(self.seed)
        self.dirty_reuses = 0

    def launch(self, plan: StepPlan) -> ContentHandle:
        touched = set().union(*self.unread.values()) if self.unread else set()
        written = set().union(*self.writes.values()) if self.writes else set()
        on_their_way = {load.page for load in self.pending}
        assert len({slot for _, slot in plan.save_pages}) == len(plan.save_pages), "two saves into one slot"
        for page, slot in plan.save_pages:
            assert page not in written, f"page {page} is saved while a launched step writes it"
            assert page not in on_their_way, f"page {page} is saved while it is loaded"
            assert page != 0
            self.host[slot] = list(self.pages[page])
            if self.rng.random() < self.fail_copies:
                self.host[slot] = None
                self.lost_slots.append(slot)
        copied = {target: list(self.pages[source]) for source, target in plan.copied_pages}
        for source, target in plan.copied_pages:
            assert source not in on_their_way, f"page {source} is copied while it is loaded"
            assert target not in touched
        for target, content in copied.items():
            self.pages[target] = content
            self.filled.add(target)
        for slot, page in plan.load_pages:
            assert page not in touched, f"page {page} changes hands while a launched step uses it"
            assert page not in on_their_way, f"page {page} is loaded twice at once"
            content = self.host[slot]
            if self.rng.random() < self.fail_copies:
                content = None
            begin = max(self.clock.now_ns(), self.pending[-1].end_ns if self.pending else 0)
            self.pending.append(Pending(page, content, begin + self.load_ns))
            on_their_way.add(page)
            self.pages[page] = list(_LOADING)
            self.filled.add(page)
        saved = {page for page, _ in plan.save_pages}
        taken = {page for row in plan.new_rows for page in row.pages} | {p for _, ps in plan.new_pages for p in ps}
        self.dirty_reuses += len(saved & taken)
        handle = super().launch(plan)
        for row in plan.new_rows:
            self.filled.difference_update(row.pages)
        used = self.unread[plan.step_id]
        assert not used & on_their_way, "a step uses a page that is being loaded"
        self.writes[plan.step_id] = {
            self.rows[work.row].pages[index]
            for work in plan.work
            for index in range(work.start // PAGE_TOKENS, (work.start + work.count - 1) // PAGE_TOKENS + 1)
        }
        made = TieredHandle(self, plan, handle.rows, handle.elapsed_ns if plan.work else 0, handle.scores)
        if self.eager and plan.step_id not in self.fail_steps:
            made.copies = self.copies_over(plan)
        return made

    def copies_over(self, plan: StepPlan) -> CopyReport:
        """Copies that are over now; a plan without work waits for one."""
        if not plan.work and self.pending:
            self.clock.advance(max(0, self.pending[0].end_ns - self.clock.now_ns()))
        done = [load for load in self.pending if load.end_ns <= self.clock.now_ns()]
        self.pending = self.pending[len(done) :]
        for load in done:
            self.pages[load.page] = list(_LOADING) if load.content is None else load.content
        lost_slots, self.lost_slots = tuple(self.lost_slots), []
        loaded = tuple(load.page for load in done if load.content is not None)
        return CopyReport(loaded, tuple(load.page for load in done if load.content is None), lost_slots)

    def _check_fresh(self, pages: Sequence[int], touched: set[int]) -> None:
        kept = {page: self.pages[page] for page in pages if page in self.filled}
        super()._check_fresh(pages, touched)
        for page, content in kept.items():
            self.pages[page] = content


@dataclass
class TieredHandle(ContentHandle):
    executor: TieredExecutor
    copies: CopyReport | None = None
    """Of an eager executor."""

    def result(self) -> StepResult:
        executor = self.executor
        del executor.writes[self.plan.step_id]
        result = super().result()  # a step that fails says nothing of copies
        copies = executor.copies_over(self.plan) if self.copies is None else self.copies
        result = result._replace(
            **copies._asdict(),
            # Nothing is to be learned of steps from how long copies take.
            elapsed_ns=result.elapsed_ns if self.plan.work else 10**12,
        )
        executor.answered.append(result)
        return result


@dataclass
class TieredBench(Bench):
    """A `Bench` whose executor has `host_pages` slots beside its pages."""

    host_pages: int = 40
    copies_pages: bool = True
    load_ns: int = 3_000_000
    fail_copies: float = 0.0
    eager: bool = False
    listener: CacheListener | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        info = replace(self.executor.info, copies_pages=self.copies_pages, host_pages=self.host_pages)
        self.executor: TieredExecutor = TieredExecutor(
            info,
            self.clock,
            load_ns=self.load_ns,
            fail_copies=self.fail_copies,
            eager=self.eager,
            seed=self.pages,
        )
        self.engine = Engine(
            self.executor, self.scheduler, self.cache, self.clock, self.log.append, cache_listener=self.listener
        )
