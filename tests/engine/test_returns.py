"""Which turns are held, in closed loops of sessions that do not fit, and what a turn has lost, against a twin."""

from __future__ import annotations

import math
import random
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longturn.config import PAGE_TOKENS, CacheConfig, SchedulerConfig
from longturn.engine.pacing import StepTimeModel
from longturn.engine.returns import Returns
from longturn.engine.sequence import Sequence
from tests.engine.content import Bench, make_request, random_tokens
from tests.engine.tiered import TieredBench

SECOND = 1_000_000_000
NEW_ROWS = re.compile(r"\(\d+, '(\S+)', \d+, \(")
"""Names of requests in a plan's event that have got a row."""


def closed_loop(
    seed: int,
    *,
    share: float,
    sessions: int,
    turns: int = 5,
    pages: int = 40,
    host_pages: int = 0,
    named: bool = True,
    prompt: tuple[int, int] = (1000, 1900),
    gap_s: float = 0.2,
) -> Bench:
    """Sessions that take turns, each beginning with all of the one before; what a held turn waits for is checked."""
    rng = random.Random(seed)
    scheduler = SchedulerConfig(
        step_tokens=256, target_itl_ms=0.0, expected_output_tokens=16, recompute_share=share, max_running=8
    )
    cache = CacheConfig()
    bench = (
        TieredBench(pages=pages, scheduler=scheduler, cache=cache, host_pages=host_pages)
        if host_pages
        else Bench(pages=pages, scheduler=scheduler, cache=cache)
    )
    histories = {n: random_tokens(rng, rng.randrange(*prompt)) for n in range(sessions)}
    due = {n: (rng.randrange(SECOND), 0) for n in range(sessions)}
    flying: dict[str, int] = {}
    taken = dict.fromkeys(range(sessions), 0)
    returns = bench.engine._scheduler.requests.returns
    longest_pause = longest_step = 0.0
    while due or flying:
        now = bench.clock.now_ns()
        for number in [n for n, (at, _) in due.items() if at <= now]:
            del due[number]
            name = f"{number}.{taken[number]}"
            flying[name] = number
            session = f"s{number}" if named else None
            bench.add(make_request(name, histories[number], rng.choice([8, 30, 60]), stop=False, session=session))
        if not bench.engine.has_work():
            bench.clock.advance(max(1, min(at for at, _ in due.values()) - now))
            continue
        for output in bench.step():
            if output.finish is None:
                continue
            number = flying.pop(output.request_id)
            taken[number] += 1
            histories[number] += bench.outputs[output.request_id] + random_tokens(rng, rng.randrange(1, 60))
            if taken[number] < turns and len(histories[number]) + 64 < bench.limit:
                due[number] = (bench.clock.now_ns() + round(rng.uniform(0, gap_s) * SECOND), taken[number])
        longest_step = max(longest_step, bench.clock.now_ns() - now)
        if returns._open_ns < float("inf"):
            longest_pause = max(longest_pause, returns._open_ns - now)
    bench.drain()
    check_order(bench, longest_pause + longest_step if share > 0 else None)
    return bench


def events(bench: Bench, *kinds: str) -> list[tuple[int, str, str]]:
    """(time, kind, request) of such events."""
    split = [line.split() for line in bench.log]
    return [(int(words[0]), words[1], words[2]) for words in split if words[1] in kinds]


def check_order(bench: Bench, longest_ns: float | None) -> None:
    """Held turns go on in the order in which they were held, each at most `longest_ns` after the one before it has got
    its row."""
    begun = {name: int(line.split()[0]) for line in bench.log for name in NEW_ROWS.findall(line)}
    aside: list[str] = []
    since = 0
    for at, kind, name in events(bench, "hold", "recall"):
        if kind == "hold":
            since = since if aside else max(since, at)
            aside.append(name)
        else:
            assert aside.pop(0) == name
            assert longest_ns is None or at - since <= longest_ns
            since = begun[name]
    assert not aside


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 1 << 32),
    st.sampled_from([0.0, 0.1, 0.25, 0.9, 1.0]),
    st.integers(1, 7),
    st.sampled_from([17, 30, 60]),
    st.sampled_from([0, 12, 40]),
)
def test_every_turn_ends_and_none_waits_longer_than_those_before_it_account_for(
    seed: int, share: float, sessions: int, pages: int, host_pages: int
) -> None:
    closed_loop(seed, share=share, sessions=sessions, turns=3, pages=pages, host_pages=host_pages)


@pytest.mark.parametrize("seed", range(3))
def test_sessions_that_do_not_fit_compute_less_if_they_wait_for_each_other(seed: int) -> None:
    """Six sessions of some twelve pages in a pool of 39: without holding nearly each turn computes everything."""
    free, held = (closed_loop(seed, share=share, sessions=6, turns=12) for share in (1.0, 0.25))
    assert not events(free, "hold") and len(events(held, "hold")) > 3
    hits = [bench.engine.stats().cached_tokens / bench.engine.stats().prompt_tokens for bench in (free, held)]
    assert hits[1] > hits[0] + 0.15
    assert held.clock.now_ns() < free.clock.now_ns()


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_held_of_sessions_that_fit_or_have_no_name(seed: int) -> None:
    for sessions, named in ((2, True), (6, False)):
        logs = [closed_loop(seed, share=share, sessions=sessions, named=named).log for share in (0.0, 0.25, 1.0)]
        assert logs[0] == logs[1] == logs[2]


