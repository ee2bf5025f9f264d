"""The overlap loop: launch step N+1, then read step N.

While the device works on N, the host has already planned and launched N+1 from counters alone; the tokens that N
samples feed N+1 on the device. `run_ahead` off reads every step before the next one is planned: the same outputs, with
the device idle in between.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from longturn.config import CacheConfig, SchedulerConfig
from longturn.engine.kv_events import CacheEvents, CacheListener
from longturn.engine.launched import ResultMismatch
from longturn.engine.leap import Stretch, Taken
from longturn.engine.protocols import Clock, Executor, Idling, Preparing, StepHandle
from longturn.engine.records import EngineRequest, EngineStats, SamplingParams, StepOutputs, StepPlan
from longturn.engine.scheduler import Scheduler

_log = logging.getLogger(__name__)

_CHECK_INTERVAL_NS = 1_000_000_000
"""The idle check walks the whole pool; between requests of a lone client it is not repeated sooner than this."""


class _InFlight(NamedTuple):
    plan: StepPlan
    handle: StepHandle
    fault: int
    """How many executor faults had been seen when it was launched."""


class Engine:
    """A scheduler, an executor and a clock, turned by `step`. One thread may use it."""

    def __init__(
        self,
        executor: Executor,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        clock: Clock,
        events: Callable[[str], None] | None = None,
        *,
        check_interval_ns: int = _CHECK_INTERVAL_NS,
        cache_listener: CacheListener | None = None,
    ) -> None:
        """
        Args:
            events: receives one line for everything that happens; see `Scheduler`.
            check_interval_ns: least time between two idle checks that find nothing.
            cache_listener: told what became of cached pages, once a step and after `reset_cache`; closed with the
                engine.

        Raises:
            ConfigError: a setting is out of range.
        """
        self._executor = executor
        self._clock = clock
        self._cache_listener = cache_listener
        self._cache_events = None if cache_listener is None else CacheEvents()
        self._scheduler = Scheduler(executor.info, scheduler, cache, events, self._cache_events)
        self._depth = 2 if scheduler.run_ahead else 1
        self._in_flight: deque[_InFlight] = deque()
        self._faults = 0
        self._repeated = False
        """The last step that was read had failed."""
        self._busy_ns = 0
        self._busy_since_ns = 0
        self._leak_faults = 0
        self._check_interval_ns = check_interval_ns
        self._checked_ns = -check_interval_ns
        self._idle = True
        self._closed = False

    @property
    def executor(self) -> Executor:
        return self._executor

    def add(self, request: EngineRequest) -> None:
        """Queue a request; its outputs come from `step`.

        Raises:
            RequestError: it is malformed, its id is in use, or it could never fit.
            OverloadedError: too many requests wait already.
        """
        self._scheduler.add(request, self._clock.now_ns())

    def ready(self, sampling: SamplingParams) -> bool:
        """Whether the executor is prepared for a request that samples so; if not it is getting ready, and `add` is best
        called later."""
        executor = self._executor
        return not isinstance(executor, Preparing) or executor.ready(sampling)

    def idle(self) -> bool:
        """For times without work: let the executor do a little of its own; whether it has more."""
        executor = self._executor
        return isinstance(executor, Idling) and executor.idle()

    def abort(self, request_id: str) -> bool:
        """End a request; the next `step` has its ABORT output. False if there is no such request (any more)."""
        return self._scheduler.abort(request_id, self._clock.now_ns())

    def reset_cache(self) -> int:
        """Forget all cached pages; the number of pages that were known. Requests keep those that they hold."""
        pages = self._scheduler.clear_cache()
        self._tell_cache_events()
        return pages

    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._in_flight) or self._scheduler.has_work

    def step(self) -> StepOutputs | None:
        """One turn of the loop: fill the pipeline, read the oldest step. None if there is nothing to do.

        Raises:
            Exception: what the executor raised, if it failed on a step that was launched after an earlier failure and
                no step succeeded in between. The first failure ends the requests of its step and the engine goes on.
        """
        if not self.has_work():
            return None
        self._idle = False
        while len(self._in_flight) < self._depth:
            now_ns = self._clock.now_ns()
            plan = self._scheduler.schedule(now_ns)
            if plan is None:
                break
            if not self._in_flight:
                self._busy_since_ns = now_ns
            self._launch(plan)
        if self._in_flight:
            self._read()
        elif self._scheduler.requests.live and not self._scheduler.requests.outputs:
            raise RuntimeError("the scheduler has requests but no step for them, and none is in flight")
        outputs = self._scheduler.take_outputs()
        self._tell_cache_events()
        if not self.has_work():
            self._became_idle()
        return StepOutputs(outputs, self.stats())

    def stretch(self, busy_pages: int = 0) -> Stretch | None:
        """How many calls of `step` from now on would do the same, see `leap`; None if the next is not of that kind, if
        each step is read before the next is launched, or if someone listens to every step.

        Args:
            busy_pages: pages whose copy to host memory is on its way.
        """
        if len(self._in_flight) != 1 or self._depth != 2 or self._cache_events is not None:
            return None
        return self._scheduler.stretch(self._in_flight[0].plan, busy_pages)

    def leap(
        self,
        stretch: Stretch,
        elapsed_ns: list[int],
        turn_ns: list[int],
        launched: Callable[[StepPlan, list[Taken]], StepHandle],
    ) -> None:
        """Be what the first calls of `step` of a stretch would leave, without them and their outputs.

        Args:
            stretch: found by `stretch`, since when nobody has called this engine.
            elapsed_ns: of each step that these turns read, as their results would have it; at least one.
            turn_ns: when each of these turns is made, and as its last the time at which the last one ends.
            launched: gives the handle of the last step that these turns launch; is told what all of them give the
                executor beside its work. All rows sample token 0 in all of them.
        """
        plan, taken = self._scheduler.leap(stretch, elapsed_ns, turn_ns[:-1])
        self._in_flight.clear()
        self._in_flight.append(_InFlight(plan, launched(plan, taken), self._faults))
        self._busy_ns += turn_ns[-1] - self._busy_since_ns
        self._busy_since_ns = turn_ns[-1]
        self._repeated = False

    def stats(self) -> EngineStats:
        """A snapshot for metrics."""
        return self._scheduler.stats(self._busy_ns, self._leak_faults)

    def check_invariants(self) -> None:
        """Raises RuntimeError if pages, rows or states do not add up; right at any moment between steps."""
        self._scheduler.check()

    def close(self) -> None:
        """Close the executor. Requests that have not ended get no more output."""
        if not self._closed:
            self._closed = True
            self._in_flight.clear()
            if self._cache_listener is not None:
                self._cache_listener.close()
            self._executor.close()

    def _launch(self, plan: StepPlan) -> None:
        faults = self._faults
        try:
            handle = self._executor.launch(plan)
        except Exception as error:
            self._failed(plan, error, faults)
        else:
            self._in_flight.append(_InFlight(plan, handle, faults))

    def _read(self) -> None:
        plan, handle, faults = self._in_flight.popleft()
        try:
            result = handle.result()
        except Exception as error:
            self._failed(plan, error, faults)
            return
        now_ns = self._clock.now_ns()
        self._busy_ns += now_ns - self._busy_since_ns
        self._busy_since_ns = now_ns
        try:
            self._scheduler.update(plan, result, now_ns)
        except ResultMismatch as error:
            self._failed(plan, error, faults)
        else:
            self._repeated = False

    def _failed(self, plan: StepPlan, error: Exception, faults_at_launch: int) -> None:
        """End the requests of a step that failed; give up if the executor does not recover."""
        _log.error("step %d failed: %s", plan.step_id, error, exc_info=error)
        self._scheduler.fail(plan, f"the executor failed: {type(error).__name__}: {error}", self._clock.now_ns())
        # A step launched before the failure was seen may fail of the same cause; that says nothing new.
        if self._repeated and faults_at_launch == self._faults:
            raise error
        self._faults += 1
        self._repeated = True

    def _tell_cache_events(self) -> None:
        if self._cache_listener is not None and self._cache_events is not None:
            events = self._cache_events.take()
            if events:
                self._cache_listener.tell(events)

    def _became_idle(self) -> None:
        if self._idle:
            return
        self._idle = True
        now_ns = self._clock.now_ns()
        if self._scheduler.requests.pool.used == 0 and now_ns - self._checked_ns < self._check_interval_ns:
            return
        self._checked_ns = now_ns
        try:
            self._scheduler.check()
        except RuntimeError as error:
            self._leak_faults += 1
            _log.error("idle check failed: %s", error)
