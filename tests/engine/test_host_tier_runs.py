"""The engine with a host tier, on an executor that knows what every page must hold and whose copies take time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longturn.config import PAGE_TOKENS, CacheConfig, SchedulerConfig
from longturn.engine.kv_events import CacheEvent, PagesRemoved, PagesStored
from longturn.engine.launched import ResultMismatch
from longturn.engine.records import FinishReason
from longturn.errors import ConfigError
from tests.engine import test_random_runs
from tests.engine.content import Bench, make_request, random_tokens
from tests.engine.tiered import TieredBench, TieredHandle

Make = Callable[..., TieredBench]


@pytest.fixture
def tiered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes `random_run` use benches with a host tier."""

    def use(**settings: object) -> None:
        monkeypatch.setattr(test_random_runs, "Bench", lambda **own: TieredBench(**own, **settings))

    return use


def pushed_out(bench: TieredBench, pages: int, seed: int = 99) -> None:
    """Run a one-off prompt that takes this many pages."""
    prompt = random_tokens(random.Random(seed), pages * PAGE_TOKENS - 2)
    bench.run_one(make_request(f"filler{len(bench.requests)}", prompt, 1, stop=False))


def left_the_device(
    seed: int, tokens: int, *, output: int = 1, pages: int = 12, **settings: Any
) -> tuple[TieredBench, list[int]]:
    """A bench, and a prompt that was answered as "cold" and whose pages have all been pushed out since."""
    bench = TieredBench(pages=pages, **settings)
    prompt = random_tokens(random.Random(seed), tokens)
    bench.run_one(make_request("cold", prompt, output))
    pushed_out(bench, pages - 1)
    return bench, prompt


def test_a_prompt_that_left_the_device_comes_back_without_being_computed() -> None:
    bench, prompt = left_the_device(1, 6 * PAGE_TOKENS + 5, output=4)
    stats = bench.engine.stats()
    assert stats.offloaded_pages >= 6 and stats.host_pages_cached >= 6 and stats.loaded_pages == 0
    computed = len(bench.executor.plans)
    final = bench.run_one(make_request("warm", prompt, 4))
    assert final.cached_tokens == 6 * PAGE_TOKENS
    assert bench.outputs["warm"] == bench.outputs["cold"]
    plans = bench.executor.plans[computed:]
    assert sum(work.count for plan in plans for work in plan.work if work.start < len(prompt)) == 5
    assert plans[0].work == () and len(plans[0].load_pages) == 6
    stats = bench.engine.stats()
    assert (stats.loaded_pages, stats.host_hit_tokens, stats.host_pages_total) == (6, 6 * PAGE_TOKENS, 40)


def test_others_decode_while_a_session_comes_back() -> None:
    """The returning request's copies take as long as many steps; nobody waits for them but itself."""
    bench, prompt = left_the_device(2, 8 * PAGE_TOKENS + 1, output=2, pages=24, load_ns=20_000_000)
    bench.add(make_request("other", [1, 2, 3], 100, stop=False))
    for _ in range(3):
        bench.step()
    bench.add(make_request("back", prompt, 2, stop=False))
    made = len(bench.outputs["other"])
    while not bench.outputs["back"]:
        before = bench.clock.now_ns()
        bench.step()
        assert bench.clock.now_ns() - before < 20_000_000, "a step waited for a copy"
    assert len(bench.outputs["other"]) - made > 8
    bench.drain()
    assert bench.finals["back"].cached_tokens == 8 * PAGE_TOKENS


def test_a_page_that_is_evicted_again_is_not_copied_again() -> None:
    bench, prompt = left_the_device(3, 6 * PAGE_TOKENS + 5)
    bench.run_one(make_request("warm", prompt, 1))
    before = bench.engine.stats()
    pushed_out(bench, 11)  # the same filler: its pages that are still there, or in the host tier, are hits too
    pushed_out(bench, 11, seed=98)
    saved = [page for plan in bench.executor.plans for page in plan.save_pages]
    assert len(saved) == bench.engine.stats().offloaded_pages
    contents = [tuple(content) for content in bench.executor.host if content is not None]
    assert len(set(contents)) == len(contents)
    after = bench.engine.stats()
    assert after.evictions - before.evictions > after.offloaded_pages - before.offloaded_pages


