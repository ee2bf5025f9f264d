"""The policies: order and starvation, decode share and latency, admission, preemption, shared computation, refusals."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest

from longturn.config import PAGE_TOKENS, CacheConfig, SchedulerConfig
from longturn.engine.pacing import MIN_CHUNK_TOKENS
from longturn.engine.records import EngineRequest, EngineStats, FinishReason, SamplingParams
from longturn.errors import ConfigError, OverloadedError, RequestError
from tests.engine.content import Bench, Costs, make_request, random_tokens

MS = 1_000_000


def first_token_steps(bench: Bench, names: set[str], most: int = 100_000) -> dict[str, int]:
    """Step until each of `names` has its first token; the step number of each."""
    found: dict[str, int] = {}
    while len(found) < len(names) and bench.steps < most:
        for output in bench.step():
            if output.request_id in names and (output.token_ids or output.finish):
                found.setdefault(output.request_id, bench.steps)
    return found


# --- order ------------------------------------------------------------------------------------------------------------


def test_a_short_prompt_passes_a_long_one() -> None:
    bench = Bench(pages=60, scheduler=SchedulerConfig(step_tokens=128))
    rng = random.Random(1)
    bench.add(make_request("long", random_tokens(rng, 4000), 1, stop=False))
    bench.step()
    bench.add(make_request("short", random_tokens(rng, 100), 1, stop=False))
    found = first_token_steps(bench, {"long", "short"})
    assert found["short"] <= 5
    assert found["long"] > 25
    bench.drain()


def test_what_is_cached_of_a_prompt_does_not_count_as_its_length() -> None:
    """Both wait behind one that takes the only row: a warm turn is short, however long its prompt."""
    bench = Bench(pages=60, rows=1, scheduler=SchedulerConfig(step_tokens=128, max_running=1))
    rng = random.Random(1)
    history = random_tokens(rng, 20 * PAGE_TOKENS)
    bench.run_one(make_request("turn", history, 1, stop=False))
    bench.add(make_request("running", random_tokens(rng, 10), 5, stop=False))
    bench.step()
    bench.add(make_request("cold", random_tokens(rng, 500), 1, stop=False))
    bench.add(make_request("warm", [*history, *random_tokens(rng, 20)], 1, stop=False))
    found = first_token_steps(bench, {"cold", "warm"})
    assert found["warm"] < found["cold"]
    bench.drain()


def test_priority_counts_among_equals() -> None:
    bench = Bench(pages=60, scheduler=SchedulerConfig(step_tokens=128))
    rng = random.Random(1)
    for name, priority in (("c", 2), ("b", 1), ("a", 0)):
        bench.add(make_request(name, random_tokens(rng, 500), 1, stop=False, priority=priority))
    found = first_token_steps(bench, {"a", "b", "c"})
    assert found["a"] < found["b"] < found["c"]
    bench.drain()


@pytest.mark.parametrize("ageing_ms", [50.0, 200.0])
def test_a_long_prompt_is_overtaken_only_within_the_stated_bound(ageing_ms: float) -> None:
    """Short prompts arrive for ever, faster than the machine serves them. The long one is overtaken only by those
    that arrived less than ageing * log2(long / short) after it."""
    scheduler = SchedulerConfig(
        step_tokens=256, ageing_ms=ageing_ms, target_itl_ms=0, max_waiting=100_000, max_running=8
    )
    bench = Bench(pages=80, scheduler=scheduler, cache=CacheConfig(prefix_caching=False))
    rng = random.Random(2)
    bench.add(make_request("long", random_tokens(rng, 3000), 1, stop=False))
    numbers = itertools.count()
    arrived: dict[str, int] = {}
    while "long" not in bench.finals:
        for _ in range(4):
            name = f"s{next(numbers)}"
            arrived[name] = bench.clock.now_ns()
            bench.add(make_request(name, random_tokens(rng, 100), 1, stop=False))
        bench.step()
        assert bench.steps < 2000, "the long prompt starves"
    bound_ns = ageing_ms * MS * math.log2(3000 / 100)
    overtaking = [name for name in bench.finals if name != "long" and arrived[name] > 0]
    assert len(overtaking) > 5
    # Run-ahead has one more step planned when the last chunk's result is read.
    slack_ns = 4 * 40 * MS
    assert max(arrived[name] for name in overtaking) <= bound_ns + slack_ns


def test_without_ageing_order_is_arrival() -> None:
    bench = Bench(pages=80, scheduler=SchedulerConfig(step_tokens=128, ageing_ms=0))
    rng = random.Random(3)
    names = []
    for index, length in enumerate((900, 10, 500, 200)):
        names.append(f"r{index}")
        bench.add(make_request(names[-1], random_tokens(rng, length), 1, stop=False))
        bench.clock.advance(10)
    found = first_token_steps(bench, set(names))
    assert sorted(names, key=found.__getitem__) == names
    bench.drain()


# --- decode share and latency -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.0, 0.25, 0.75])
def test_decodes_keep_their_share(share: float) -> None:
    scheduler = SchedulerConfig(step_tokens=64, decode_share=share, target_itl_ms=0, expected_output_tokens=1)
    bench = Bench(pages=120, rows=16, scheduler=scheduler)
    rng = random.Random(4)
    for index in range(10):
        bench.add(make_request(f"d{index}", random_tokens(rng, 5), 150, stop=False))
    while len(bench.engine._scheduler.requests.running) < 10 or any(not out for out in bench.outputs.values()):
        bench.step()
    for index in range(4):
        bench.add(make_request(f"p{index}", random_tokens(rng, 1500), 1, stop=False))
    seen = len(bench.executor.plans)
    for _ in range(60):
        bench.step()
    guaranteed = max(1, math.ceil(share * 64))
    for plan in bench.executor.plans[seen + 2 :]:
        decodes = sum(work.count == 1 for work in plan.work)
        prompt = plan.tokens - decodes
        assert decodes == 10
        assert plan.tokens <= 64
        assert 1 <= prompt <= 64 - max(guaranteed, decodes)
    bench.drain()


def test_more_decodes_than_budget_take_turns_beside_a_prompt() -> None:
    scheduler = SchedulerConfig(step_tokens=8, decode_share=0.5, target_itl_ms=0, expected_output_tokens=1)
    bench = Bench(pages=60, rows=16, scheduler=scheduler)
    rng = random.Random(5)
    for index in range(12):
        bench.add(make_request(f"d{index}", random_tokens(rng, 2), 60, stop=False))
    for _ in range(30):
        bench.step()
    bench.add(make_request("prompt", random_tokens(rng, 300), 1, stop=False))
    bench.step()
    counts = {name: len(out) for name, out in bench.outputs.items() if name.startswith("d")}
    for _ in range(24):
        bench.step()
    gained = [len(bench.outputs[name]) - count for name, count in counts.items()]
    assert min(gained) >= 6
    assert max(gained) - min(gained) <= 2
    bench.drain()


def test_chunks_keep_the_latency_target_once_learned() -> None:
    scheduler = SchedulerConfig(step_tokens=512, target_itl_ms=40, expected_output_tokens=1)
    bench = Bench(pages=200, context=8192, scheduler=scheduler)
    bench.executor.costs = Costs(step=5 * MS, token=200_000, pair=10)
    rng = random.Random(6)
    bench.add(make_request("decoding", random_tokens(rng, 50), 400, stop=False))
    for _ in range(5):
        bench.step()
    bench.add(make_request("prompt", random_tokens(rng, 6000), 1, stop=False))
    times = []
    while "prompt" not in bench.finals:
        before = bench.clock.now_ns()
        bench.step()
        times.append(bench.clock.now_ns() - before)
    settled = times[8:-2]
    assert len(settled) > 20
    assert max(settled) <= 40 * MS * 1.1
    assert sum(settled) / len(settled) > 30 * MS, "the target leaves room that prompts do not use"
    bench.drain()


def test_prompts_progress_although_decodes_alone_miss_the_target() -> None:
    bench = Bench(pages=60, scheduler=SchedulerConfig(target_itl_ms=1))
    rng = random.Random(7)
    bench.add(make_request("decoding", random_tokens(rng, 50), 300, stop=False))
    for _ in range(5):
        bench.step()
    bench.add(make_request("prompt", random_tokens(rng, 2000), 1, stop=False))
    begin = bench.steps
    assert first_token_steps(bench, {"prompt"})["prompt"] - begin <= 2000 / MIN_CHUNK_TOKENS + 4
    bench.drain()


# --- admission and preemption -----------------------------------------------------------------------------------------


def test_admission_reserves_expected_output_not_the_maximum() -> None:
    """Eight requests that may write 4,000 tokens and write few run together; reserving the maximum would run one."""
    bench = Bench(pages=40, scheduler=SchedulerConfig(expected_output_tokens=100, target_itl_ms=0))
    rng = random.Random(8)
    for index in range(8):
        bench.add(make_request(f"r{index}", random_tokens(rng, 130), 3800, stop=True))
    bench.step()
    bench.step()
    assert bench.engine.stats().running >= 7
    bench.drain()
    assert bench.engine.stats().preemptions == 0


def test_admission_leaves_room_for_what_running_requests_are_expected_to_write() -> None:
    bench = Bench(pages=11, scheduler=SchedulerConfig(expected_output_tokens=250, target_itl_ms=0))
    rng = random.Random(9)
    for index in range(5):
        bench.add(make_request(f"r{index}", random_tokens(rng, 120), 250, stop=False))
    bench.step()
    assert bench.engine.stats().running == 3  # 10 pages, 3 each
    bench.drain()
    assert bench.engine.stats().preemptions == 0


def test_expected_output_is_learned() -> None:
    bench = Bench(scheduler=SchedulerConfig(expected_output_tokens=2000))
    rng = random.Random(10)
    for index in range(40):
        bench.run_one(make_request(f"r{index}", random_tokens(rng, 10), 20, stop=False))
    assert 20 <= bench.engine._scheduler.requests.expected.tokens < 60


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_shortage_does_not_thrash(run_ahead: bool, caching: bool) -> None:
    """Every request writes ten times what admission expects, in a pool for a third of them."""
    scheduler = SchedulerConfig(expected_output_tokens=20, run_ahead=run_ahead, target_itl_ms=0)
    bench = Bench(pages=17, rows=12, scheduler=scheduler, cache=CacheConfig(prefix_caching=caching))
    rng = random.Random(11)
    for index in range(24):
        bench.add(make_request(f"r{index}", random_tokens(rng, 100), 400, stop=False))
    bench.drain()
    preemptions = [final.preemptions for final in bench.finals.values()]
    assert sum(preemptions) > 0, "the scenario has no shortage"
    assert max(preemptions) <= 3
    computed = sum(plan.tokens for plan in bench.executor.plans)
    needed = 24 * (100 + 399)
    assert computed <= 1.35 * needed, "too much is computed again"


def test_the_oldest_request_is_never_preempted() -> None:
    bench = Bench(pages=12, rows=8, scheduler=SchedulerConfig(expected_output_tokens=1, target_itl_ms=0))
    rng = random.Random(12)
    for index in range(8):
        bench.add(make_request(f"r{index}", random_tokens(rng, 120), 900, stop=False))
    bench.drain()
    assert bench.finals["r0"].preemptions == 0
    assert bench.engine.stats().preemptions > 0


def test_preemption_takes_who_is_cheapest_to_bring_back() -> None:
    """One request's prefix is held by another as well, so that preempting it costs little."""
    bench = Bench(pages=21, rows=8, scheduler=SchedulerConfig(expected_output_tokens=1, target_itl_ms=0))
    rng = random.Random(13)
    shared = random_tokens(rng, 6 * PAGE_TOKENS)
    bench.add(make_request("oldest", [*shared, 1], 600, stop=False))
    for _ in range(4):
        bench.step()
    bench.add(make_request("cheap", [*shared, 2], 600, stop=False))
    bench.add(make_request("dear", random_tokens(rng, 6 * PAGE_TOKENS + 60), 600, stop=False))
    while bench.engine.stats().preemptions == 0:
        bench.step()
    preempted = [line.split()[2] for line in bench.log if line.split()[1] == "preempt"]
    assert preempted == ["cheap"]
    bench.drain()


