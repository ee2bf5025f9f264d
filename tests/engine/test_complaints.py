"""What users of other engines complain of, played against the scheduler and the cache: one test a symptom.

Named by repository and number of the complaint.
"""

from __future__ import annotations

import random

import pytest

from longturn.config import PAGE_TOKENS, CacheConfig, SchedulerConfig
from tests.engine.content import Bench, make_request, random_tokens


@pytest.mark.parametrize("half_life_s", [0.0, 30.0])
def test_thinking_that_no_later_turn_has_does_not_push_the_conversation_out_vllm_39806(half_life_s: float) -> None:
    """Each turn thinks for ten pages, which the next turn's prompt leaves out; the pool holds a few such turns."""
    cache = CacheConfig(retention_half_life_s=half_life_s)
    bench = Bench(pages=50, scheduler=SchedulerConfig(step_tokens=2048), cache=cache)
    rng = random.Random(1)
    history = random_tokens(rng, 20 * PAGE_TOKENS)
    for turn in range(20):
        history += random_tokens(rng, 40)
        final = bench.run_one(make_request(f"r{turn}", history, 10 * PAGE_TOKENS, stop=False, session="s"))
        assert turn == 0 or final.cached_tokens >= (len(history) - 40) // PAGE_TOKENS * PAGE_TOKENS
        bench.clock.advance(10**9)
    assert bench.engine.stats().evictions > 50, "nothing had to go"


def test_another_sessions_dead_thinking_goes_before_a_waiting_conversation_vllm_39806() -> None:
    """One agent waits for a slow tool while another thinks: what the other's next turn has left out goes first."""
    bench = Bench(pages=60, scheduler=SchedulerConfig(step_tokens=2048))
    rng = random.Random(2)
    waiting, busy = random_tokens(rng, 15 * PAGE_TOKENS), random_tokens(rng, 5 * PAGE_TOKENS)
    bench.run_one(make_request("waiting", waiting, 4, stop=False, session="waiting"))
    for turn in range(12):
        bench.clock.advance(2 * 10**9)
        busy += random_tokens(rng, 20)
        bench.run_one(make_request(f"busy{turn}", busy, 8 * PAGE_TOKENS, stop=False, session="busy"))
    assert bench.engine.stats().evictions > 40, "nothing had to go"
    final = bench.run_one(make_request("back", [*waiting, 1], 4, stop=False, session="waiting"))
    assert final.cached_tokens == 15 * PAGE_TOKENS


def test_a_subagent_of_the_session_kills_no_branch() -> None:
    """It comes under the same name, with a prompt of its own."""
    bench = Bench(pages=60, scheduler=SchedulerConfig(step_tokens=2048))
    rng = random.Random(3)
    main = random_tokens(rng, 4 * PAGE_TOKENS)
    bench.run_one(make_request("main", main, 6 * PAGE_TOKENS, stop=False, session="s"))
    answer = bench.outputs["main"]
    bench.run_one(make_request("sub", random_tokens(rng, 9 * PAGE_TOKENS), 4, stop=False, session="s"))
    claimed = [page for page in bench.engine._scheduler.requests.pool.pages if page.claimed]
    assert len(claimed) >= 9 + 9, "both are expected back"
    final = bench.run_one(make_request("next", [*main, *answer, 1], 4, stop=False, session="s"))
    assert final.cached_tokens == (len(main) + len(answer) - 1) // PAGE_TOKENS * PAGE_TOKENS


@pytest.mark.parametrize("shared", [1, 127, 128, 129, 255, 256, 300, 640, 2000])
def test_every_whole_page_of_a_shared_beginning_is_a_hit_vllm_53749_40696_51250(shared: int) -> None:
    """No length of a shared beginning gives less than its whole pages, and none of them silently nothing."""
    bench = Bench(pages=80, scheduler=SchedulerConfig(step_tokens=512))
    rng = random.Random(shared)
    begin = random_tokens(rng, shared)
    bench.run_one(make_request("first", [*begin, 1, *random_tokens(rng, 400)], 4, stop=False))
    second = bench.run_one(make_request("second", [*begin, 2, *random_tokens(rng, 400)], 4, stop=False))
    assert second.cached_tokens == shared // PAGE_TOKENS * PAGE_TOKENS
    assert bench.engine.stats().cached_tokens == second.cached_tokens, "and it is told in the metrics"


@pytest.mark.parametrize("run_ahead", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_a_shortage_of_pages_never_stops_all_progress_vllm_ascend_16315_vllm_25538(
    run_ahead: bool, caching: bool
) -> None:
    """Pages of preempted requests come back only when launched steps were read; meanwhile nobody else is preempted for
    the same shortage, and somebody always writes."""
    scheduler = SchedulerConfig(
        expected_output_tokens=1, run_ahead=run_ahead, target_itl_ms=0, max_running=16, step_tokens=256
    )
    bench = Bench(pages=18, rows=16, scheduler=scheduler, cache=CacheConfig(prefix_caching=caching))
    rng = random.Random(4)
    for number in range(16):
        bench.add(make_request(f"r{number}", random_tokens(rng, 120), 500, stop=False))
    written: list[int] = []
    while bench.engine.has_work():
        written.append(sum(len(output.token_ids) for output in bench.step()))
        assert len(written) < 20_000
    bench.drain()
    preemptions = bench.engine.stats().preemptions
    assert preemptions > 5, "the scenario has no shortage"
    assert preemptions <= 3 * 16
    # A prompt of one request may take a few steps; beside it the others write.
    idle = max(len(run) for run in "".join("x" if count == 0 else " " for count in written).split() or [""])
    assert idle <= 4, f"{idle} steps in a row wrote nothing"
    # In any hundred steps at least as many tokens as if one request ran alone.
    assert all(sum(written[at : at + 100]) >= 90 for at in range(len(written) - 110))


def test_a_request_with_priority_keeps_its_pages_vllm_47802() -> None:
    """While it runs others give way, whatever they would cost; when it has ended others' pages go before its own."""
    bench = Bench(pages=26, rows=8, scheduler=SchedulerConfig(expected_output_tokens=1, target_itl_ms=0))
    rng = random.Random(5)
    bench.add(make_request("oldest", random_tokens(rng, 100), 500, stop=False, priority=5))
    bench.step()
    urgent = random_tokens(rng, 3 * PAGE_TOKENS + 40)
    bench.add(make_request("urgent", urgent, 500, stop=False, priority=-5))
    for number in range(6):
        bench.step()
        bench.add(make_request(f"other{number}", random_tokens(rng, 500), 400, stop=False, priority=5))
    bench.drain()
    assert bench.engine.stats().preemptions > 2, "the scenario has no shortage"
    assert bench.finals["urgent"].preemptions == 0


def test_what_a_request_with_priority_has_left_outlives_others_pages_vllm_47802() -> None:
    bench = Bench(pages=30, scheduler=SchedulerConfig(step_tokens=2048))
    rng = random.Random(6)
    prompt = random_tokens(rng, 10 * PAGE_TOKENS)
    bench.run_one(make_request("urgent", prompt, 4, stop=False, priority=-1))
    for number in range(6):
        bench.clock.advance(10**9)
        bench.run_one(make_request(f"other{number}", random_tokens(rng, 5 * PAGE_TOKENS), 4, stop=False))
    assert bench.engine.stats().evictions > 8, "nothing had to go"
    final = bench.run_one(make_request("again", [*prompt, 1], 4, stop=False, priority=-1))
    assert final.cached_tokens == len(prompt)
