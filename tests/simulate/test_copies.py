"""Copies to host memory and back in virtual time: when they end, who waits for whom, and the real engine on top."""

from __future__ import annotations

import dataclasses
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.config import CacheConfig, SchedulerConfig
from longturn.engine.clock import VirtualClock
from longturn.engine.loop import Engine
from longturn.engine.records import EngineRequest, NewRow, RowWork, SamplingParams, StepPlan
from longturn.simulate.copies import BURST_BYTES, MOST_GROUP_PAGES, PageCopies
from longturn.simulate.executor import SimulatedExecutor
from longturn.simulate.replicas import EngineSpec
from longturn.simulate.runner import simulate
from longturn.simulate.tally import Tally
from tests.simulate.sessions import PlainModel, rules, run, spec, tree

PAGE_NS = 100
IDLE = StepPlan(0, ())


def copies(page_bytes: int = 1) -> PageCopies:
    return PageCopies(PAGE_NS, page_bytes)


def saves(*pairs: tuple[int, int]) -> StepPlan:
    return StepPlan(1, (), save_pages=pairs)


def loads(*pairs: tuple[int, int]) -> StepPlan:
    return StepPlan(1, (), load_pages=pairs)


def writes(page: int, *, start: int = 0, **more: object) -> StepPlan:
    row = NewRow(0, "r", b"", 1, (page,), SamplingParams(max_tokens=1))
    return StepPlan(2, (RowWork(0, start, 1, True),), (row,), **more)  # type: ignore[arg-type]


def test_loads_follow_each_other_and_are_told_once() -> None:
    clock, link = VirtualClock(1_000), copies()
    assert link.begin(loads((0, 5), (1, 6), (2, 7)), 1_000, 1_000) == 1_000, "a step does not wait for loads"
    assert link.ended(IDLE, clock) == (5, 6, 7) and clock.now_ns() == 1_300, "without work it waits for them"
    assert link.ended(IDLE, clock) == () and clock.now_ns() == 1_300, "nothing is left to wait for"
    link.begin(loads((3, 8)), 1_350, 1_350)
    assert link.ended(writes(1), VirtualClock(1_440)) == (), "a step with work waits for nothing"
    assert link.ended(writes(1), VirtualClock(1_450)) == (8,)


def test_a_load_waits_for_the_save_that_fills_its_slot() -> None:
    link = copies()
    link.begin(saves((5, 0), (6, 1)), 0, 0)
    clock = VirtualClock(0)
    link.begin(loads((1, 9)), 0, 0)
    assert link.ended(IDLE, clock) == (9,) and clock.now_ns() == 200 + 100


def test_a_save_waits_for_the_load_that_reads_its_slot() -> None:
    link = copies()
    link.begin(loads((0, 5)), 0, 0)
    link.begin(saves((6, 0)), 0, 0)  # ends at 200
    assert link.begin(writes(6), 50, 50) == 200, "a step waits for the save of what it overwrites"
    assert link.begin(writes(7), 50, 50) == 50


def test_the_page_of_a_row_that_decodes_is_waited_for_only_where_it_is_written() -> None:
    link = copies()
    first = NewRow(3, "r", b"", 1, (10, 11), SamplingParams(max_tokens=1))
    link.begin(StepPlan(1, (RowWork(3, 0, 200, True),), (first,)), 0, 0)
    link.begin(saves((10, 0), (11, 1), (12, 2)), 0, 0)
    decode = StepPlan(2, (RowWork(3, 200, 1, True),))
    assert link.begin(decode, 10, 10) == 300, "position 200 lies in page 11, whose group of saves ends at 300"
    grown = StepPlan(3, (RowWork(3, 256, 1, True),), new_pages=((3, (20,)),))
    assert link.begin(grown, 10, 10) == 10, "page 20 is not being copied"


def test_so_many_loads_are_on_their_way_at_once_and_the_rest_follows() -> None:
    clock, link = VirtualClock(0), copies(page_bytes=BURST_BYTES // 4)
    link.begin(loads(*((slot, slot) for slot in range(10))), 0, 0)
    found: list[int] = []
    while True:
        told = link.ended(IDLE, clock)
        if not told:
            break
        found += told
        assert len(told) == 1, "pages of this size are groups of their own"
    assert found == list(range(10)) and clock.now_ns() == 1_000


def test_small_pages_end_in_groups() -> None:
    clock, link = VirtualClock(0), copies()
    link.begin(loads(*((slot, slot) for slot in range(MOST_GROUP_PAGES + 3))), 0, 0)
    assert len(link.ended(IDLE, clock)) == MOST_GROUP_PAGES and clock.now_ns() == MOST_GROUP_PAGES * PAGE_NS
    assert len(link.ended(IDLE, clock)) == 3


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5, unique_by=lambda pair: pair[1]),
            st.lists(st.tuples(st.integers(0, 9), st.integers(10, 400)), max_size=5, unique_by=lambda pair: pair[1]),
            st.integers(0, 700),
        ),
        max_size=12,
    )
)
def test_every_load_ends_once_and_no_sooner_than_its_link_allows(plans: list[tuple]) -> None:  # type: ignore[type-arg]
    """A twin that only counts: loads take the link's time each, in order, and none begins before it is ordered."""
    clock, link = VirtualClock(0), copies()
    ordered: list[tuple[int, int]] = []
    told: list[tuple[int, int]] = []
    for save, load, later in plans:
        clock.advance(later)
        now = clock.now_ns()
        link.begin(StepPlan(1, (), save_pages=tuple(save), load_pages=tuple(load)), now, now)
        ordered += [(now, page) for _, page in load]
        told += [(clock.now_ns(), page) for page in link.ended(writes(1), clock)]
    while pages := link.ended(IDLE, clock):
        told += [(clock.now_ns(), page) for page in pages]
    assert [page for _, page in told] == [page for _, page in ordered]
    for number, ((begun, _), (ended, _)) in enumerate(zip(ordered, told, strict=True)):
        assert ended >= begun + PAGE_NS and ended >= (number + 1) * PAGE_NS


