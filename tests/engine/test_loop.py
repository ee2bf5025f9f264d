"""The overlap loop: what is launched when, ends and aborts in flight, failures, the idle check."""

from __future__ import annotations

import logging
import random

import pytest

from longturn.config import CacheConfig, SchedulerConfig
from longturn.engine.clock import SystemClock, VirtualClock
from longturn.engine.records import FinishReason
from tests.engine.content import STOP_TOKEN, Bench, make_request, oracle, random_tokens


def test_next_step_is_launched_before_the_result_is_read() -> None:
    for run_ahead, ahead in ((True, 1), (False, 0)):
        bench = Bench(scheduler=SchedulerConfig(run_ahead=run_ahead))
        bench.add(make_request("r", [1, 2, 3], 20, stop=False))
        bench.step()
        for read in range(1, 10):
            assert len(bench.executor.plans) == read + ahead
            bench.step()
        bench.drain()


def test_nothing_is_launched_past_max_tokens() -> None:
    bench = Bench()
    bench.add(make_request("r", [1, 2, 3], 7, stop=False))
    bench.drain()
    assert sum(work.samples for plan in bench.executor.plans for work in plan.work) == 7


def test_a_stop_token_costs_at_most_one_step_and_is_reported() -> None:
    rng = random.Random(1)
    for _ in range(100):
        request = make_request("r", random_tokens(rng, 6), 500)
        bench = Bench()
        final = bench.run_one(request)
        if final.finish is FinishReason.STOP:
            break
    assert final.stop_token_id == STOP_TOKEN
    assert STOP_TOKEN not in bench.outputs["r"]
    sampled = sum(work.samples for plan in bench.executor.plans for work in plan.work)
    assert sampled <= len(bench.outputs["r"]) + 2


def test_abort_while_waiting_running_and_in_flight() -> None:
    bench = Bench(scheduler=SchedulerConfig(max_running=1))
    bench.add(make_request("running", [1] * 300, 500, stop=False))
    bench.add(make_request("waiting", [2] * 300, 500, stop=False))
    bench.step()
    assert bench.engine.abort("waiting")
    assert [o.finish for o in bench.step() if o.request_id == "waiting"] == [FinishReason.ABORT]
    assert bench.engine.abort("running")
    assert not bench.engine.abort("running")
    assert not bench.engine.abort("unknown")
    assert [o.finish for o in bench.step()] == [FinishReason.ABORT]
    bench.step()
    stats = bench.engine.stats()
    assert (stats.pages_used, stats.aborts) == (0, 2)
    assert not bench.engine.has_work()


def test_abort_before_the_first_step() -> None:
    bench = Bench()
    bench.add(make_request("r", [1] * 300))
    bench.engine.abort("r")
    bench.drain()
    assert bench.finals["r"].finish is FinishReason.ABORT
    assert bench.executor.plans == []


def test_an_aborted_prompt_leaves_its_computed_pages_in_the_cache() -> None:
    bench = Bench(scheduler=SchedulerConfig(step_tokens=256))
    prompt = random_tokens(random.Random(2), 2000)
    bench.add(make_request("first", prompt))
    for _ in range(3):
        bench.step()
    bench.engine.abort("first")
    bench.drain()
    assert bench.run_one(make_request("again", prompt)).cached_tokens >= 768


def test_times_are_in_order_and_in_the_clock_of_the_engine() -> None:
    bench = Bench()
    bench.clock.advance(1000)
    final = bench.run_one(make_request("r", [1] * 300, 5, stop=False))
    assert final.times is not None
    assert final.times.arrived_ns == final.times.scheduled_ns == 1000
    assert 1000 < final.times.first_token_ns < final.times.finished_ns == bench.clock.now_ns()
    assert bench.engine.stats().busy_ns == bench.clock.now_ns() - 1000


def test_counters() -> None:
    bench = Bench()
    bench.run_one(make_request("a", [1] * 300, 5, stop=False))
    bench.run_one(make_request("b", [1] * 300, 6, stop=False))
    stats = bench.engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (600, 256, 11)
    assert stats.steps == len(bench.executor.plans)
    assert (stats.pages_total, stats.pages_cached) == (39, 2)