# --- prefix cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "hit_pages"), [(1, 0), (127, 0), (128, 0), (129, 1), (256, 1), (257, 2), (1000, 7)])
def test_a_repeated_prompt_hits_all_pages_but_its_last_token(tokens: int, hit_pages: int) -> None:
    bench = Bench()
    prompt = random_tokens(random.Random(tokens), tokens)
    assert bench.run_one(make_request("cold", prompt, 3, stop=False)).cached_tokens == 0
    assert bench.run_one(make_request("warm", prompt, 3, stop=False)).cached_tokens == hit_pages * PAGE_TOKENS
    warm = [plan for plan in bench.executor.plans if plan.new_rows and plan.new_rows[0].request_id == "warm"]
    assert warm[0].work[0].start == hit_pages * PAGE_TOKENS


@pytest.mark.parametrize("key", [b"", b"salt"])
def test_the_next_turn_hits_generated_pages_if_there_is_a_key(key: bytes) -> None:
    bench = Bench()
    first = random_tokens(random.Random(1), 200)
    request = make_request("first", first, 300, stop=False, key=key)
    bench.run_one(request)
    history = first + bench.outputs["first"]
    second = bench.run_one(make_request("second", [*history, 1, 2, 3], 2, stop=False, key=key))
    # 499 of the 500 tokens were computed: three whole pages. Without a key only the prompt's one page has a name.
    assert second.cached_tokens == (3 if key else 1) * PAGE_TOKENS


