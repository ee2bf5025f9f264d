"""An executor that computes nothing: a step takes as long as the cost model says, on a clock that is moved by hand.

`launch` settles when the step will end; `result` moves the clock there. Steps follow each other without a gap while one
is always launched before the last has ended, which is what the engine's run-ahead is for.
"""

from __future__ import annotations

from collections.abc import Sequence

from longturn.engine.clock import VirtualClock
from longturn.engine.protocols import ExecutorInfo
from longturn.engine.records import RowResult, StepPlan, StepResult
from longturn.simulate.host_tier import HostTier
from longturn.simulate.pricing import Pricer
from longturn.simulate.tally import Tally

_TOKEN = (0,)
"""What every row samples: nothing depends on it, as no request has stop tokens."""


class SimulatedStep:
    """A step in flight; implements `engine.protocols.StepHandle`."""

    __slots__ = ("_clock", "_executor", "_plan", "_rows", "_told_ns", "end_ns")

    def __init__(
        self,
        executor: SimulatedExecutor,
        plan: StepPlan,
        rows: Sequence[RowResult],
        clock: VirtualClock,
        told_ns: int,
        end_ns: int,
    ) -> None:
        self._executor = executor
        self._plan = plan
        self._rows = rows
        self._clock = clock
        self._told_ns = told_ns
        self.end_ns = end_ns

    def done(self) -> bool:
        return self._clock.now_ns() >= self.end_ns

    def result(self) -> StepResult:
        left_ns = self.end_ns - self._clock.now_ns()
        if left_ns > 0:
            self._clock.advance(left_ns)
        self._executor.read(self)
        return StepResult(self._plan.step_id, tuple(self._rows), self._told_ns)


class Lockstep:
    """Ranks with attention of their own that compute experts together: none is faster than the slowest.

    A rank knows the steps that others have launched so far. So a step lasts as long as the longest one in flight
    anywhere when it begins; what another rank launches later holds up the step after it.
    """

    __slots__ = ("_flying",)

    def __init__(self, ranks: int) -> None:
        self._flying = [(0, 0)] * ranks
        """(end, duration) of each rank's last launched step."""

    def stretched(self, rank: int, start_ns: int, step_ns: int) -> int:
        """How long a step that would take `step_ns` alone takes together."""
        for other, (end_ns, duration_ns) in enumerate(self._flying):
            if other != rank and end_ns > start_ns and duration_ns > step_ns:
                step_ns = duration_ns
        self._flying[rank] = (start_ns + step_ns, step_ns)
        return step_ns


class SimulatedExecutor:
    """One engine's device; implements `engine.protocols.Executor`."""

    def __init__(
        self,
        info: ExecutorInfo,
        pricer: Pricer,
        clock: VirtualClock,
        tally: Tally,
        *,
        lockstep: Lockstep | None = None,
        rank: int = 0,
        tier: HostTier | None = None,
    ) -> None:
        """
        Args:
            info: rows and pages, as the real engine would have them.
            pricer: of this engine's steps.
            clock: of this engine alone.
            tally: where the time goes is added up there.
            lockstep: of all ranks that compute experts together, if there are several.
            rank: of this one among them.
            tier: if some pages of `info` lie in host memory.
        """
        self._info = info
        self._pricer = pricer
        self._clock = clock
        self._tally = tally
        self._lockstep = lockstep
        self._rank = rank
        self._tier = tier
        self._end_ns = -1
        self._last: SimulatedStep | None = None
        """The step launched last, until it is read."""
        self._results = tuple(RowResult(row, _TOKEN) for row in range(info.rows))

    @property
    def info(self) -> ExecutorInfo:
        return self._info

    def launch(self, plan: StepPlan) -> SimulatedStep:
        pricer = self._pricer
        now_ns = self._clock.now_ns()
        # The steps of a round but its first take no time: one that is still unread may have ended by now.
        idle = self._last is None and now_ns > self._end_ns
        start_ns = now_ns if idle else self._end_ns
        if idle or pricer.ends_round:
            self._tally.add(*pricer.round)
        ns, told_ns = pricer.price(plan.work, idle)
        if self._lockstep is not None:
            ns = self._lockstep.stretched(self._rank, start_ns, ns)
        if self._tier is not None:
            ns += self._tier.fetch_ns(plan)
        self._end_ns = start_ns + ns
        results = self._results
        rows = [results[item.row] for item in plan.work if item.samples]
        self._last = SimulatedStep(self, plan, rows, self._clock, told_ns, self._end_ns)
        return self._last

    def read(self, step: SimulatedStep) -> None:
        """A step's result has been read."""
        if self._last is step:
            self._last = None

    def close(self) -> None:
        """Nothing is held."""
