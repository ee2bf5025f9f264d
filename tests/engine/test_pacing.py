"""The step-time model and chunk sizes."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longturn.engine.pacing import MIN_CHUNK_TOKENS, Allowance, StepTimeModel, attention_pairs


def feed(model: StepTimeModel, rng: random.Random, steps: int, token_ns: float, pair_ns: float, noise: float) -> None:
    for _ in range(steps):
        model.observe(int(10e6 * rng.uniform(1 - noise, 1 + noise)), 4, 0, 0.0)
        start, count = rng.randrange(8000), rng.randrange(32, 512)
        pairs = attention_pairs(start, count)
        elapsed = (10e6 + token_ns * count + pair_ns * pairs) * rng.uniform(1 - noise, 1 + noise)
        model.observe(int(elapsed), 4, count, pairs)


def test_costs_are_recovered() -> None:
    model = StepTimeModel()
    feed(model, random.Random(1), 60, 200_000, 30, 0.02)
    assert model.decode_ns == pytest.approx(10e6, rel=0.05)
    for start, count in ((0, 256), (4000, 256), (8000, 64)):
        truth = 200_000 * count + 30 * attention_pairs(start, count)
        assert model.chunk_ns(start, count) == pytest.approx(truth, rel=0.1)


def test_decoding_does_not_wash_prefill_out() -> None:
    model = StepTimeModel()
    feed(model, random.Random(1), 30, 200_000, 30, 0.0)
    before = model.per_token_ns, model.per_pair_ns
    for _ in range(10_000):
        model.observe(10_000_000, 8, 0, 0.0)
    assert (model.per_token_ns, model.per_pair_ns) == before


def test_one_slow_step_is_no_catastrophe_and_a_lasting_change_arrives() -> None:
    model = StepTimeModel()
    feed(model, random.Random(2), 40, 100_000, 0, 0.0)
    calm = model.chunk_tokens(0, 50e6)
    model.observe(60_000_000_000, 0, 256, attention_pairs(0, 256))
    assert model.chunk_tokens(0, 50e6) > calm / 4
    feed(model, random.Random(3), 60, 1_000_000, 0, 0.0)
    assert model.chunk_tokens(0, 50e6) == pytest.approx(50, abs=5)


@given(
    st.lists(
        st.tuples(st.integers(1, 10**9), st.integers(0, 8), st.integers(0, 600), st.integers(0, 20_000)), max_size=40
    ),
    st.integers(0, 150_000),
    st.floats(0, 1e9),
)
def test_costs_stay_finite_and_chunks_cost_no_more_than_allowed(
    steps: list[tuple[int, int, int, int]], start: int, budget: float
) -> None:
    model = StepTimeModel()
    for elapsed, decodes, count, begin in steps:
        model.observe(elapsed, decodes, count, attention_pairs(begin, count))
    assert 0 <= model.per_token_ns < math.inf
    assert 0 <= model.per_pair_ns < math.inf
    count = model.chunk_tokens(start, budget)
    if count < 1 << 30:
        assert model.chunk_ns(start, count) <= budget * (1 + 1e-6) + 1e-6
        assert model.chunk_ns(start, count + 2) >= budget * (1 - 1e-6)


@given(st.integers(1, 600), st.integers(0, 10_000), st.integers(1, 10_000), st.floats(-1e8, 1e9))
def test_a_chunk_makes_progress_within_the_tokens(tokens: int, start: int, need: int, budget: float) -> None:
    model = StepTimeModel()
    model.observe(60_000_000, 0, 256, attention_pairs(0, 256))
    allowance = Allowance(model, tokens, budget)
    count = allowance.take(start, need, 128)
    assert 1 <= count <= min(tokens, need)
    assert count == need or count < 128 or (start + count) % 128 == 0
    if count > MIN_CHUNK_TOKENS:
        assert model.chunk_ns(start, count) <= budget * 1.000001