def test_different_keys_share_nothing() -> None:
    bench = Bench()
    prompt = random_tokens(random.Random(1), 600)
    bench.run_one(make_request("a", prompt, 2, key=b"tenant a"))
    assert bench.run_one(make_request("b", prompt, 2, key=b"tenant b")).cached_tokens == 0


def test_one_of_many_equal_prompts_computes_and_the_others_wait() -> None:
    bench = Bench(pages=60, scheduler=SchedulerConfig(step_tokens=256, target_itl_ms=0))
    rng = random.Random(14)
    shared = random_tokens(rng, 10 * PAGE_TOKENS)
    for index in range(8):
        bench.add(make_request(f"r{index}", [*shared, index], 4, stop=False))
    bench.drain()
    prefill = sum(work.count for plan in bench.executor.plans for work in plan.work if work.count > 1)
    assert prefill <= len(shared) + 8
    assert sum(final.cached_tokens for final in bench.finals.values()) == 7 * len(shared)


def test_a_request_lends_its_urgency_to_the_one_it_waits_for() -> None:
    bench = Bench(pages=60, scheduler=SchedulerConfig(step_tokens=128))
    rng = random.Random(17)
    shared = random_tokens(rng, 10 * PAGE_TOKENS)
    bench.add(make_request("patient", shared, 1, stop=False, priority=8))
    bench.step()
    bench.add(make_request("middle", random_tokens(rng, 1500), 1, stop=False))
    bench.add(make_request("urgent", [*shared, 1], 1, stop=False, priority=-8))
    found = first_token_steps(bench, {"middle", "urgent"})
    assert found["urgent"] < found["middle"]
    assert bench.finals["urgent"].cached_tokens == len(shared)
    bench.drain()


