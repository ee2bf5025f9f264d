"""Steps that are simulated together: while an engine's requests decode and nothing happens, only time passes.

An engine is then not called for each step. When it will be again is worked out from the times of its steps, and it is
made what it would be (`Engine.leap`) at that time, or as soon as anything else happens.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from longturn.engine.leap import Stretch, Taken
from longturn.engine.loop import Engine
from longturn.engine.records import StepPlan
from longturn.simulate.executor import SimulatedExecutor, SimulatedStep

_LEAST_TURNS = 2
"""Fewer are not worth the trouble."""


class Ahead:
    """Turns of one engine that have been foreseen and not been taken."""

    __slots__ = ("_engine", "_executor", "_shapes", "_step_ns", "_stretch", "_turn_ns")

    def __init__(
        self, engine: Engine, executor: SimulatedExecutor, stretch: Stretch, now_ns: int, quiet_ns: float
    ) -> None:
        step = executor.last
        assert step is not None, "a stretch begins with a step on its way"
        self._engine, self._executor, self._stretch = engine, executor, stretch
        self._shapes = executor.shapes(stretch.plan, stretch.turns)
        self._step_ns = [step.step_ns]
        """Of the step on its way, and of all that follow."""
        self._turn_ns = [now_ns, step.end_ns]
        """When each turn is made; the last is none of the stretch."""
        until_ns = min(stretch.until_ns, quiet_ns)
        for shape in self._shapes[:-1]:
            if self._turn_ns[-1] >= until_ns:
                break
            self._step_ns.append(executor.step_ns(shape))
            self._turn_ns.append(self._turn_ns[-1] + self._step_ns[-1])

    @property
    def request_ids(self) -> Sequence[str]:
        """Requests that get a token in each turn."""
        return self._stretch.request_ids

    @property
    def end_ns(self) -> int:
        """When the engine has to be called again."""
        return self._turn_ns[-1]

    def take(self, now_ns: int) -> int:
        """Take the turns that have ended by `now_ns`; how many. The engine's clock then stands at the next turn."""
        turns = bisect.bisect_right(self._turn_ns, now_ns) - 1
        if turns:
            shapes = self._shapes[:turns]
            step_ns = self._step_ns[1 : turns + 1]
            if len(step_ns) < turns:
                step_ns.append(self._executor.step_ns(shapes[-1]))
            turn_ns = self._turn_ns[: turns + 1]

            def launched(plan: StepPlan, taken: list[Taken]) -> SimulatedStep:
                return self._executor.leapt(plan, shapes, step_ns, turn_ns, taken)

            self._engine.leap(self._stretch, self._step_ns[:turns], turn_ns, launched)
        return turns


def ahead_of(engine: Engine, executor: SimulatedExecutor, now_ns: int, quiet_ns: float) -> Ahead | None:
    """What can be foreseen of an engine that is about to be called at `now_ns`; None if that call is not foreseen, or
    if its device has run out of steps.

    Nothing beyond `quiet_ns` is worked out: something is known to happen then.
    """
    busy = executor.busy_pages
    stretch = None if busy is None else engine.stretch(busy)
    if stretch is None or stretch.turns < _LEAST_TURNS or now_ns >= min(stretch.until_ns, executor.end_ns):
        return None
    return Ahead(engine, executor, stretch, now_ns, quiet_ns)
