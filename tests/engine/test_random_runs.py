"""Thousands of random steps on an executor that knows what every page must hold."""

from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longturn.config import PAGE_TOKENS, CacheConfig, SchedulerConfig
from longturn.engine.records import FinishReason
from tests.engine.content import Bench, digest, make_request, random_tokens


def random_run(
    seed: int,
    *,
    run_ahead: bool,
    caching: bool = True,
    steps: int = 400,
    pages: int | None = None,
    crowded: bool = False,
) -> Bench:
    """Arrivals, follow-up turns, shared prefixes, aborts at any moment, and a pool too small for all of it."""
    rng, scored = random.Random(seed), random.Random(seed + 1)
    scheduler = SchedulerConfig(
        max_running=rng.choice([1, 3, 8, 16]),
        step_tokens=rng.choice([16, 100, 256, 512]),
        decode_share=rng.choice([0.0, 0.25, 0.6]),
        target_itl_ms=rng.choice([0.0, 20.0, 150.0]),
        ageing_ms=rng.choice([0.0, 50.0, 500.0]),
        expected_output_tokens=rng.choice([1, 32, 400]),
        max_waiting=10_000,
        run_ahead=run_ahead,
        recompute_share=random.Random(seed + 2).choice([0.0, 0.25, 1.0]),
    )
    if crowded:  # admit far more than fits
        scheduler = dataclasses.replace(scheduler, max_running=16, expected_output_tokens=1, target_itl_ms=0.0)
    cache = CacheConfig(prefix_caching=caching, retention_half_life_s=rng.choice([0.0, 0.5, 30.0]))
    pages = pages or rng.choice([8, 14, 24, 60])
    bench = Bench(pages=pages, rows=16 if crowded else rng.choice([2, 8, 16]), scheduler=scheduler, cache=cache)
    if rng.random() < 0.3:
        bench.executor.fail_steps = set(range(rng.randrange(5, 40), 10_000, rng.randrange(20, 90)))
    shared = [random_tokens(rng, rng.choice([100, 128, 300, 512])) for _ in range(3)]
    histories: list[tuple[str, list[int]]] = []
    arrival = 0.3 if crowded else rng.choice([0.02, 0.1, 0.3])
    number = 0
    for _ in range(steps):
        while rng.random() < arrival and number < 100:
            number += 1
            if histories and rng.random() < 0.5:
                session, history = rng.choice(histories)
                prompt = history + random_tokens(rng, rng.randrange(1, 60))
            else:
                session = f"s{number}"
                prompt = rng.choice([*shared, []]) + random_tokens(rng, rng.choice([1, 20, 128, 129, 255, 256, 600]))
            if rng.random() < 0.15:  # prompts of whole pages, repeated often
                prompt = shared[0][:128] if rng.random() < 0.5 else (shared[1] * 4)[:512]
            if len(prompt) + 1 > bench.limit:
                continue
            name = f"r{number}"
            key = {} if rng.random() < 0.9 else {"key": b"other"}
            bench.add(
                make_request(
                    name,
                    prompt,
                    rng.choice([1, 1, 1, 400] if crowded else [1, 2, 40, 150, 400]),
                    stop=rng.random() < 0.5 and not crowded,
                    min_tokens=rng.choice([0, 0, 3, 200]),
                    session=session if rng.random() < 0.7 else None,
                    priority=rng.choice([0, 0, 0, -2, 3]),
                    prompt_logprobs=0 if scored.random() < 0.1 else None,
                    **key,
                )
            )
        outputs = bench.step()
        for output in outputs:
            if output.finish in (FinishReason.STOP, FinishReason.LENGTH):
                request = bench.requests[output.request_id]
                history = list(memoryview(request.prompt).cast("i")) + bench.outputs[output.request_id]
                histories = [*histories[-4:], (request.session_id or "none", history)]
        if rng.random() < 0.03:
            live = [name for name in bench.requests if name not in bench.finals]
            if live:
                bench.engine.abort(rng.choice(live))
        bench.clock.advance(rng.choice([0, 0, 1000, 3_000_000]))
    bench.drain()
    return bench


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("run_ahead", [False, True])
def test_random_runs_hold_the_oracle(seed: int, run_ahead: bool) -> None:
    random_run(seed, run_ahead=run_ahead)


@pytest.mark.parametrize("seed", range(100, 104))
def test_random_runs_without_cache(seed: int) -> None:
    bench = random_run(seed, run_ahead=True, caching=False)
    assert bench.engine.stats().cached_tokens == 0
    assert bench.engine.stats().pages_cached == 0


def test_the_random_runs_reach_what_they_are_for() -> None:
    """A randomised test that never evicts or preempts proves nothing about evictions and preemptions."""
    benches = [random_run(seed, run_ahead=True, pages=14, crowded=True) for seed in range(200, 204)]
    totals = [bench.engine.stats() for bench in benches]
    assert sum(" hold " in line for bench in benches for line in bench.log) > 2
    assert sum(s.preemptions for s in totals) > 10
    assert sum(s.evictions for s in totals) > 200
    assert sum(s.aborts for s in totals) > 20
    assert sum(s.cached_tokens for s in totals) > 50 * PAGE_TOKENS


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 1 << 32), st.booleans(), st.booleans(), st.sampled_from([3, 5, 9, 30]))
def test_hypothesis_runs(seed: int, run_ahead: bool, caching: bool, pages: int) -> None:
    random_run(seed, run_ahead=run_ahead, caching=caching, steps=80, pages=pages)


def test_same_seed_same_event_log() -> None:
    first, second, other = (random_run(seed, run_ahead=True, crowded=True, pages=14) for seed in (202, 202, 203))
    assert len(first.log) > 500
    assert first.log == second.log
    assert digest(first.log) == digest(second.log)
    assert other.log != first.log
