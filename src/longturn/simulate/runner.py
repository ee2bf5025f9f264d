"""A replay of session trees against simulated engines: `bench agentx` in virtual time.

Sessions, start points, pauses, joins and recycling are `bench.schedule`, the same code that drives a real server; what
comes out is the same `Measurement`. What happens in which order is `timeline`'s.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from longturn.bench.agentx import AgentTurn, Measurement
from longturn.bench.lanes import LiveTree, Send, to_ns
from longturn.bench.presets import Rules
from longturn.bench.schedule import Schedule
from longturn.bench.server_samples import ServerHistory, ServerState, interval_s
from longturn.bench.synth import RequestKey
from longturn.bench.traces.tree import SessionTree
from longturn.bench.validity import Conduct
from longturn.engine.records import StepOutputs
from longturn.errors import LongturnError, RequestError
from longturn.simulate.flights import Flight, turn_of
from longturn.simulate.prompts import TracePrompts
from longturn.simulate.replicas import EngineSpec, make_replicas
from longturn.simulate.router import make_router
from longturn.simulate.tally import Tally, merged
from longturn.simulate.timeline import Timeline


class SimulationError(LongturnError):
    """A simulation cannot go on; the line says why."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a simulation is asked to replay."""

    trees: Sequence[SessionTree]
    """Scaled and filtered already."""
    rules: Rules
    lanes: int
    """Session trees alive at once."""
    seed: int
    router: str = "session"
    request_ns: int = 0
    """From a client's send to the engine: network, rendering, hashing."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of it."""

    measurement: Measurement
    tally: Tally
    """Steps of the measured time, all engines together."""
    preemptions: int
    evictions: int
    offloaded_pages: int = 0
    """Copied to host memory."""
    loaded_pages: int = 0
    """Copied back."""
    host_hit_tokens: int = 0
    """Prompt tokens that were found in host memory."""


def simulate(
    spec: EngineSpec, run: Run, events: Callable[[str], None] | None = None, engine_events: bool = False
) -> Outcome:
    """Replay `run` against engines made of `spec`.

    Args:
        spec: the engines.
        run: what is replayed.
        events: receives one line for every request sent and ended; two runs are equal if their lines are.
        engine_events: the engines' own lines too: every plan and page table, gigabytes for an hour.

    Raises:
        ConfigError: no sessions, no lanes, an unknown router, a setting out of range.
        SimulationError: a warm-up request of a root agent was refused.
    """
    with _quiet_collector():
        return _Simulation(spec, run, events, engine_events).run()