@pytest.mark.parametrize("failing", range(1, 8))
def test_nobody_shares_what_a_failed_step_should_have_computed(failing: int) -> None:
    """The second request arrives while the first computes the same prompt; every read is checked for content."""
    bench = Bench(scheduler=SchedulerConfig(step_tokens=256))
    prompt = random_tokens(random.Random(4), 1100)
    bench.executor.fail_steps = {failing}
    for index in range(6):
        bench.add(make_request(f"r{index}", prompt, 4, stop=False))
        bench.step()
    bench.drain()
    assert FinishReason.ERROR in [final.finish for final in bench.finals.values()]
    assert bench.run_one(make_request("after", prompt, 4, stop=False)).finish is FinishReason.LENGTH


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(run_ahead: bool) -> None:
    bench = Bench(scheduler=SchedulerConfig(run_ahead=run_ahead))
    for index in range(3):
        bench.add(make_request(f"r{index}", [index] * 300, 30, stop=False))
    bench.executor.fail_steps = {6}
    bench.drain()
    for final in bench.finals.values():
        assert final.finish is FinishReason.ERROR
        assert final.error == "the executor failed: OSError: device lost"
    again = bench.run_one(make_request("again", [1] * 300, 30, stop=False))
    assert again.finish is FinishReason.LENGTH
    assert again.cached_tokens == 0, "content of a request that failed is reused"


def test_a_step_launched_before_the_failure_was_seen_may_fail_too() -> None:
    bench = Bench()
    bench.add(make_request("r", [1] * 300, 30, stop=False))
    bench.executor.fail_steps = {6, 7}
    bench.drain()
    assert bench.run_one(make_request("again", [1] * 300, 5, stop=False)).finish is FinishReason.LENGTH


def test_failing_twice_in_a_row_is_raised() -> None:
    bench = Bench(scheduler=SchedulerConfig(run_ahead=False))
    bench.executor.fail_steps = {2, 3}
    bench.add(make_request("a", [1] * 30, 30, stop=False))
    bench.step()
    bench.step()
    assert bench.finals["a"].finish is FinishReason.ERROR
    bench.add(make_request("b", [1] * 30, 30, stop=False))
    with pytest.raises(OSError, match="device lost"):
        bench.step()


def test_a_failing_launch_ends_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    launch = bench.executor.launch
    calls = iter([True, False, False])

    def flaky(plan: object) -> object:
        if next(calls, False):
            raise MemoryError("no memory")
        return launch(plan)  # type: ignore[arg-type]

    monkeypatch.setattr(bench.executor, "launch", flaky)
    bench.add(make_request("a", [1] * 30))
    bench.step()
    assert bench.finals["a"].error == "the executor failed: MemoryError: no memory"
    bench.engine.check_invariants()


def test_a_failing_row_leaves_the_others_alone() -> None:
    bench = Bench()
    bench.executor.fail_rows = {"bad"}
    bench.add(make_request("good", [1] * 300, 20, stop=False))
    bench.add(make_request("bad", [2] * 300, 20, stop=False))
    bench.drain()
    assert (bench.finals["bad"].finish, bench.finals["bad"].error) == (FinishReason.ERROR, "logits are NaN")
    assert bench.finals["good"].finish is FinishReason.LENGTH


def test_a_leak_is_counted_and_logged_when_idle(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.add(make_request("r", [1] * 300, 3, stop=False))
    page = bench.engine._scheduler.requests.pool.allocate(0)
    assert page is not None
    with caplog.at_level(logging.ERROR, logger="longturn.engine.loop"):
        while bench.engine.has_work():
            bench.engine.step()
    assert bench.engine.stats().leak_faults == 1
    assert "idle check failed: Page(" in caplog.text
    with pytest.raises(RuntimeError, match="requests hold 0 references"):
        bench.engine.check_invariants()


def test_outputs_are_the_same_whatever_the_schedule() -> None:
    """Batched, alone, cached or not, with or without run-ahead: every output is the oracle's."""
    rng = random.Random(3)
    prompts = [random_tokens(rng, rng.randrange(1, 700)) for _ in range(12)]
    expected = [oracle(p, make_request("x", p, 60).sampling, 4096)[0] for p in prompts]
    for run_ahead in (False, True):
        for caching in (False, True):
            for step_tokens in (17, 512):
                scheduler = SchedulerConfig(run_ahead=run_ahead, step_tokens=step_tokens)
                bench = Bench(scheduler=scheduler, cache=CacheConfig(prefix_caching=caching))
                for index, prompt in enumerate(prompts):
                    bench.add(make_request(f"r{index}", prompt, 60))
                bench.drain()
                assert [bench.outputs[f"r{i}"] for i in range(12)] == expected


def test_close_closes_the_executor_once() -> None:
    bench = Bench()
    bench.engine.close()
    assert bench.executor.closed
    bench.engine.close()


def test_clocks() -> None:
    clock = VirtualClock(5)
    clock.advance(7)
    assert clock.now_ns() == 12
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-1)
    system = SystemClock()
    assert system.now_ns() <= system.now_ns()
