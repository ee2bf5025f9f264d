"""The simulated device: steps one after the other, ranks in lockstep."""

from __future__ import annotations

import pytest

from longturn.engine.clock import VirtualClock
from longturn.engine.protocols import ExecutorInfo
from longturn.engine.records import RowWork, StepPlan
from longturn.errors import ConfigError
from longturn.simulate.copies import PageCopies
from longturn.simulate.executor import Lockstep, SimulatedExecutor
from longturn.simulate.pricing import shape_of
from longturn.simulate.router import LeastLoaded, RoundRobin, SessionAffinity, make_router
from longturn.simulate.tally import SAMPLE_EVERY, Tally, merged
from tests.simulate.sessions import PlainModel

INFO = ExecutorInfo(rows=4, pages=9, page_bytes=1, max_context_tokens=999, vocab_size=9, device="simulated")


def plan(step: int, rows: int = 1) -> StepPlan:
    return StepPlan(step, tuple(RowWork(row, 50 + step, 1, True) for row in range(rows)))


def executor(clock: VirtualClock, model: PlainModel | None = None) -> tuple[SimulatedExecutor, Tally]:
    model = model or PlainModel(fixed=100, row=10, host=7)
    tally = Tally(model)
    return SimulatedExecutor(INFO, model, clock, tally), tally


def test_a_step_launched_behind_another_begins_when_that_ends() -> None:
    clock = VirtualClock(1000)
    device, tally = executor(clock)
    first, second = device.launch(plan(1)), device.launch(plan(2, rows=2))
    assert (first.end_ns, second.end_ns) == (1117, 1237) and not first.done()
    assert [row.row for row in second.result().rows] == [0, 1] and clock.now_ns() == 1237 and second.done()
    assert first.result().step_id == 1 and clock.now_ns() == 1237, "time does not run back"
    clock.advance(1000)
    assert device.launch(plan(3)).end_ns == 2237 + 117, "idle: the host's time is not hidden"
    assert (tally.steps, tally.busy_ns) == (3, 340), "host time that is not hidden is not the device's"


def test_a_step_launched_after_an_unread_one_has_ended_does_not_begin_in_the_past() -> None:
    clock = VirtualClock(1000)
    device, _ = executor(clock)
    assert device.launch(plan(1)).end_ns == 1117
    clock.advance(500)
    assert device.launch(plan(2)).end_ns == 1500 + 117


def test_ranks_that_begin_together_end_together() -> None:
    together = Lockstep(3)
    assert together.stretched(0, 0, 100) == 100
    assert together.stretched(1, 0, 30) == 100, "rank 0 is in a step of 100"
    assert together.stretched(2, 0, 150) == 150, "launched later and longer: rank 0 knows nothing of it yet"
    assert together.stretched(0, 100, 20) == 50 + 20, "it waits for the end of rank 2's step"
    assert together.stretched(1, 100, 40) == 50 + 40
    assert together.stretched(2, 150, 10) == 40, "all are together again, and rank 1 is the slowest"
    assert together.stretched(0, 300, 7) == 7, "all have ended"


def test_one_long_step_does_not_echo_between_ranks() -> None:
    together = Lockstep(2)
    ends = [together.stretched(0, 0, 1000), 400 + together.stretched(1, 400, 10)]
    assert ends == [1000, 1010], "rank 1 waits, and then computes"
    for _ in range(20):
        for rank in (0, 1):
            ends[rank] += together.stretched(rank, ends[rank], 10)
    assert max(ends) <= 1010 + 20 * 20, "as long as the steps themselves, and not 1000 each"


def test_tallies_add_up_and_sample() -> None:
    tallies = []
    for _ in range(2):
        tally = Tally(PlainModel(fixed=75, row=25))
        for number in range(2 * SAMPLE_EVERY):
            shape = shape_of([RowWork(0, 5 + number, 1, True)], 1, 0)
            tally.add(shape, tally.model.step_ns(shape))
        tallies.append(tally)
    total = merged(tallies)
    assert (total.steps, total.busy_ns, total.rows) == (4 * SAMPLE_EVERY, 400 * SAMPLE_EVERY, 4 * SAMPLE_EVERY)
    assert total.shares() == {"fixed": 0.75, "rest": 0.25} and total.band == pytest.approx(0.1)
    tallies[0].clear()
    assert tallies[0].steps == 0 and tallies[0].band == 0.0 and tallies[0].shares() == {}


def test_the_scale_of_a_band_multiplies_steps_and_what_the_scheduler_is_told() -> None:
    model = PlainModel(fixed=100, row=10, host=7)
    slow = SimulatedExecutor(INFO, model, VirtualClock(), Tally(model), scale=1.5)
    step = slow.launch(plan(1))
    assert step.end_ns == 165 + 7 and step.result().elapsed_ns == 165


def test_a_plan_without_work_takes_no_time_but_that_of_its_copies() -> None:
    model, clock = PlainModel(fixed=100, row=10, host=7), VirtualClock(1000)
    tally = Tally(model)
    device = SimulatedExecutor(INFO, model, clock, tally, copies=PageCopies(40, 1))
    waits = device.launch(StepPlan(1, (), load_pages=((0, 3), (1, 4))))
    assert waits.end_ns == 1000
    assert waits.result().loaded_pages == (3, 4) and clock.now_ns() == 1080 and tally.steps == 0
    assert device.launch(plan(2)).end_ns == 1080 + 117, "the device was idle meanwhile"


def test_session_affinity_keeps_sessions_and_balances_new_ones() -> None:
    router = SessionAffinity(2)
    assert [router.choose(name) for name in ("a", "b", "a", "c", "b", "d")] == [0, 1, 0, 0, 1, 1]
    router.session_ended("a")
    router.session_ended("unknown")
    assert router.choose("e") == 0 and router.choose("f") == 0, "one place is free on engine 0, then both are equal"


def test_other_routers() -> None:
    turns, least = RoundRobin(3), LeastLoaded(2)
    assert [turns.choose("s") for _ in range(4)] == [0, 1, 2, 0]
    assert [least.choose("s") for _ in range(3)] == [0, 1, 0]
    least.ended(0)
    least.ended(0)
    assert least.choose("s") == 0
    with pytest.raises(ConfigError, match="unknown router"):
        make_router("nearest", 2)