def thrashed(priority: int = 0) -> Bench:
    """One session whose pages are gone comes back while another one's request runs, and the time for it is spent."""
    scheduler = SchedulerConfig(step_tokens=256, target_itl_ms=0.0, recompute_share=0.01)
    bench = Bench(pages=30, scheduler=scheduler)
    rng = random.Random(1)
    prompts = [random_tokens(rng, length) for length in (1500, 600, 1500, 1500)]
    for turn in range(2):  # the second turns find nothing
        for number, prompt in enumerate(prompts):
            bench.run_one(make_request(f"{number}.{turn}", prompt, 4, stop=False, session=f"s{number}"))
    bench.add(make_request("long", random_tokens(rng, 300), 200, stop=False, session="s9"))
    for _ in range(5):
        bench.step()
    bench.add(make_request("back", prompts[0], 4, stop=False, session="s0", priority=priority))
    bench.add(make_request("first", random_tokens(rng, 700), 4, stop=False, session="s10"))
    return bench


def test_none_that_lost_its_pages_passes_one_that_is_held() -> None:
    """Not even a shorter one that comes when it is time."""
    bench = thrashed()
    while not events(bench, "hold"):
        bench.step()
    prompt = random_tokens(random.Random(1), 2100)[1500:]  # of session 1
    bench.add(make_request("short", prompt, 4, stop=False, session="s1"))
    bench.engine._scheduler.requests.returns._open_ns = 0.0
    bench.drain()
    assert [name for _, _, name in events(bench, "hold", "recall")] == ["back", "back", "short", "short"]


def test_a_turn_that_lost_its_pages_waits_while_others_run_and_first_turns_pass() -> None:
    bench = thrashed()
    bench.drain()
    order = [name for _, _, name in events(bench, "length")][-3:]
    assert order == ["first", "long", "back"]
    assert [name for _, _, name in events(bench, "hold", "recall")] == ["back", "back"]


def test_an_urgent_turn_is_not_held() -> None:
    bench = thrashed(priority=-1)
    bench.drain()
    assert not events(bench, "hold")
    assert [name for _, _, name in events(bench, "length")][-1] == "long"


def test_no_turn_is_held_for_ever() -> None:
    bench = thrashed()
    while not events(bench, "hold"):
        bench.step()
    bench.engine._scheduler.requests.returns._open_ns = math.inf  # its own time never comes
    bench.step()
    assert not events(bench, "recall")
    bench.clock.advance(300 * SECOND)
    bench.step()
    assert events(bench, "recall")
    bench.drain()
    assert [name for _, _, name in events(bench, "length")][-1] == "long"


def test_a_held_turn_can_be_aborted() -> None:
    bench = thrashed()
    while not events(bench, "hold"):
        bench.step()
    assert bench.engine.stats().waiting == 1
    assert bench.engine.abort("back")
    bench.step()
    assert bench.engine.stats().waiting == 0
    bench.drain()
    assert not events(bench, "recall")


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 1 << 32))
def test_lost_pages_equal_the_twin(seed: int) -> None:
    """The twin keeps every prompt that ended and compares it with what comes back, page by page."""
    rng = random.Random(seed)
    returns = Returns(0.5, StepTimeModel(), 256)
    pool = [random_tokens(rng, pages * PAGE_TOKENS) for pages in (3, 6, 40)]
    ended: list[tuple[bytes, ...]] = []
    for number in range(40):
        base = rng.choice(pool)
        base = base[: rng.randrange(len(base) // 2, len(base))]
        prompt = base + random_tokens(rng, rng.choice([0, 1, 200]))
        session = rng.choice(["a", "b", None])
        sequence = Sequence(make_request(f"r{number}", prompt, session=session), len(prompt), 4000, number, 0)
        hits = rng.choice([0, sequence.hit_limit // 2, max(0, sequence.hit_limit - 2), sequence.hit_limit])
        wanted = 0
        for old in ended:
            # All pages of an ended prompt but its last one, or that one if it is alone.
            last = max(0, len(old) - 2)
            if last < sequence.hit_limit and sequence.hashes[: last + 1] == list(old[: last + 1]):
                wanted = max(wanted, last + 1 - hits)
        assert returns.lost(sequence, hits) == wanted
        heavy = wanted > len(prompt) / 16 / PAGE_TOKENS
        sequence.preemptions = rng.choice([0, 0, 0, 1])
        counts = session is not None and heavy and not sequence.preemptions
        assert returns.missing(sequence, hits) == (wanted if counts else 0)
        computed = rng.random() < 0.8
        if computed:
            sequence.generated.append(1)
        if session is not None and sequence.hashes and computed:
            ended.append(tuple(sequence.hashes))
        returns.ended(sequence)