def test_those_who_wait_go_on_when_the_computing_request_is_aborted() -> None:
    bench = Bench(pages=60, scheduler=SchedulerConfig(step_tokens=128))
    shared = random_tokens(random.Random(15), 10 * PAGE_TOKENS)
    bench.add(make_request("first", shared, 4))
    bench.step()
    bench.add(make_request("second", [*shared, 1], 4))
    bench.step()
    bench.engine.abort("first")
    bench.drain()
    assert bench.finals["second"].finish in (FinishReason.STOP, FinishReason.LENGTH)
    assert bench.finals["second"].cached_tokens > 0


# --- limits and refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("context", [200, 4096])
def test_output_is_clipped_to_the_context_or_the_pool(context: int) -> None:
    bench = Bench(pages=4, context=context)
    final = bench.run_one(make_request("r", random_tokens(random.Random(1), 150), 10_000, stop=False))
    assert final.finish is FinishReason.LENGTH
    assert len(bench.outputs["r"]) == min(context, 3 * PAGE_TOKENS) - 150


def test_prompts_that_never_fit_are_refused_with_the_numbers() -> None:
    bench = Bench(pages=4, context=300)
    with pytest.raises(RequestError, match="300 tokens leaves no room for output in the context of 300") as error:
        bench.engine.add(make_request("r", [1] * 300))
    assert (error.value.param, error.value.code, error.value.http_status) == ("prompt", "context_length_exceeded", 400)
    with pytest.raises(RequestError, match=r"400 tokens does not fit the cache of 384 tokens \(3 pages\)"):
        Bench(pages=4).engine.add(make_request("r", [1] * 400))


