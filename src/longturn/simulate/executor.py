"""An executor that computes nothing: a step takes as long as the cost model says, on a clock that is moved by hand.

`launch` settles when the step will end; `result` moves the clock there. Steps follow each other without a gap while one
is always launched before the last has ended, which is what the engine's run-ahead is for.
"""

from __future__ import annotations

from collections.abc import Sequence

from longturn.engine.clock import VirtualClock
from longturn.engine.leap import Taken
from longturn.engine.protocols import ExecutorInfo
from longturn.engine.records import RowResult, StepPlan, StepResult
from longturn.simulate.copies import PageCopies
from longturn.simulate.cost.step import StepShape
from longturn.simulate.pricing import StepModel, shape_of, shapes_after
from longturn.simulate.tally import Tally

_TOKEN = (0,)
"""What every row samples: nothing depends on it, as no request has stop tokens."""


class SimulatedStep:
    """A step in flight; implements `engine.protocols.StepHandle`."""

    __slots__ = ("_clock", "_executor", "_plan", "_rows", "end_ns", "step_ns")

    def __init__(
        self,
        executor: SimulatedExecutor,
        plan: StepPlan,
        rows: Sequence[RowResult],
        clock: VirtualClock,
        step_ns: int,
        end_ns: int,
    ) -> None:
        self._executor = executor
        self._plan = plan
        self._rows = rows
        self._clock = clock
        self.step_ns = step_ns
        """As its result will tell: without waits before it."""
        self.end_ns = end_ns

    def done(self) -> bool:
        return self._clock.now_ns() >= self.end_ns

    def result(self) -> StepResult:
        left_ns = self.end_ns - self._clock.now_ns()
        if left_ns > 0:
            self._clock.advance(left_ns)
        loaded = self._executor.read(self, self._plan)
        return StepResult(self._plan.step_id, tuple(self._rows), self.step_ns, loaded)


class Lockstep:
    """Ranks with attention of their own that compute experts together: layer by layer, none is faster than the slowest.

    A rank knows the steps that others have launched so far. Steps that begin together end together, if the longer one
    was launched first. A step that would begin in the middle of another rank's waits for that one's end: so ranks that
    have come apart are together again one step later.
    """

    __slots__ = ("_flying",)

    def __init__(self, ranks: int) -> None:
        self._flying = [(0, 0)] * ranks
        """(begin, end) of each rank's last launched step."""

    def stretched(self, rank: int, start_ns: int, step_ns: int) -> int:
        """How long after `start_ns` a step ends that would take `step_ns` alone."""
        others = [span for number, span in enumerate(self._flying) if number != rank]
        begin_ns = start_ns
        while (later := max((end for begin, end in others if begin < begin_ns < end), default=0)) > begin_ns:
            begin_ns = later
        end_ns = max([begin_ns + step_ns, *(end for begin, end in others if begin == begin_ns)])
        self._flying[rank] = (begin_ns, end_ns)
        return end_ns - start_ns


class SimulatedExecutor:
    """One engine's device; implements `engine.protocols.Executor`."""

    def __init__(
        self,
        info: ExecutorInfo,
        model: StepModel,
        clock: VirtualClock,
        tally: Tally,
        *,
        scale: float = 1.0,
        lockstep: Lockstep | None = None,
        rank: int = 0,
        copies: PageCopies | None = None,
    ) -> None:
        """
        Args:
            info: rows and pages, as the real engine would have them.
            model: of this engine's steps.
            clock: of this engine alone.
            tally: where the time goes is added up there.
            scale: all steps take this many times as long: for the ends of an uncertainty band.
            lockstep: of all ranks that compute experts together, if there are several.
            rank: of this one among them.
            copies: between pages and host memory, if `info` has host pages.
        """
        self._info = info
        self._model = model
        self._clock = clock
        self._tally = tally
        self._scale = scale
        self._lockstep = lockstep
        self._rank = rank
        self._copies = copies
        self.end_ns = -1
        """When the step launched last ends."""
        self.last: SimulatedStep | None = None
        """The step launched last, until it is read."""
        self._results = tuple(RowResult(row, _TOKEN) for row in range(info.rows))

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def launch(self, plan: StepPlan) -> SimulatedStep:
        model = self._model
        now_ns = self._clock.now_ns()
        idle = now_ns > self.end_ns  # also where a step that has ended was not read: its host was busy otherwise
        start_ns = now_ns if idle else self.end_ns
        if self._copies is not None:
            start_ns = self._copies.begin(plan, start_ns, now_ns)
        step_ns = ns = 0
        if plan.work:
            shape = shape_of(plan.work, model.tokens_per_row, model.attend_limit)
            step_ns = ns = self.step_ns(shape)
            self._tally.add(shape, step_ns)
            if idle:
                ns += model.exposed_ns(shape)
            if self._lockstep is not None:
                ns = self._lockstep.stretched(self._rank, start_ns, ns)
        return self._launched(plan, step_ns, start_ns + ns)

    def _launched(self, plan: StepPlan, step_ns: int, end_ns: int) -> SimulatedStep:
        self.end_ns = end_ns
        results = self._results
        rows = [results[item.row] for item in plan.work if item.samples]
        self.last = SimulatedStep(self, plan, rows, self._clock, step_ns, end_ns)
        return self.last

    @property
    def busy_pages(self) -> int | None:
        """Pages that copies are touching; None where a step's time depends on other ranks."""
        if self._lockstep is not None:
            return None
        return 0 if self._copies is None else self._copies.busy_pages(self._clock.now_ns())

    def step_ns(self, shape: StepShape) -> int:
        """How long a step takes that waits for nothing."""
        return round(self._model.step_ns(shape) * self._scale)

    def shapes(self, plan: StepPlan, steps: int) -> list[StepShape]:
        """Of steps after this one, which decodes, if its rows go on."""
        return shapes_after(plan.work, steps, self._model.tokens_per_row, self._model.attend_limit)

    def leapt(
        self, plan: StepPlan, shapes: Sequence[StepShape], step_ns: Sequence[int], turn_ns: Sequence[int],
        taken: Sequence[Taken],
    ) -> SimulatedStep:  # fmt: skip
        """Steps of the same rows were launched one after the other, and all but the last of them were read.

        Args:
            plan: of the last.
            shapes: of all.
            step_ns: how long they take, as `after` says.
            turn_ns: when each was launched, and when the last one begins.
            taken: what beside their work they were given.
        """
        for shape, ns in zip(shapes, step_ns, strict=True):
            self._tally.add(shape, ns)
        end_ns = turn_ns[-1] + step_ns[-1]
        if self._copies is not None:
            for one in taken:
                plain = StepPlan(plan.step_id, (), new_pages=one.new_pages, save_pages=one.save_pages)
                self._copies.begin(plain, turn_ns[one.number], turn_ns[one.number])
        self._clock.advance(turn_ns[-1] - self._clock.now_ns())
        return self._launched(plan, step_ns[-1], end_ns)

    def read(self, step: SimulatedStep, plan: StepPlan) -> tuple[int, ...]:
        """A step's result is being read; the pages whose load has come to its end since the last."""
        if self.last is step:
            self.last = None
        return () if self._copies is None else self._copies.ended(plan, self._clock)

    def close(self) -> None:
        """Nothing is held."""
