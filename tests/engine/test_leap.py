"""An engine that has leapt over turns is the engine that took them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from longturn.config import PAGE_TOKENS, CacheConfig, SchedulerConfig
from longturn.engine.clock import VirtualClock
from longturn.engine.hashing import salt_key
from longturn.engine.leap import Taken
from longturn.engine.loop import Engine
from longturn.engine.protocols import ExecutorInfo
from longturn.engine.records import EngineRequest, RowResult, SamplingParams, StepPlan, StepResult
from tests.engine.content import make_request

STEP_NS = 1_000_000


class _Step:
    def __init__(self, plan: StepPlan, clock: VirtualClock, end_ns: int, elapsed_ns: int) -> None:
        self.plan, self.clock, self.end_ns, self.elapsed_ns = plan, clock, end_ns, elapsed_ns

    def done(self) -> bool:
        return False

    def result(self) -> StepResult:
        self.clock.advance(max(0, self.end_ns - self.clock.now_ns()))
        rows = tuple(RowResult(item.row, (0,)) for item in self.plan.work if item.samples)
        return StepResult(self.plan.step_id, rows, self.elapsed_ns)


class _Device:
    """Steps take 1 ms and a microsecond for each that came before; host copies are at once."""

    def __init__(self, clock: VirtualClock, pages: int, host_pages: int) -> None:
        self.clock, self.end_ns = clock, 0
        self.info = ExecutorInfo(8, pages, 1, 1 << 20, 100, "test", host_pages=host_pages)
        self.given: list[tuple[int, Any, Any]] = []
        self.last: _Step | None = None

    def elapsed_ns(self, step_id: int) -> int:
        return STEP_NS + 1_000 * step_id

    def launch(self, plan: StepPlan) -> _Step:
        assert not plan.load_pages
        if plan.new_pages or plan.save_pages:
            self.given.append((plan.step_id, plan.new_pages, plan.save_pages))
        self.end_ns = max(self.end_ns, self.clock.now_ns()) + self.elapsed_ns(plan.step_id)
        self.last = _Step(plan, self.clock, self.end_ns, self.elapsed_ns(plan.step_id))
        return self.last

    def close(self) -> None:
        """Nothing is held."""


def machine(requests: list[EngineRequest], pages: int, host_pages: int) -> tuple[Engine, _Device, VirtualClock]:
    clock = VirtualClock()
    device = _Device(clock, pages, host_pages)
    engine = Engine(device, SchedulerConfig(max_running=8, step_tokens=512), CacheConfig(), clock)
    for request in requests:
        engine.add(request)
    return engine, device, clock


def state(engine: Engine, device: _Device) -> dict[str, Any]:
    """All that an engine knows, but for what it has looked up."""
    scheduler = engine._scheduler
    requests, pool = scheduler.requests, scheduler.requests.pool
    slots = [name for name in type(requests.running[0]).__slots__ if name not in ("request", "pages")]
    return {
        "requests": [{name: getattr(one, name) for name in slots} for one in requests.running],
        "pages": [[page.id for page in one.pages] for one in requests.running],
        "blank": [page.id for page in pool._blank],
        "cache": {name: page.id for name, page in pool.cache._pages.items()},
        "lists": [[page.id for page in pages] for pages in pool._retention._lists],
        "host": None if pool.host is None else {name: slot.id for name, slot in pool.host._cache._pages.items()},
        "computing": sorted(requests.order.computing._owners),
        "times": {name: getattr(scheduler.step_time, name) for name in ("decode_ns", "fixed_ns", "per_token_ns")},
        "counters": (scheduler._step_id, scheduler._steps, scheduler._generated_tokens),
        "launched": {step: [one.number for one in it.sequences] for step, it in scheduler._launched.items()},
        "plans": [(one.plan.step_id, one.plan.work) for one in engine._in_flight],
        "loop": (engine._busy_ns, engine._busy_since_ns, engine._repeated, engine._idle),
        "stats": engine.stats(),
        "given": device.given,
        "now": device.clock.now_ns(),
        "end": device.end_ns,
    }


def take(engine: Engine, device: _Device, most: int) -> int:
    """Leap over at most `most` turns, as an executor with a clock of its own would have it; how many."""
    stretch = engine.stretch()
    if stretch is None:
        return 0
    turns = min(most, stretch.turns)
    now_ns, flying = device.clock.now_ns(), device.last
    assert flying is not None and flying.plan is stretch.plan
    first = stretch.plan.step_id
    elapsed = [device.elapsed_ns(first + turn) for turn in range(turns + 1)]
    times = [now_ns, *itertools.accumulate(elapsed[1:turns], initial=flying.end_ns)]

    def launched(plan: StepPlan, taken: list[Taken]) -> _Step:
        device.given += [(first + 1 + one.number, one.new_pages, one.save_pages) for one in taken]
        device.clock.advance(times[turns] - now_ns)
        device.end_ns = times[turns] + elapsed[turns]
        device.last = _Step(plan, device.clock, device.end_ns, elapsed[turns])
        return device.last

    engine.leap(stretch, elapsed[:turns], times, launched)
    return turns


def prompts(count: int, output: int) -> list[EngineRequest]:
    return [
        make_request(f"r{n}", [n * 7 + i for i in range(100 + 90 * n)], output + 37 * n, stop=False)
        for n in range(count)
    ]


@pytest.mark.parametrize("most", [1, 2, 7, 50, 1000])
@pytest.mark.parametrize(("pages", "host_pages"), [(200, 0), (24, 0), (24, 30)])
def test_a_leap_leaves_what_its_turns_leave(pages: int, host_pages: int, most: int) -> None:
    load = prompts(4, 420)
    leaping, its_device, its_clock = machine(load, pages, host_pages)
    plain, device, clock = machine(load, pages, host_pages)
    leaps = 0
    for _ in range(3000):
        turns = take(leaping, its_device, most)
        for _ in range(turns):
            plain.step()
        if turns:
            leaps += 1
            leaping.check_invariants()
            assert state(leaping, its_device) == state(plain, device)
        ours, theirs = leaping.step(), plain.step()
        assert ours == theirs and its_clock.now_ns() == clock.now_ns()
        if not leaping.has_work():
            break
    assert not leaping.has_work() and leaps > 3
    assert all(len(one) == len(other) for one, other in zip(its_device.given, device.given, strict=True))
    assert max(step for step, _, _ in device.given) > PAGE_TOKENS, "pages were taken while decoding"


def test_requests_that_watch_their_tokens_are_not_leapt_over() -> None:
    sampling = SamplingParams(max_tokens=300, stop_token_ids=(5,))
    for more in (sampling, SamplingParams(max_tokens=300, logprobs=1)):
        request = EngineRequest("r", bytes(400), (), more, hash_key=salt_key("x"))
        engine, _, _ = machine([request], 50, 0)
        for _ in range(20):
            engine.step()
            assert engine.stretch() is None


class _Listener:
    def tell(self, events: object) -> None:
        """Not looked at here."""

    def close(self) -> None:
        """Nothing is held."""


@pytest.mark.parametrize("what", ["nothing", "events", "cache events", "no run-ahead"])
def test_whoever_wants_every_step_gets_it(what: str) -> None:
    clock = VirtualClock()
    engine = Engine(
        _Device(clock, 50, 0),
        SchedulerConfig(max_running=8, step_tokens=512, run_ahead=what != "no run-ahead"),
        CacheConfig(),
        clock,
        (lambda line: None) if what == "events" else None,
        cache_listener=_Listener() if what == "cache events" else None,
    )
    engine.add(prompts(1, 300)[0])
    found = 0
    for _ in range(20):
        engine.step()
        found += engine.stretch() is not None
    assert (found > 0) == (what == "nothing")
