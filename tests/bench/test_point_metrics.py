"""The metrics of a point, of jobs, of money and of the cache, each against values worked out by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longturn.bench.cost import cost_per_million_tokens, tokens_per_joule
from longturn.bench.job_metrics import Job, job_metrics, jobs_from_turns
from longturn.bench.metrics import distribution
from longturn.bench.point_metrics import measure, turn_tails
from longturn.bench.records import Chunk, TurnRecord
from tests.bench.test_metrics import S, answer


def turn(session: str = "s", index: int = 0, **times: object) -> TurnRecord:
    return TurnRecord(session=session, index=index, label="", lane=0, answer=answer(**times))  # type: ignore[arg-type]


def test_a_point_by_hand() -> None:
    point = measure(
        [
            turn(sent=1.0, first=2.0, end=4.0, output=5, prompt=100, cached=0),
            turn(sent=5.0, first=5.5, end=6.0, output=3, prompt=300, cached=256, lag=0.125),
            turn(sent=0.0, end=99.0, prompt=1000, error="HTTP 500: no", lag=0.5),
        ],
        chips=2,
    )
    assert (point.requests, point.errors, point.error_kinds) == (3, 1, {"HTTP 500": 1})
    assert point.duration_s == 5.0  # 1.0 to 6.0: the failed request counts for neither end
    assert (point.prompt_tokens, point.cached_tokens, point.output_tokens) == (400, 256, 8)
    # per chip: over 5 s and 2 chips
    assert point.total_tokens_per_s_per_chip == pytest.approx(408 / 10)
    assert point.input_tokens_per_s_per_chip == pytest.approx(400 / 10)
    assert point.cached_tokens_per_s_per_chip == pytest.approx(256 / 10)
    assert point.output_tokens_per_s_per_chip == pytest.approx(8 / 10)
    assert point.hit_rate == pytest.approx(256 / 400)
    assert point.ttft_s is not None
    assert (point.ttft_s.mean, point.ttft_s.p50, point.ttft_s.min, point.ttft_s.max) == (0.75, 0.75, 0.5, 1.0)
    assert point.itl_s is not None
    assert (point.itl_s.mean, point.itl_s.std, point.itl_s.p90) == (0.375, 0.125, pytest.approx(0.475))
    assert point.e2e_s is not None
    assert (point.e2e_s.count, point.e2e_s.mean) == (2, 2.0)
    assert point.e2e_per_output_token_s is not None
    assert point.e2e_per_output_token_s.mean == pytest.approx((3 / 5 + 1 / 3) / 2)
    assert point.lag_s is not None
    assert (point.lag_s.count, point.lag_s.max) == (3, 0.5)
    assert point.interactivity is not None
    assert point.interactivity.mean == pytest.approx(1 / 0.375)
    assert point.interactivity.p90 == pytest.approx(1 / 0.475)
    assert point.itl_coverage == 1.0


def test_interactivity_percentiles_are_the_slow_tail() -> None:
    fast = [turn(first=0.0, end=100 / 217, output=101) for _ in range(8)]
    slow = [turn(first=0.0, end=100 / 13, output=101) for _ in range(2)]
    speeds = measure(fast + slow, chips=1).interactivity
    assert speeds is not None
    assert speeds.p90 == pytest.approx(13)
    assert speeds.p50 == pytest.approx(217)
    assert speeds.p99 == pytest.approx(13)
    # The mean is that of the latencies: 1 / mean(ITL), and not the mean speed, 176.
    assert speeds.mean == pytest.approx(1 / (0.8 / 217 + 0.2 / 13))
    # ITLs of 1, 2, ... 101 ms.
    spread = measure([turn(first=0.0, end=i / 1000, output=2) for i in range(1, 102)], chips=1).interactivity
    assert spread is not None
    speeds_by_hand = [1000 / at for at in (51, 51, 76, 91, 96, 100)]
    assert dataclasses.astuple(spread) == pytest.approx(tuple(speeds_by_hand))


def test_events_of_many_tokens_count_by_the_servers_numbers() -> None:
    """Five events of 8 tokens, 0.1 s apart: 32 tokens follow the first event in 0.4 s. Gaps would say 0.1 s a token."""
    chunks = tuple(Chunk(int((1 + 0.1 * k) * S), 8) for k in range(5))
    one = dataclasses.replace(answer(sent=0.5, end=1.4, output=40), chunks=chunks)
    itl = measure([TurnRecord("s", 0, "", 0, one)], chips=1).itl_s
    assert itl is not None
    assert itl.p50 == pytest.approx(0.4 / 32)


def test_a_whole_answer_in_one_event_has_no_itl_and_lowers_the_coverage() -> None:
    point = measure([turn(output=9, first_tokens=9), turn(output=9), turn(output=9), turn(output=9)], chips=1)
    assert point.itl_coverage == 0.75
    only = measure([turn(output=9, first_tokens=9)], chips=1)
    assert (only.itl_s, only.interactivity, only.itl_coverage) == (None, None, 0.0)


def test_cached_tokens_that_no_server_tells_are_unknown_not_none() -> None:
    point = measure([turn(cached=None)], chips=1)
    assert (point.cached_tokens, point.hit_rate, point.cached_tokens_per_s_per_chip) == (None, None, None)
    # One answer without the number: the rate is of those that have it.
    mixed = measure([turn(prompt=100, cached=None), turn(prompt=100, cached=50)], chips=1)
    assert (mixed.cached_tokens, mixed.hit_rate) == (50, 0.5)


def test_nothing_succeeded() -> None:
    point = measure([turn(error="timed out"), turn(error="HTTP 500: a"), turn(error="HTTP 500: b")], chips=1)
    assert (point.requests, point.errors, point.error_kinds) == (3, 3, {"HTTP 500": 2, "timed out": 1})
    assert (point.total_tokens_per_s_per_chip, point.ttft_s, point.itl_coverage) == (None, None, None)
    with pytest.raises(ValueError, match="chips"):
        measure([], chips=0)


def test_tails_by_turn_number() -> None:
    records = [turn(index=k, sent=0.0, first=1.0 + k, end=20.0) for k in range(6)]
    records.append(turn(index=5, error="HTTP 500"))
    tails = turn_tails(records)
    assert [(tail.first, tail.last) for tail in tails] == [(0, 0), (1, 1), (2, 3), (4, 7)]
    times = [tail.ttft_s for tail in tails]
    assert [(t.count, t.mean) for t in times if t] == [(1, 1.0), (1, 2.0), (2, 3.5), (2, 5.5)]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_distribution_equals_numpy(values: list[float]) -> None:
    found = distribution([*values, None])
    assert found is not None
    assert found.count == len(values)
    scale = {"rel": 1e-9, "abs": 1e-6}
    assert found.mean == pytest.approx(float(np.mean(values)), **scale)
    assert found.std == pytest.approx(float(np.std(values)), rel=1e-6, abs=1e-3)
    for name in ("p50", "p75", "p90", "p95", "p99"):
        assert getattr(found, name) == pytest.approx(float(np.percentile(values, int(name[1:]))), **scale)
    assert (found.min, found.max) == (min(values), max(values))
    assert distribution([None]) is None


# --- jobs ------------------------------------------------------------------------------------------------------------


def test_jobs_by_hand() -> None:
    records = [
        turn("a", 0, sent=0.0, end=10.0),
        turn("a", 1, sent=12.0, end=30.0),
        turn("b", 0, sent=5.0, end=20.0),
        turn("b", 1, sent=21.0, end=65.0),
        turn("c", 0, sent=30.0, end=40.0),
        turn("c", 1, sent=41.0, end=50.0, error="HTTP 500"),
        turn("d", 0, sent=50.0, end=60.0),
    ]
    jobs = jobs_from_turns(records, {"a": 2, "b": 2, "c": 2, "d": 2})
    assert [(job.name, job.time_s, job.complete) for job in jobs] == [
        ("a", 30.0, True),
        ("b", 60.0, True),
        ("c", 20.0, False),
        ("d", 10.0, False),
    ]
    found = job_metrics(jobs, chips=2)
    assert (found.started, found.completed) == (4, 2)
    assert found.per_hour == pytest.approx(2 * 3600 / 65)
    assert found.per_hour_per_chip == pytest.approx(3600 / 65)
    assert found.time_s is not None
    assert (found.time_s.p50, found.time_s.p90) == (45.0, pytest.approx(57.0))


def test_only_jobs_that_end_in_the_steady_window_are_credited() -> None:
    jobs = [Job(str(k), k * 10 * S, (k * 10 + 15) * S, True) for k in range(10)]  # ends at 15, 25, ... 105
    found = job_metrics(jobs, chips=1, window_ns=(20 * S, 60 * S))
    assert found.completed == 4  # 25, 35, 45, 55
    assert found.per_hour == pytest.approx(360)
    with pytest.raises(ValueError, match="before it starts"):
        job_metrics(jobs, chips=1, window_ns=(2, 1))
    with pytest.raises(ValueError, match="chips"):
        job_metrics(jobs, chips=0)
    assert job_metrics([], chips=1).per_hour is None


def test_a_session_that_nobody_planned_is_not_complete() -> None:
    assert not jobs_from_turns([turn("x")], {})[0].complete


# --- money and energy ------------------------------------------------------------------------------------------------


def test_costs_by_hand() -> None:
    # 1000 tok/s are 3.6 million tokens an hour.
    assert cost_per_million_tokens(1000.0, 3.6) == pytest.approx(1.0)
    assert cost_per_million_tokens(50_000.0, 2.9) == pytest.approx(2.9 / 180)
    assert tokens_per_joule(1730.0, 1730.0) == 1.0
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="throughput"):
            cost_per_million_tokens(bad, 1.0)
        with pytest.raises(ValueError, match="power"):
            tokens_per_joule(1.0, bad)
    with pytest.raises(ValueError, match="price"):
        cost_per_million_tokens(1.0, -0.1)
