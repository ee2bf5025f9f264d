"""Agent sessions in closed loop against one simulated engine, as `benchmarks/gpu_sessions.py` drives the real one.

Client and engine share one thread there: what is due is sent between two calls of `Engine.step`, and an answer is seen
when the call that brings it returns. So they do here, on the engine's virtual clock. A lane whose session ends takes
the next one, whose first turn is computed whole, for one token, and not measured.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from longturn.bench.lanes import LiveTree, to_ns
from longturn.bench.synth import RequestKey
from longturn.bench.traces.tree import SessionTree
from longturn.engine.clock import VirtualClock
from longturn.engine.loop import Engine
from longturn.engine.protocols import ExecutorInfo, StepHandle
from longturn.engine.records import EngineRequest, StepOutputs, StepPlan, StepResult
from longturn.simulate.copies import PageCopies
from longturn.simulate.cost.step import StepShape
from longturn.simulate.executor import SimulatedExecutor
from longturn.simulate.pricing import StepModel
from longturn.simulate.prompts import TracePrompts
from longturn.simulate.replicas import EngineSpec
from longturn.simulate.stretches import ahead_of
from longturn.simulate.tally import Tally

_POLL_NS = 5_000_000
"""The client sleeps no longer than this before it looks again what is due."""
_CHECK_INTERVAL_NS = 3_600_000_000_000


@dataclass(frozen=True, slots=True)
class RequestTime:
    """What a request costs on the host before its first step, by prompt tokens; interpolated, and beyond the ends as at
    them."""

    tokens: tuple[float, ...]
    ns: tuple[float, ...]
    apart: bool
    """Spent in another process, so that steps of other requests go on and begin meanwhile; if not, the engine's own
    thread spends it, and the device has at most the steps that were launched before."""

    def of(self, tokens: int) -> int:
        return round(float(np.interp(tokens, self.tokens, self.ns)))


@dataclass(frozen=True, slots=True)
class Done:
    """A measured request that ended in time."""

    sent_ns: int
    first_ns: int
    end_ns: int
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Replayed:
    """What came of it."""

    done: tuple[Done, ...]
    tally: Tally
    """Of the steps since the measurement began."""
    evictions: int
    loaded_pages: int
    """Copied back from host memory; both since the measurement began."""


@dataclass(slots=True)
class _Lane:
    """One session slot."""

    live: LiveTree
    at: int = 0
    due_ns: int = 0
    name: str | None = None
    """Of the request in flight."""
    held: EngineRequest | None = None
    """The same on its way to the engine, until `ready_ns`."""
    ready_ns: int = 0
    warming: bool = True
    sent_ns: int = 0
    first_ns: int = 0
    tokens: int = 0
    cached: int = 0


class _Switched:
    """A step model that is off while the state before the measurement is made: steps then take the host's time alone.
    Implements `pricing.StepModel`."""

    def __init__(self, model: StepModel) -> None:
        self._model = model
        self.tokens_per_row, self.attend_limit = model.tokens_per_row, model.attend_limit
        self.computing = False

    def step_ns(self, step: StepShape) -> int:
        return self._model.step_ns(step) if self.computing else self._model.exposed_ns(step)

    def exposed_ns(self, step: StepShape) -> int:
        return self._model.exposed_ns(step)

    def parts_ns(self, step: StepShape) -> Mapping[str, float]:
        return self._model.parts_ns(step)

    def band(self, step: StepShape) -> float:
        return self._model.band(step)


class _PassedStep:
    """A step of the state before the measurement: it reports no time."""

    def __init__(self, step: StepHandle) -> None:
        self._step = step

    def done(self) -> bool:
        return self._step.done()

    def result(self) -> StepResult:
        return self._step.result()._replace(elapsed_ns=0)


class _Passing:
    """The executor behind that switch. Steps that are passed over tell the scheduler nothing, there as here: it would
    learn that prompts cost nothing, and let too many of those that lost their pages come back at once.
    Implements `engine.protocols.Executor`."""

    def __init__(self, executor: SimulatedExecutor, switch: _Switched) -> None:
        self._executor, self._switch = executor, switch

    @property
    def info(self) -> ExecutorInfo:
        return self._executor.info

    def launch(self, plan: StepPlan) -> StepHandle:
        step = self._executor.launch(plan)
        return step if self._switch.computing else _PassedStep(step)

    def close(self) -> None:
        self._executor.close()


def replay(
    spec: EngineSpec, sessions: Sequence[SessionTree], lanes: int, seconds: float, time: RequestTime | None = None
) -> Replayed:
    """Replay sessions until `seconds` after their states have been made; what has not ended by then does not count.

    Args:
        spec: one engine.
        sessions: in the order in which lanes take them; after the last the first comes again.
        lanes: sessions at once, at most as many as there are.
        seconds: measured.
        time: of a request before the engine; none if None.
    """
    return _Replay(spec, sessions, lanes, time).run(to_ns(seconds))


class _Replay:
    def __init__(self, spec: EngineSpec, sessions: Sequence[SessionTree], lanes: int, time: RequestTime | None) -> None:
        # Prompts of different sessions share nothing there, not even a system prompt.
        self._sessions = [dataclasses.replace(tree, namespace=f"{n}") for n, tree in enumerate(sessions)]
        self._prompts = TracePrompts(self._sessions)
        self._clock = VirtualClock()
        self._switch = _Switched(spec.model)
        self._tally = Tally(spec.model)
        copies = PageCopies(spec.copy_ns, spec.info.page_bytes) if spec.info.host_pages else None
        executor = SimulatedExecutor(
            spec.info, self._switch, self._clock, self._tally, scale=spec.scale, copies=copies
        )  # fmt: skip
        self._executor = executor
        passing = _Passing(executor, self._switch)
        self._engine = Engine(
            passing, spec.scheduler, spec.cache, self._clock, check_interval_ns=_CHECK_INTERVAL_NS
        )  # fmt: skip
        self._time = time
        self._taken = 0
        self._end_ns = 0
        self._lanes = [_Lane(self._next()) for _ in range(lanes)]
        self._done: list[Done] = []

    def _next(self) -> LiveTree:
        number = self._taken
        self._taken += 1
        tree = self._sessions[number % len(self._sessions)]
        return LiveTree(tree, 0, number, f"s{number}", t_star_s=None)

    def run(self, span_ns: int) -> Replayed:
        while self._turn(only_warm=True):
            pass
        self._switch.computing = True
        self._tally.clear()
        before = self._engine.stats()
        self._end_ns = end_ns = self._clock.now_ns() + span_ns
        while self._clock.now_ns() < end_ns:
            self._turn()
        # The call that crosses the end still counts what it brings, as the clock is only looked at between calls.
        after = self._engine.stats()
        return Replayed(
            tuple(self._done),
            self._tally,
            after.evictions - before.evictions,
            after.loaded_pages - before.loaded_pages,
        )

    def _turn(self, *, only_warm: bool = False) -> bool:
        """Send what is due and do one engine step; False if nothing is left to do now."""
        now_ns = self._clock.now_ns()
        for lane in self._lanes:
            if lane.name is None and now_ns >= lane.due_ns and (lane.warming or not only_warm):
                self._send(lane, now_ns)
        for lane in self._lanes:
            if lane.held is not None and self._clock.now_ns() >= lane.ready_ns:
                self._engine.add(lane.held)
                lane.held = None
        if not self._engine.has_work():
            if only_warm:
                return False
            next_ns = min(lane.due_ns if lane.name is None else lane.ready_ns for lane in self._lanes)
            self._clock.advance(max(1, min(next_ns - self._clock.now_ns(), _POLL_NS)))
            return True
        if self._switch.computing and self._took_several():
            return True
        outputs = self._engine.step()
        if outputs is not None:
            self._apply(outputs)
        return True

    def _took_several(self) -> bool:
        """Take the turns up to the next one that has something to send, if all they do is decode."""
        idle = [
            lane.due_ns if lane.name is None else lane.ready_ns
            for lane in self._lanes
            if lane.name is None or lane.held
        ]
        quiet_ns = min([*idle, self._end_ns])
        ahead = ahead_of(self._engine, self._executor, self._clock.now_ns(), quiet_ns)
        if ahead is None:
            return False
        decoding = set(ahead.request_ids)
        turns = ahead.take(ahead.end_ns)
        for lane in self._lanes:
            if lane.name in decoding:
                lane.tokens += turns
        return True

    def _send(self, lane: _Lane, now_ns: int) -> None:
        turn = lane.live.tree.root.requests[lane.at]
        key = RequestKey(lane.live.tree.id, 0, lane.at)
        request = self._prompts.request(lane.live, key, 1 if lane.warming else turn.output_tokens)
        lane.name, lane.sent_ns, lane.first_ns, lane.tokens = request.request_id, now_ns, 0, 0
        lane.held, lane.ready_ns = request, now_ns
        if self._time is not None and self._switch.computing:
            spent_ns = self._time.of(turn.input_tokens)
            if self._time.apart:
                lane.ready_ns += spent_ns
            else:
                self._clock.advance(spent_ns)

    def _apply(self, outputs: StepOutputs) -> None:
        now_ns = self._clock.now_ns()
        by_name = {lane.name: lane for lane in self._lanes if lane.name is not None}
        for output in outputs.outputs:
            lane = by_name[output.request_id]
            if output.token_ids:
                lane.first_ns = lane.first_ns or now_ns
                lane.tokens += len(output.token_ids)
                lane.cached = output.cached_tokens
            if output.finish is not None:
                self._ended(lane, now_ns)

    def _ended(self, lane: _Lane, now_ns: int) -> None:
        turns = lane.live.tree.root.requests
        if not lane.warming:
            tokens = turns[lane.at].input_tokens
            self._done.append(Done(lane.sent_ns, lane.first_ns, now_ns, tokens, lane.tokens, lane.cached))
        lane.name, lane.warming = None, False
        lane.at += 1
        if lane.at < len(turns):
            lane.due_ns = now_ns + to_ns(turns[lane.at].gap_s)
            return
        self._prompts.forget(lane.live)
        lane.live, lane.at, lane.warming, lane.due_ns = self._next(), 0, True, 0
