"""The simulated device: steps one after the other, ranks in lockstep, pages in host memory."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longturn.engine.clock import VirtualClock
from longturn.engine.protocols import ExecutorInfo
from longturn.engine.records import NewRow, RowWork, SamplingParams, StepPlan
from longturn.errors import ConfigError
from longturn.simulate.executor import Lockstep, SimulatedExecutor
from longturn.simulate.host_tier import HostTier
from longturn.simulate.pricing import Pricer
from longturn.simulate.router import LeastLoaded, RoundRobin, SessionAffinity, make_router
from longturn.simulate.tally import SAMPLE_EVERY, Tally, merged
from tests.simulate.sessions import PlainModel

INFO = ExecutorInfo(rows=4, pages=9, page_bytes=1, max_context_tokens=999, vocab_size=9, device="simulated")


def plan(step: int, rows: int = 1) -> StepPlan:
    return StepPlan(step, tuple(RowWork(row, 50 + step, 1, True) for row in range(rows)))


def executor(clock: VirtualClock, model: PlainModel | None = None) -> tuple[SimulatedExecutor, Tally]:
    model = model or PlainModel(fixed=100, row=10, host=7)
    tally = Tally(model)
    return SimulatedExecutor(INFO, Pricer(model), clock, tally), tally


def test_a_step_launched_behind_another_begins_when_that_ends() -> None:
    clock = VirtualClock(1000)
    device, tally = executor(clock)
    first, second = device.launch(plan(1)), device.launch(plan(2, rows=2))
    assert (first.end_ns, second.end_ns) == (1117, 1237) and not first.done()
    assert [row.row for row in second.result().rows] == [0, 1] and clock.now_ns() == 1237 and second.done()
    assert first.result().step_id == 1 and clock.now_ns() == 1237, "time does not run back"
    clock.advance(1000)
    assert device.launch(plan(3)).end_ns == 2237 + 117, "idle: the host's time is not hidden"
    assert (tally.steps, tally.busy_ns) == (2, 230), "the last round is still open"


def test_ranks_of_one_replica_wait_for_the_slowest_in_flight() -> None:
    together = Lockstep(3)
    assert together.stretched(0, 0, 100) == 100
    assert together.stretched(1, 50, 30) == 100, "rank 0 is in a step of 100"
    assert together.stretched(2, 200, 30) == 30, "all have ended"
    assert together.stretched(0, 210, 90) == 90


def test_tallies_add_up_and_sample() -> None:
    tallies = []
    for _ in range(2):
        tally = Tally(PlainModel(fixed=75, row=25))
        for number in range(2 * SAMPLE_EVERY):
            work = [RowWork(0, 5 + number, 1, True)]
            pricer = Pricer(tally.model)
            pricer.price(work, idle=False)
            tally.add(*pricer.round)
        tallies.append(tally)
    total = merged(tallies)
    assert (total.steps, total.busy_ns, total.rows) == (4 * SAMPLE_EVERY, 400 * SAMPLE_EVERY, 4 * SAMPLE_EVERY)
    assert total.shares() == {"fixed": 0.75, "rest": 0.25} and total.band == pytest.approx(0.1)
    tallies[0].clear()
    assert tallies[0].steps == 0 and tallies[0].band == 0.0 and tallies[0].shares() == {}


class TwinTier:
    """The same by the book: an ordered dictionary, one page at a time."""

    def __init__(self, room: int) -> None:
        self.room, self.near = room, OrderedDict[int, None]()

    def use(self, page: int) -> bool:
        """Whether it had to be fetched."""
        missing = page not in self.near
        self.near[page] = None
        self.near.move_to_end(page)
        return missing


@given(st.lists(st.tuples(st.lists(st.integers(1, 12), unique=True, max_size=6), st.integers(0, 6)), max_size=30))
def test_host_tier_fetches_filled_pages_that_left_the_chips(uses: list[tuple[list[int], int]]) -> None:
    tier, twin = HostTier(8, lambda pages: 10 * pages), TwinTier(8)
    for step, (pages, filled) in enumerate(uses):
        filled = min(filled, len(pages))
        row = NewRow(0, "r", b"", 1, tuple(pages), SamplingParams(max_tokens=1))
        expected = 0
        for place, page in enumerate(pages):
            expected += twin.use(page) and place < filled
        while len(twin.near) > twin.room:
            twin.near.popitem(last=False)
        work = (RowWork(0, filled * 128, 1, False),)
        assert tier.fetch_ns(StepPlan(step, work, (row,))) == 10 * expected
    assert tier.fetch_ns(StepPlan(99, ())) == 0


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