@pytest.mark.parametrize("copies_pages", [False, True])
def test_a_whole_hit_on_the_host_computes_one_token(copies_pages: bool) -> None:
    bench, prompt = left_the_device(4, 5 * PAGE_TOKENS, output=3, copies_pages=copies_pages)
    final = bench.run_one(make_request("warm", prompt, 3))
    assert final.cached_tokens == 5 * PAGE_TOKENS - 1
    assert bench.engine.stats().loaded_pages == 5


def test_two_requests_for_the_same_pages_wait_for_one_copy() -> None:
    bench, prompt = left_the_device(5, 6 * PAGE_TOKENS + 9, pages=16)
    for name in ("a", "b"):
        bench.add(make_request(name, prompt, 5, stop=False))
    bench.drain()
    assert bench.engine.stats().loaded_pages == 6
    assert bench.finals["a"].cached_tokens == bench.finals["b"].cached_tokens == 6 * PAGE_TOKENS


def test_a_whole_hit_on_a_page_that_is_just_being_loaded() -> None:
    """The second prompt ends with a page that the first one waits for: there is nothing on the device to copy yet."""
    bench, prompt = left_the_device(5, 6 * PAGE_TOKENS, pages=16)
    bench.add(make_request("longer", [*prompt, 1, 2, 3], 5, stop=False))
    bench.add(make_request("whole", prompt, 5, stop=False))
    bench.drain()
    assert bench.finals["whole"].cached_tokens == 6 * PAGE_TOKENS - 1
    assert bench.engine.stats().loaded_pages == 7
    assert not any(plan.copied_pages for plan in bench.executor.plans)


def test_waiting_for_copies_is_not_taken_for_a_slow_step() -> None:
    bench = TieredBench(pages=12, load_ns=10**9)
    prompt = random_tokens(random.Random(1), 6 * PAGE_TOKENS + 5)
    bench.run_one(make_request("cold", prompt, 40, stop=False))
    pushed_out(bench, 11)
    before = bench.engine._scheduler.step_time.decode_ns
    bench.run_one(make_request("warm", prompt, 1, stop=False))
    assert bench.engine.stats().loaded_pages == 6
    assert bench.engine._scheduler.step_time.decode_ns == before > 0


def test_an_abort_while_pages_are_on_their_way_vllm_46283() -> None:
    bench, prompt = left_the_device(6, 6 * PAGE_TOKENS + 9)
    bench.add(make_request("gone", prompt, 5))
    bench.step()
    assert bench.executor.pending and bench.engine.abort("gone")
    bench.drain()
    assert bench.finals["gone"].finish is FinishReason.ABORT and bench.finals["gone"].cached_tokens == 0
    assert not bench.executor.rows, "the executor was told of a row that never computed anything"
    assert bench.run_one(make_request("again", prompt, 5)).cached_tokens == 6 * PAGE_TOKENS
    assert bench.engine.stats().loaded_pages == 6


def test_a_copy_that_fails_costs_the_page_and_never_the_request() -> None:
    bench, prompt = left_the_device(7, 6 * PAGE_TOKENS + 9)
    bench.executor.fail_copies = 1.0
    final = bench.run_one(make_request("warm", prompt, 5))
    assert final.finish in (FinishReason.STOP, FinishReason.LENGTH) and final.error is None
    assert final.cached_tokens == 0 and final.preemptions == 0
    assert bench.engine.stats().host_hit_tokens == 0


def test_a_reset_forgets_both_tiers() -> None:
    bench, prompt = left_the_device(8, 6 * PAGE_TOKENS + 9)
    bench.add(make_request("on its way", prompt, 5))
    bench.step()
    bench.engine.reset_cache()
    bench.engine.check_invariants()
    bench.drain()
    bench.engine.reset_cache()
    assert bench.engine.stats().host_pages_cached == 0
    assert bench.run_one(make_request("warm", prompt, 5)).cached_tokens == 0