class _Simulation:
    """Implements `timeline.Client`."""

    def __init__(self, spec: EngineSpec, run: Run, events: Callable[[str], None] | None, engine_events: bool) -> None:
        self._spec = spec
        self._run = run
        self._events = events
        self._schedule = Schedule(run.trees, run.rules, run.lanes, run.seed, f"simulated:{run.lanes}")
        self._prompts = TracePrompts(run.trees)
        self._replicas = make_replicas(spec, events if engine_events else None)
        self._router = make_router(run.router, len(self._replicas))
        self._timeline = Timeline(self._replicas, self)
        self._origin_ns = 0
        self._flights: dict[str, Flight] = {}
        self._turns: list[AgentTurn] = []
        self._planned: dict[str, int] = {}
        self._conduct = Conduct()
        self._states: list[ServerState] = []
        self._warm: dict[int, list[RequestKey]] = {}
        """Lane -> warm-up requests that it has not sent."""
        self._warmup_requests = 0
        self._due_known = False
        self._due_ns: int | None = None

    def run(self) -> Outcome:
        self._warm_up()
        self._origin_ns = self._timeline.now_ns
        before = [one.stats() for one in self._replicas]
        for one in self._replicas:
            one.tally.clear()
        self._replay()
        after = [one.stats() for one in self._replicas]
        rules = self._run.rules
        every_s = interval_s(rules.duration_s)
        measurement = Measurement(
            turns=tuple(self._turns),
            planned_turns=dict(self._planned),
            start_ns=self._origin_ns,
            window_s=rules.duration_s,
            conduct=replace(self._conduct, skipped=self._schedule.skipped),
            interrupted=False,
            warmup_requests=self._warmup_requests,
            server=ServerHistory(tuple(self._states), every_s),
        )
        return Outcome(
            measurement,
            merged(one.tally for one in self._replicas),
            *(
                sum(getattr(new, name) - getattr(old, name) for new, old in zip(after, before, strict=True))
                for name in ("preemptions", "evictions", "offloaded_pages", "loaded_pages", "host_hit_tokens")
            ),
        )

    # --- warm-up -----------------------------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        for live, keys in zip(self._schedule.lanes, self._schedule.warm_up(), strict=True):
            self._warm[live.lane] = list(reversed(keys))
            self._next_warm(live)
        grace_s = self._run.rules.warmup_grace_s
        timeline = self._timeline
        while timeline.next_ns is not None:
            timeline.happen()
            if grace_s is not None and timeline.now_ns > to_ns(grace_s) and self._flights:
                raise SimulationError(
                    f"the warm-up took longer than {grace_s:g} s: {self._warmup_requests} requests were answered"
                )

    def _next_warm(self, live: LiveTree) -> None:
        if self._warm[live.lane]:
            self._send(live, self._warm[live.lane].pop(), 1, None)

    # --- measurement -------------------------------------------------------------------------------------------------

    def _replay(self) -> None:
        schedule, timeline, origin_ns = self._schedule, self._timeline, self._origin_ns
        end_ns = origin_ns + schedule.end_ns
        give_up_ns = end_ns + to_ns(self._run.rules.drain_s)
        every_ns = to_ns(interval_s(self._run.rules.duration_s))
        sample_ns = origin_ns
        while True:
            due_ns = self._next_due_ns()
            event_ns = timeline.next_ns
            if schedule.closed and not schedule.in_flight:
                return
            candidates = [at for at in (due_ns, event_ns) if at is not None]
            next_ns = min(candidates, default=end_ns)
            if not schedule.closed and next_ns >= end_ns:
                schedule.due(schedule.end_ns)  # closes it
                self._due_known = False
                continue
            if next_ns > give_up_ns:
                timeline.overtake(give_up_ns)
                self._conduct = replace(self._conduct, undrained=len(self._flights))
                return
            while sample_ns <= next_ns:
                timeline.overtake(sample_ns - 1)
                self._states.append(self._state(sample_ns))
                sample_ns += every_ns
            if event_ns is not None and event_ns == next_ns:
                timeline.happen()
            else:
                timeline.now_ns = next_ns
                self._dispatch()

    def _next_due_ns(self) -> int | None:
        """When the schedule wants something sent; asked again only after something has changed."""
        if not self._due_known:
            due_ns = self._schedule.next_ns()
            self._due_ns = None if due_ns is None else max(self._timeline.now_ns, due_ns + self._origin_ns)
            self._due_known = True
        return self._due_ns

    def _dispatch(self) -> None:
        self._due_known = False
        for send in self._schedule.due(self._timeline.now_ns - self._origin_ns):
            live = self._schedule.lanes[send.lane]
            if live.whole:
                self._planned.setdefault(live.name, sum(1 for _ in live.tree.requests()))
            request = live.tree.conversations[send.key.conversation].requests[send.key.index]
            self._send(live, send.key, max(1, request.output_tokens), send)

    def _state(self, at_ns: int) -> ServerState:
        stats = [one.stats() for one in self._replicas]
        total = sum(one.pages_total for one in stats)
        return ServerState(
            at_ns=at_ns,
            running=sum(one.running for one in stats),
            waiting=sum(one.waiting for one in stats),
            cache_used=sum(one.pages_used for one in stats) / total,
        )

    # --- requests ----------------------------------------------------------------------------------------------------

    def _send(self, live: LiveTree, key: RequestKey, output_tokens: int, send: Send | None) -> None:
        name = f"{live.tree.id}:{live.lane}:{live.recycle}:{key.conversation}:{key.index}"
        progress = self._spec.acceptance.progress(name, output_tokens)
        request = self._prompts.request(live, key, len(progress))
        replica = self._replicas[self._router.choose(live.marker)]
        now_ns = self._timeline.now_ns
        self._flights[request.request_id] = Flight(send, live, key, now_ns, replica, progress)
        if self._events is not None:
            self._events(f"{now_ns} send {request.request_id} to {replica.number}")
        self._timeline.send(replica, request, now_ns + self._run.request_ns)

    def next_send_ns(self) -> int | None:
        return self._next_due_ns() if self._origin_ns else None  # warm-up sends what is due when an answer comes

    def gained(self, request_ids: Sequence[str], tokens: int) -> None:
        for request_id in request_ids:
            self._flights[request_id].steps += tokens

    def answered(self, outputs: StepOutputs) -> None:
        for output in outputs.outputs:
            flight = self._flights[output.request_id]
            count = len(output.token_ids)
            if count and not flight.steps:
                flight.first_ns = self._timeline.now_ns
            flight.steps += count
            if output.finish is not None:
                flight.cached_tokens = output.cached_tokens
                del self._flights[output.request_id]
                self._ended(output.request_id, flight, output.error)

    def refused(self, request_id: str, error: RequestError) -> None:
        flight = self._flights.pop(request_id)
        overflow = error.code == "context_length_exceeded"
        self._ended(request_id, flight, f"refused: {error}", overflow)

    def _ended(self, request_id: str, flight: Flight, error: str | None, overflow: bool = False) -> None:
        now_ns, live = self._timeline.now_ns, flight.live
        self._router.ended(flight.replica.number)
        if self._events is not None:
            self._events(
                f"{now_ns} end {request_id} first {flight.first_ns} cached {flight.cached_tokens} "
                f"out {flight.output_tokens}{'' if error is None else ' ' + error}"
            )
        send = flight.send
        if send is None:
            self._warmup_requests += 1
            if error is not None and flight.key.conversation == 0:
                raise SimulationError(f"the warm-up of session {live.tree.id} failed: {error}")
            if error is not None:
                self._conduct = replace(self._conduct, warmup_errors=self._conduct.warmup_errors + 1)
            self._next_warm(live)
            return
        self._turns.append(turn_of(flight, send, self._origin_ns, now_ns, error))
        if overflow:
            self._conduct = replace(self._conduct, overflows=self._conduct.overflows + 1)
        self._schedule.answered(send, now_ns - self._origin_ns, overflow=overflow)
        self._due_known = False
        if self._schedule.lanes[send.lane] is not live:
            self._prompts.forget(live)
            self._router.session_ended(live.marker)


@contextmanager
def _quiet_collector() -> Iterator[None]:
    """A pool of a hundred thousand linked pages is looked at by every full collection, and nothing in it is garbage."""
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
