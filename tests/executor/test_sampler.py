"""Sampling against an obvious twin that sorts the whole vocabulary, against statistics, and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from longturn.engine.records import SamplingParams
from longturn.executor.sampler import NonFiniteLogits, SamplingState, _truncate, logprobs_of, race, sample, uniforms

VOCAB = 64


def params(**values: object) -> SamplingParams:
    return SamplingParams(max_tokens=16, **values)  # type: ignore[arg-type]


def fresh(
    p: SamplingParams, tokens: list[int] | None = None, prompt: int | None = None, vocab: int = VOCAB
) -> SamplingState:
    ids = np.array(tokens or [1], np.int32)
    return SamplingState.create(p, ids, len(ids) if prompt is None else prompt, vocab)


def truncate_by_sorting(weights: np.ndarray, p: SamplingParams) -> list[int]:
    """Top-k, then top-p on the renormalised rest, then min-p: on the fully sorted vocabulary."""
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    if p.top_k:
        order = order[: p.top_k]
    if p.top_p < 1.0:
        mass = sum(weights[i] for i in order)
        kept, before = [], 0.0
        for i in order:
            if kept and not before < p.top_p * mass:
                break
            kept.append(i)
            before += weights[i]
        order = kept
    if p.min_p > 0.0:
        order = [i for j, i in enumerate(order) if j == 0 or weights[i] >= p.min_p]
    return order


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.sampled_from([0.1, 1.0, 5.0, 40.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 63, 64, 500]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.05]),
    min_p=st.sampled_from([0.0, 1e-6, 0.05, 0.7, 1.0]),
)
def test_truncation_equals_full_sort(seed: int, scale: float, top_k: int, top_p: float, min_p: float) -> None:
    assume(top_k or top_p < 1.0 or min_p > 0.0)
    logits = np.random.default_rng(seed).normal(0, scale, VOCAB)
    weights = np.exp(logits - logits.max())
    p = params(top_k=top_k, top_p=top_p, min_p=min_p)
    assert _truncate(weights, p).tolist() == truncate_by_sorting(weights, p)


def test_frequencies_follow_the_softmax() -> None:
    logits = np.random.default_rng(0).normal(0, 1.5, VOCAB).astype(np.float32)
    state = fresh(params(temperature=0.8, seed=11))
    draws = np.array([sample(logits, state, position)[0] for position in range(20_000)])
    expected = np.exp(logits.astype(np.float64) / 0.8)
    expected /= expected.sum()
    counts = np.bincount(draws, minlength=VOCAB)
    chi2 = float(((counts - 20_000 * expected) ** 2 / (20_000 * expected)).sum())
    assert chi2 < 63 + 5 * math.sqrt(2 * 63)  # mean and spread of chi-square with 63 degrees of freedom


def test_numbers_are_uniform_and_have_no_pattern() -> None:
    ids = np.arange(500, dtype=np.uint32)
    values = np.array([[uniforms(seed, position, ids) for position in range(20)] for seed in range(10)])
    assert values.min() > 0.0 and values.max() < 1.0
    deciles = np.bincount((values.ravel() * 10).astype(int), minlength=10)
    assert deciles.min() > 9_700 and deciles.max() < 10_300
    for shifted in (values[1:], values[:, 1:], values[:, :, 1:]):  # neighbours in seed, position, id
        original = values[tuple(slice(n) for n in shifted.shape)]
        assert abs(np.corrcoef(original.ravel(), shifted.ravel())[0, 1]) < 0.02


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.01, 1.0, 10.0]), st.integers(1, 200))
def test_the_race_equals_taking_every_logarithm(seed: int, scale: float, count: int) -> None:
    rng = np.random.default_rng(seed)
    weights, numbers = np.exp(-scale * rng.exponential(size=count)), rng.uniform(1e-9, 1 - 1e-9, count)
    weights[rng.uniform(size=count) < 0.3] = 0.0
    weights[rng.integers(count)] = 1.0
    assert race(weights, numbers) == int((weights / -np.log1p(-numbers)).argmax())


def test_rounding_in_the_logits_hardly_ever_changes_a_draw() -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(0, 0.5, 20_000).astype(np.float32)
    noisy = logits + rng.normal(0, 1e-5, 20_000).astype(np.float32)
    state = fresh(params(seed=1), vocab=20_000)
    changed = sum(sample(logits, state, p)[0] != sample(noisy, state, p)[0] for p in range(300))
    assert changed <= 1


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    logits = np.random.default_rng(1).normal(0, 1, VOCAB).astype(np.float32)
    alone = [sample(logits, fresh(params(seed=5)), position)[0] for position in range(50)]
    state = fresh(params(seed=5))
    assert alone == [sample(logits, state, position)[0] for position in range(50)]
    assert alone != [sample(logits, fresh(params(seed=6)), position)[0] for position in range(50)]


def test_greedy_takes_the_first_of_equal_logits() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[[9, 30]] = 2.0
    state = fresh(params(temperature=0.0))
    assert state.plain_greedy
    assert sample(logits, state, 0) == (9, None)


def test_penalties_by_hand() -> None:
    logits = np.array([2.0, -1.0, 0.5, 0.0], np.float32)
    state = fresh(
        params(temperature=0.0, repetition_penalty=2.0, frequency_penalty=0.5, presence_penalty=0.25, logprobs=0),
        tokens=[1, 0, 0],
        prompt=1,
        vocab=4,
    )
    # 0: 2/2 - 2*0.5 - 0.25 = -0.25; 1 (prompt only): -1*2 = -2; 2: 0.5; 3: 0
    token, logprobs = sample(logits, state, 3)
    assert token == 2
    assert logprobs is not None
    raw = np.exp(logits.astype(np.float64))
    assert logprobs.token == pytest.approx(math.log(raw[2] / raw.sum()), abs=1e-6)
    for _ in range(3):
        state.append(2)
    # 2 is now seen and was generated three times: 0.5/2 - 3*0.5 - 0.25 = -1.5
    assert sample(logits, state, 6)[0] == 3


def test_resumed_state_equals_the_one_that_ran_through() -> None:
    p = params(repetition_penalty=1.3, frequency_penalty=0.2, min_tokens=5, stop_token_ids=(3,))
    ran = fresh(p, tokens=[4, 5, 6], prompt=3)
    for token in (7, 7, 9):
        ran.append(token)
    resumed = fresh(p, tokens=[4, 5, 6, 7, 7, 9], prompt=3)
    assert resumed.generated == ran.generated == 3
    np.testing.assert_array_equal(resumed.output_counts, ran.output_counts)
    np.testing.assert_array_equal(resumed.seen, ran.seen)


def test_min_tokens_bans_stop_tokens_and_bias_can_force_one() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[3] = 50.0
    state = fresh(params(temperature=1.0, min_tokens=2, stop_token_ids=(3,), logit_bias=((8, 100.0),)))
    assert not state.plain_greedy
    assert sample(logits, state, 1)[0] == 8
    state.append(8)
    state.append(8)
    bias_free = fresh(params(temperature=0.0, min_tokens=2, stop_token_ids=(3,)), tokens=[1, 8, 8], prompt=1)
    assert bias_free.plain_greedy and sample(logits, bias_free, 3)[0] == 3


def test_logprobs_are_sorted_and_sum_to_one() -> None:
    logits = np.random.default_rng(3).normal(0, 2, VOCAB).astype(np.float32)
    result = logprobs_of(logits, 5, VOCAB)
    assert list(result.top) == sorted(result.top, reverse=True)
    assert sum(math.exp(v) for v in result.top) == pytest.approx(1.0, abs=1e-9)
    assert result.token == result.top[result.top_ids.index(5)]


def test_nan_and_all_banned_are_errors() -> None:
    logits = np.zeros(VOCAB, np.float32)
    logits[7] = np.nan
    with pytest.raises(NonFiniteLogits):
        sample(logits, fresh(params()), 0)
    only_stops = fresh(params(min_tokens=1, stop_token_ids=tuple(range(VOCAB))))
    with pytest.raises(NonFiniteLogits):
        sample(np.zeros(VOCAB, np.float32), only_stops, 0)


def test_tiny_temperature_is_argmax_without_overflow() -> None:
    logits = np.array([1e4, 0.0, 1e4 - 1, -1e4], np.float32)
    assert sample(logits, fresh(params(temperature=1e-8), vocab=4), 0)[0] == 0