def test_steps_rarely_take_pages_that_are_just_being_saved() -> None:
    """Long decodes over a full pool: pages are made blank a step before they are needed."""
    bench = TieredBench(
        pages=64, context=16384, host_pages=200, scheduler=SchedulerConfig(step_tokens=128, expected_output_tokens=1)
    )
    pushed_out(bench, 63)
    for number in range(3):
        bench.add(make_request(f"r{number}", [number + 1] * 10, 1500, stop=False))
    bench.drain()
    assert bench.engine.stats().offloaded_pages > 20
    assert bench.executor.dirty_reuses <= 2


@pytest.mark.parametrize("field", ["loaded_pages", "lost_pages"])
def test_an_answer_about_a_copy_that_was_not_ordered_fails_its_step(
    monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    bench = TieredBench()
    right = TieredHandle.result
    monkeypatch.setattr(TieredHandle, "result", lambda handle: right(handle)._replace(**{field: (3,)}))
    final = bench.run_one(make_request("r", [1, 2, 3], 1))
    assert final.finish is FinishReason.ERROR and "copies that were not ordered" in str(final.error)


def test_a_wait_that_ends_without_a_copy_is_a_fault() -> None:
    bench, prompt = left_the_device(1, 6 * PAGE_TOKENS + 5, output=4)
    bench.add(make_request("warm", prompt, 4))
    bench.step()
    bench.executor.pending.clear()
    with pytest.raises(ResultMismatch, match="waited for copies"):
        bench.drain()


def test_listeners_know_what_can_be_hit_in_either_tier(tiered: Make) -> None:
    known: set[bytes] = set()

    class Router:
        def tell(self, events: tuple[CacheEvent, ...]) -> None:
            for event in events:
                if isinstance(event, PagesStored):
                    known.update(event.hashes)
                elif isinstance(event, PagesRemoved):
                    assert known.issuperset(event.hashes)
                    known.difference_update(event.hashes)
                else:
                    known.clear()

        def close(self) -> None:
            """Nothing is held."""

    tiered(host_pages=20, fail_copies=0.05, listener=Router())
    bench = test_random_runs.random_run(3, run_ahead=True, pages=14)
    pool = bench.engine._scheduler.requests.pool
    assert pool.host is not None
    assert known == {page.hash for page in (*pool.pages, *pool.host.slots) if page.hash is not None}
    assert len(known) > 25


def test_no_host_tier_without_a_prefix_cache() -> None:
    with pytest.raises(ConfigError, match=r"cache\.prefix_caching"):
        TieredBench(cache=CacheConfig(prefix_caching=False, host_memory_bytes=1 << 30))
    bench = TieredBench(cache=CacheConfig(prefix_caching=False))
    bench.run_one(make_request("r", [1] * 300, 4))
    assert bench.engine.stats().host_pages_total == 0


@pytest.mark.parametrize(("seed", "run_ahead"), [*((seed, True) for seed in range(12)), (0, False), (5, False)])
def test_random_runs_hold_the_oracle(tiered: Make, seed: int, run_ahead: bool) -> None:
    tiered(host_pages=[4, 30, 300][seed % 3], copies_pages=seed % 2 == 0, load_ns=[0, 3_000_000, 40_000_000][seed // 4])
    test_random_runs.random_run(seed, run_ahead=run_ahead, pages=[8, 14, 24][seed % 3])


@pytest.mark.parametrize("tokens", range(1, 5))
def test_a_plan_that_only_saves_waits_for_no_later_loads(caplog: pytest.LogCaptureFixture, tokens: int) -> None:
    """`b` is admitted while others have nothing to compute, for pages that are on their way for `a`. Before its plan's
    result is read, which was made before, `c` orders loads."""
    bench = TieredBench(pages=24, host_pages=60, eager=True, load_ns=0)
    rng = random.Random(1)
    first, second = (random_tokens(rng, 4 * PAGE_TOKENS + 5) for _ in range(2))
    bench.run_one(make_request("first", first, 1, stop=False))
    bench.run_one(make_request("second", second, 1, stop=False))
    pushed_out(bench, 23)
    done = len(bench.executor.plans)
    for name, prompt, count in (
        ("other", [1, 2, 3], tokens),
        ("a", first, 3),
        ("b", [*first, *random_tokens(rng, 2 * PAGE_TOKENS)], 3),
        ("c", second, 3),
    ):
        bench.add(make_request(name, prompt, count, stop=False))
        bench.step()
    bench.drain()
    plans = bench.executor.plans[done:]
    only_save = [bool(plan.save_pages and not plan.work and not plan.load_pages) for plan in plans]
    assert any(only_save) == (tokens in (2, 3))
    assert "answered" not in caplog.text


@pytest.mark.parametrize(("seed", "fail"), [*((seed, 0.0) for seed in range(40, 52)), (52, 0.1), (53, 0.3)])
def test_random_runs_whose_results_know_nothing_of_later_plans(
    tiered: Make, caplog: pytest.LogCaptureFixture, seed: int, fail: float
) -> None:
    """The CPU's worker has often ended a step before the next one is planned."""
    tiered(host_pages=40, eager=True, load_ns=[0, 3_000_000][seed % 2], fail_copies=fail)
    test_random_runs.random_run(seed, run_ahead=True, pages=[8, 14][seed % 3 > 0], crowded=True)
    assert "answered" not in caplog.text  # a mismatch ends the requests of its step, of which there may be none


@pytest.mark.parametrize("seed", range(20, 28))
def test_random_runs_with_copies_that_fail(tiered: Make, seed: int) -> None:
    tiered(host_pages=60, fail_copies=[0.05, 0.4][seed % 2])
    bench = test_random_runs.random_run(seed, run_ahead=True, pages=14)
    assert all(final.finish is not FinishReason.ERROR or final.error for final in bench.finals.values())


def test_the_random_runs_reach_what_they_are_for(tiered: Make) -> None:
    tiered(host_pages=40)
    benches = [
        test_random_runs.random_run(seed, run_ahead=True, pages=14, crowded=True) for seed in (200, 201, 202, 203)
    ]
    stats = [bench.engine.stats() for bench in benches]
    assert sum(s.loaded_pages for s in stats) > 50
    assert sum(s.host_hit_tokens for s in stats) > 50 * PAGE_TOKENS
    assert sum(s.preemptions for s in stats) > 10
    assert sum(s.offloaded_pages for s in stats) > 200
    assert any(plan.load_pages and plan.work for bench in benches for plan in bench.executor.plans)
    assert any(not plan.work and not plan.load_pages for bench in benches for plan in bench.executor.plans)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 1 << 32),
    st.booleans(),
    st.sampled_from([3, 5, 9, 30]),
    st.sampled_from([1, 2, 7, 50]),
    st.sampled_from([0, 1_000_000, 30_000_000]),
    st.sampled_from([0.0, 0.0, 0.2]),
)
def test_hypothesis_runs(seed: int, run_ahead: bool, pages: int, host_pages: int, load_ns: int, fail: float) -> None:
    original = test_random_runs.Bench
    test_random_runs.Bench = lambda **own: TieredBench(  # type: ignore[misc, assignment]
        **own, host_pages=host_pages, load_ns=load_ns, fail_copies=fail
    )
    try:
        test_random_runs.random_run(seed, run_ahead=run_ahead, steps=80, pages=pages)
    finally:
        test_random_runs.Bench = original  # type: ignore[misc]


def test_same_seed_same_event_log(tiered: Make) -> None:
    tiered(host_pages=40)
    first, second = (test_random_runs.random_run(202, run_ahead=True, crowded=True, pages=14) for _ in range(2))
    assert first.log == second.log
    assert any(" loads ((" in line for line in first.log)


def test_more_hits_with_a_host_tier_than_without() -> None:
    """The same sessions in turns, on a pool that holds one of them."""

    def hits(bench: Bench) -> int:
        rng = random.Random(9)
        histories = [random_tokens(rng, 4 * PAGE_TOKENS) for _ in range(5)]
        for turn in range(4):
            for number, history in enumerate(histories):
                history += random_tokens(rng, 40)
                bench.run_one(make_request(f"{number}-{turn}", history, 2, session=str(number)))
        return bench.engine.stats().cached_tokens

    assert hits(Bench(pages=10)) < PAGE_TOKENS * 4
    assert hits(TieredBench(pages=10)) == sum(
        (4 * PAGE_TOKENS + 40 * turn) // PAGE_TOKENS * PAGE_TOKENS for turn in (1, 2, 3) for _ in range(5)
    )