def test_malformed_requests_are_refused() -> None:
    bench = Bench()
    good = make_request("r", [1] * 200)
    for bad, words in (
        (dataclasses.replace(good, prompt=b""), "no tokens"),
        (dataclasses.replace(good, prompt=b"abc"), "3 bytes"),
        (dataclasses.replace(good, sampling=SamplingParams(0)), "max_tokens must be at least 1"),
        (dataclasses.replace(good, page_hashes=(b"a", b"b")), "2 page hashes for a prompt of 1 whole pages"),
    ):
        with pytest.raises(RequestError, match=words):
            bench.engine.add(bad)
    bench.add(good)
    with pytest.raises(RequestError, match="'r' is in use"):
        bench.engine.add(good)
    bench.drain()


def test_one_waiting_request_waits() -> None:
    bench = Bench(scheduler=SchedulerConfig(max_waiting=1, max_running=1))
    bench.add(make_request("r0", [0] * 300))
    bench.add(make_request("r1", [1] * 300))
    with pytest.raises(OverloadedError, match=r"^1 request waits already, the most that may"):
        bench.engine.add(make_request("r2", [2] * 300))
    bench.drain()


def test_stats_are_given_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many counters of one type: by position, a field added in the wrong place would make metrics lie."""
    given: list[set[str]] = []

    def recorded(**counters: int) -> EngineStats:
        given.append(set(counters))
        return EngineStats(**counters)

    monkeypatch.setattr("longturn.engine.watching.EngineStats", recorded)
    Bench().engine.stats()
    assert given[0] == set(EngineStats._fields)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_too_many_waiting_are_refused_with_429(steps: int) -> None:
    """A burst finds room for as many as can run and wait, whether a step has been planned meanwhile or not."""
    bench = Bench(scheduler=SchedulerConfig(max_waiting=2, max_running=3))
    for index in range(5):
        bench.add(make_request(f"r{index}", [index] * 40, max_tokens=50))
        if index < steps:
            bench.step()
    for _ in range(2):
        with pytest.raises(OverloadedError, match=r"^2 requests wait already") as error:
            bench.engine.add(make_request("one-more", [9] * 40))
        assert (error.value.http_status, error.value.code) == (429, "too_many_requests")
        bench.step()
    bench.engine.abort("r0")
    bench.add(make_request("r5", [5] * 40))
    with pytest.raises(OverloadedError, match=r"^2 requests wait already"):
        bench.engine.add(make_request("r6", [6] * 40))
    bench.drain()


def test_rows_that_pages_cannot_fill_are_no_room_to_wait_in() -> None:
    bench = Bench(pages=5, scheduler=SchedulerConfig(max_waiting=2, max_running=8))
    bench.add(make_request("large", [0] * 300, max_tokens=100))
    bench.step()
    bench.add(make_request("r0", [1] * 300, max_tokens=100))
    bench.step()
    assert (bench.engine.stats().running, bench.engine.stats().waiting) == (1, 1)
    bench.add(make_request("r1", [2] * 300))
    with pytest.raises(OverloadedError, match=r"^2 requests wait already"):
        bench.engine.add(make_request("r2", [3] * 300))
    bench.drain()


@pytest.mark.parametrize(
    ("name", "value"),
    [("max_running", 0), ("step_tokens", 0), ("decode_share", 1.0), ("decode_share", -0.1), ("ageing_ms", -1.0)],
)
def test_settings_out_of_range_are_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"scheduler.{name}"):
        Bench(scheduler=dataclasses.replace(SchedulerConfig(), **{name: value}))


def test_stop_tokens_do_not_count_before_min_tokens() -> None:
    """The content executor samples no stop token before `min_tokens`; one that did would be ordinary output."""
    bench = Bench()
    rng = random.Random(16)
    for index in range(30):
        bench.add(make_request(f"r{index}", random_tokens(rng, 9), 300, min_tokens=60))
    bench.drain()
    lengths = [len(bench.outputs[name]) for name in bench.finals]
    assert min(lengths) >= 60
    assert any(final.finish is FinishReason.STOP for final in bench.finals.values())


def test_request_records_are_not_kept() -> None:
    bench = Bench()
    request = make_request("r", [1] * 300)
    bench.run_one(request)
    bench.requests.clear()
    assert isinstance(request, EngineRequest)
    requests = bench.engine._scheduler.requests
    assert not requests.by_id and not requests.running and not requests.draining
    assert requests.waiting.first() is None