def two_tiers(pages: int, host_pages: int, copy_ns: int = 50_000) -> EngineSpec:
    found = spec(pages=pages)
    info = dataclasses.replace(found.info, host_pages=host_pages, copies_pages=True)
    return dataclasses.replace(found, info=info, copy_ns=copy_ns)


def hits(engines: EngineSpec) -> tuple[float, int, int]:
    sessions = [tree(f"t{n}", turns=5, start=40 + 30 * n, step=24, out=12 + n, pause=0.4) for n in range(6)]
    done = simulate(engines, run(sessions, 4, rules=rules(40.0)))
    answers = [turn.record.answer for turn in done.measurement.turns]
    assert answers and all(answer.ok for answer in answers)
    cached = sum(answer.cached_tokens or 0 for answer in answers)
    return cached / sum(answer.prompt_tokens or 0 for answer in answers), done.loaded_pages, done.host_hit_tokens


def test_host_pages_bring_hits_back_that_the_chips_alone_lose() -> None:
    alone, none_loaded, no_hits = hits(two_tiers(16, 0))
    beside, loaded, host_hits = hits(two_tiers(16, 256))
    plenty, _, _ = hits(two_tiers(512, 0))
    assert (none_loaded, no_hits) == (0, 0) and loaded > 0 and host_hits > 0
    assert alone < beside == pytest.approx(plenty, abs=0.02)


def test_slower_links_delay_answers() -> None:
    sessions = [tree(f"t{n}", turns=5, start=40 + 30 * n, step=24, out=4, pause=0.1) for n in range(6)]
    ends = []
    for copy_ns in (1_000, 1_000_000, 5_000_000):
        done = simulate(two_tiers(16, 256, copy_ns), run(sessions, 4, rules=rules(30.0)))
        answers = [turn.record.answer for turn in done.measurement.turns]
        ends.append(sum(answer.end_ns - answer.sent_ns for answer in answers) / len(answers))
    assert ends == sorted(ends) and ends[0] < ends[-1]


def test_two_runs_with_host_pages_write_equal_lines() -> None:
    load = run([tree(f"t{n}", turns=5, start=60, step=24) for n in range(5)], 4, rules=rules(20.0))
    shown = []
    for _ in range(2):
        lines: list[str] = []
        simulate(two_tiers(16, 64), load, lines.append, engine_events=True)
        shown.append(lines)
    assert shown[0] == shown[1] and any(" loads ((" in line for line in shown[0])


def test_the_engines_books_balance_after_every_step() -> None:
    """Requests that share prefixes, on few pages: after every step nothing is lost between the tiers."""
    draw = random.Random(11)
    clock = VirtualClock()
    model = PlainModel()
    info = dataclasses.replace(spec(pages=24).info, host_pages=40, copies_pages=True)
    executor = SimulatedExecutor(info, model, clock, Tally(model), copies=PageCopies(300_000, 1))
    scheduler = SchedulerConfig(max_running=4, step_tokens=512, target_itl_ms=0.0)
    engine = Engine(executor, scheduler, CacheConfig(), clock)
    ended = 0
    for number in range(120):
        family, length = draw.randrange(6), draw.randrange(1, 9)
        pages = tuple(struct.pack("<QQ", family, page) for page in range(length))
        prompt = bytes(4 * (128 * length + draw.randrange(128)))
        sampling = SamplingParams(max_tokens=draw.randrange(1, 6), temperature=0.0)
        engine.add(EngineRequest(f"r{number}", prompt, pages, sampling))
        for _ in range(draw.randrange(6)):
            outputs = engine.step()
            engine.check_invariants()
            if outputs is None:
                break
            ended += sum(one.finish is not None for one in outputs.outputs)
    while (outputs := engine.step()) is not None:
        engine.check_invariants()
        ended += sum(one.finish is not None for one in outputs.outputs)
    stats = engine.stats()
    assert ended == 120 and stats.host_hit_tokens > 0 and stats.loaded_pages > 0 and stats.offloaded_pages > 0
    assert stats.pages_used == 0
