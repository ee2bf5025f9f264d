"""Every metric against values worked out by hand."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longturn.bench.metrics import (
    e2e_s,
    interactivity_tokens_per_s,
    itl_s,
    lag_s,
    output_tokens_per_s,
    percentile,
    summarise,
    ttft_s,
)
from longturn.bench.records import Answer, Chunk

S = 1_000_000_000


def answer(
    *,
    sent: float = 0.0,
    first: float = 1.0,
    end: float = 3.0,
    output: int | None = 5,
    first_tokens: int | None = 1,
    prompt: int = 100,
    cached: int | None = 0,
    error: str | None = None,
    lag: float = 0.0,
) -> Answer:
    """Times in seconds."""
    return Answer(
        intended_ns=int((sent - lag) * S),
        sent_ns=int(sent * S),
        end_ns=int(end * S),
        chunks=(Chunk(int(first * S), first_tokens),),
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        error=error,
    )


def test_latencies_of_one_answer() -> None:
    one = answer(sent=10.0, first=10.5, end=12.5, output=5, lag=0.25)
    assert ttft_s(one) == 0.5
    assert e2e_s(one) == 2.5
    assert lag_s(one) == 0.25
    assert itl_s(one) == 0.5  # 2 s for the 4 tokens after the first
    assert output_tokens_per_s(one) == 2.0


def test_a_first_event_that_bundles_tokens_does_not_count_them_as_later_ones() -> None:
    assert itl_s(answer(first=1.0, end=3.0, output=12, first_tokens=8)) == 0.5
    # The server did not say: one token, as the field's tools count.
    assert itl_s(answer(first=1.0, end=3.0, output=12, first_tokens=None)) == pytest.approx(2 / 11)


def test_full_response_latency_counts_hidden_output() -> None:
    # The parser showed text at 0.529 s only, and the response went on to 145.86 s with 26,571 tokens: 182.8 tok/s.
    hidden = answer(first=0.529, end=145.86, output=26_571, first_tokens=1)
    assert output_tokens_per_s(hidden) == pytest.approx(182.8, abs=0.05)


@pytest.mark.parametrize("output", [None, 0, 1])
def test_no_itl_without_a_second_token(output: int | None) -> None:
    assert itl_s(answer(output=output)) is None
    assert output_tokens_per_s(answer(output=output)) is None


def test_failed_answers_have_no_latency() -> None:
    assert ttft_s(answer(error="HTTP 500")) is None
    assert itl_s(answer(error="HTTP 500")) is None


def test_p90_interactivity_is_the_slow_tail() -> None:
    # Ten answers: nine at 217 tok/s, one at 13. The fast tail would say 217.
    fast = [answer(first=0.0, end=100 / 217, output=101) for _ in range(8)]
    slow = [answer(first=0.0, end=100 / 13, output=101) for _ in range(2)]
    assert interactivity_tokens_per_s(fast + slow, 90) == pytest.approx(13)
    assert interactivity_tokens_per_s(fast + slow, 50) == pytest.approx(217)
    assert interactivity_tokens_per_s([], 90) is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40), st.floats(0, 100))
def test_percentile_equals_numpy(values: list[float], p: float) -> None:
    assert percentile(values, p) == pytest.approx(float(np.percentile(values, p)), rel=1e-9, abs=1e-6)


def test_percentile_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 50)
    with pytest.raises(ValueError, match="between 0 and 100"):
        percentile([1.0], 101)


def test_summary_by_hand() -> None:
    answers = [
        answer(sent=1.0, first=2.0, end=4.0, output=5, prompt=100, cached=0),
        answer(sent=5.0, first=5.5, end=6.0, output=3, prompt=200, cached=128, lag=0.125),
        answer(sent=0.0, end=99.0, prompt=1000, error="HTTP 500: no"),
    ]
    total = summarise(answers)
    assert (total.requests, total.errors) == (3, 1)
    assert (total.prompt_tokens, total.cached_tokens, total.output_tokens) == (300, 128, 8)
    assert total.hit_rate == pytest.approx(128 / 300)
    assert total.duration_s == 5.0  # first start 1.0 to last end 6.0; the failed request counts for neither
    assert total.total_tokens_per_s == pytest.approx(308 / 5)
    assert total.output_tokens_per_s == pytest.approx(8 / 5)
    assert total.ttft_sum_s == 1.5
    assert total.ttft_p50_s == pytest.approx(statistics.median([1.0, 0.5]))
    assert total.itl_p90_s == pytest.approx(0.25 + 0.9 * 0.25)  # ITLs 0.5 and 0.25
    assert total.interactivity_p90 == pytest.approx(1 / 0.475)
    assert total.lag_max_s == 0.125


def test_summary_of_nothing() -> None:
    total = summarise([])
    assert total.hit_rate is None
    assert total.total_tokens_per_s is None
    assert total.duration_s == 0.0
