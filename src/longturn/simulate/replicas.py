"""Simulated engines: each is the real `engine.Engine` with a clock of its own.

One call of `Engine.step` launches the next step and waits for the oldest one, so a clock that the executor moves is
ahead of the others' when the call returns. What it returns is therefore handed out as an event at that time, and the
engine is not called again before: it never sees anything that was sent after the moment it was called at, as an engine
in a process of its own sees new requests between its steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from longturn.config import CacheConfig, SchedulerConfig
from longturn.engine.clock import VirtualClock
from longturn.engine.loop import Engine
from longturn.engine.protocols import ExecutorInfo
from longturn.engine.records import EngineRequest, EngineStats, StepOutputs
from longturn.errors import RequestError
from longturn.simulate.acceptance import Acceptance
from longturn.simulate.copies import PageCopies
from longturn.simulate.executor import Lockstep, SimulatedExecutor
from longturn.simulate.pricing import StepModel
from longturn.simulate.stretches import Ahead, ahead_of
from longturn.simulate.tally import Tally

_CHECK_INTERVAL_NS = 3_600_000_000_000
"""The engine's idle check walks its whole pool, of which a simulated rack has a hundred thousand pages."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What all engines of a deployment are made of."""

    info: ExecutorInfo
    model: StepModel
    scheduler: SchedulerConfig
    cache: CacheConfig
    engines: int
    """How many; those of one replica in lockstep count apart."""
    lockstep: int = 1
    """Engines of one replica: ranks of data-parallel attention that share experts."""
    copy_ns: int = 0
    """Of one page between the chips and their host, if `info` has host pages."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    """How many tokens a row gains in a step."""
    scale: float = 1.0
    """All steps take this many times as long."""


class Replica:
    """One engine and the requests that have reached it between two of its steps."""

    __slots__ = ("_clock", "_executor", "_inbox", "ahead", "busy", "engine", "number", "tally", "wake")

    def __init__(
        self,
        spec: EngineSpec,
        number: int,
        lockstep: Lockstep | None,
        rank: int,
        events: Callable[[str], None] | None,
    ) -> None:
        self._clock = VirtualClock()
        self._inbox: deque[EngineRequest] = deque()
        self.number = number
        self.tally = Tally(spec.model)
        copies = PageCopies(spec.copy_ns, spec.info.page_bytes) if spec.info.host_pages else None
        executor = SimulatedExecutor(
            spec.info,
            spec.model,
            self._clock,
            self.tally,
            scale=spec.scale,
            lockstep=lockstep,
            rank=rank,
            copies=copies,
        )
        self._executor = executor
        self.engine = Engine(
            executor, spec.scheduler, spec.cache, self._clock, events, check_interval_ns=_CHECK_INTERVAL_NS
        )
        self.busy = False
        """It has been called, or will be, and its answer lies in the future."""
        self.ahead: Ahead | None = None
        """Turns that nobody has taken yet."""
        self.wake = 0
        """Of the event that ends them; others have come too late."""

    def arrive(self, request: EngineRequest) -> None:
        """A request is there; the engine takes it at its next turn."""
        self._inbox.append(request)

    def turn(
        self, now_ns: int, refused: Callable[[str, RequestError], None], quiet_ns: float = math.inf
    ) -> tuple[int, StepOutputs | None] | None:
        """Take what has arrived, and run one step or foresee several.

        Args:
            now_ns: not before the last turn's end.
            refused: is told of requests that the engine does not take.
            quiet_ns: something happens to this engine then; a hint.

        Returns:
            When the step's results are there, and what they are, None if it is turns that were foreseen (`ahead`); None
            if there is nothing to do.
        """
        self._clock.advance(now_ns - self._clock.now_ns())
        while self._inbox:
            request = self._inbox.popleft()
            try:
                self.engine.add(request)
            except RequestError as error:
                refused(request.request_id, error)
        self.ahead = ahead_of(self.engine, self._executor, now_ns, quiet_ns)
        if self.ahead is not None:
            self.busy = True
            return self.ahead.end_ns, None
        return self.step()

    def take(self, now_ns: int) -> tuple[Sequence[str], int]:
        """Take the turns that were foreseen and have ended: the requests that got a token in each, and how many."""
        ahead, self.ahead = self.ahead, None
        assert ahead is not None, "no turns were foreseen"
        return ahead.request_ids, ahead.take(now_ns)

    def step(self) -> tuple[int, StepOutputs | None] | None:
        """One step where the engine's clock stands; what has arrived waits for the next."""
        outputs = self.engine.step()
        self.busy = outputs is not None
        return None if outputs is None else (self._clock.now_ns(), outputs)

    def stats(self) -> EngineStats:
        return self.engine.stats()


def make_replicas(spec: EngineSpec, events: Callable[[str], None] | None = None) -> list[Replica]:
    """All engines of a deployment.

    Args:
        spec: see there.
        events: receives the engines' own event lines, each with the engine's number before it.

    Raises:
        ConfigError: a setting is out of range.
    """
    replicas: list[Replica] = []
    lockstep: Lockstep | None = None
    for number in range(spec.engines):
        rank = number % spec.lockstep
        if spec.lockstep > 1 and rank == 0:
            lockstep = Lockstep(spec.lockstep)
        replicas.append(Replica(spec, number, lockstep, rank, _named(events, number)))
    return replicas


def _named(events: Callable[[str], None] | None, number: int) -> Callable[[str], None] | None:
    if events is None:
        return None
    return lambda line: events(f"engine {number} {line}")
