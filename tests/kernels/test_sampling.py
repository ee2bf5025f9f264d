"""Sampling kernels in Triton's interpreter against executor/sampler.py, whose tokens they must sample."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when triton and each kernel are imported, so it must precede both
pytest.importorskip("triton", reason="triton is not installed")
if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
    pytest.skip("the interpreter of Triton 3.6 needs numpy below 2.4", allow_module_level=True)

from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.engine.records import SamplingParams
from longturn.errors import RequestError
from longturn.executor.sampler import SamplingState, logprobs_of, sample
from longturn.executor.sampling_words import needs_penalties, penalty_words, plain, row_words
from longturn.kernels.sampling import sample_rows
from longturn.kernels.sampling_table import (
    MAX_BIASES,
    MAX_LOGPROBS,
    Sampled,
    SamplePlan,
    SampleScratch,
    SamplingTable,
)

VOCAB = 200
CPU = torch.device("cpu")
NARROW = SamplePlan(parts=4, width=4, warps=1, finish_warps=1, block=128)
"""Offers so few tokens that most truncations search the whole row."""
WIDE = SamplePlan(parts=4, width=128, warps=1, finish_warps=1, block=128)


def params(**values: object) -> SamplingParams:
    return SamplingParams(max_tokens=16, **values)  # type: ignore[arg-type]


class Device:
    """A table of rows and one call of the kernels."""

    def __init__(self, rows: int, plan: SamplePlan, vocab: int = VOCAB) -> None:
        self.plan, self.vocab = plan, vocab
        self.table = SamplingTable.allocate(rows, vocab, rows, CPU)
        self.last = torch.full((rows,), 77, dtype=torch.int32)

    def admit(self, row: int, p: SamplingParams, tokens: list[int], prompt: int) -> None:
        w = row_words(p, prompt, row if needs_penalties(p) else -1)
        self.table.params[row] = torch.tensor(w.params, dtype=torch.int32)
        self.table.stop_ids[row, : len(w.stop_ids)] = torch.tensor(w.stop_ids, dtype=torch.int32)
        self.table.bias_ids[row, : len(w.bias_ids)] = torch.tensor(w.bias_ids, dtype=torch.int32)
        self.table.bias_values[row, : len(w.bias_ids)] = torch.tensor(w.bias_values)
        if needs_penalties(p):
            self.table.penalties[row] = torch.from_numpy(penalty_words(np.array(tokens, np.int32), prompt, self.vocab))

    def sample(
        self, logits: np.ndarray, rows: list[int], positions: list[int], bitmask: torch.Tensor | None = None,
        full: bool = True, out: Sampled | None = None,
    ) -> Sampled:  # fmt: skip
        scratch = SampleScratch.allocate(len(rows), self.vocab, self.plan, CPU)
        for buffer in (scratch.floats, scratch.values, scratch.adjusted, scratch.top_values):
            buffer.fill_(float("nan"))
        for buffer in (scratch.indices, scratch.ids, scratch.top_ids):
            buffer.fill_(123456789)
        out = out or Sampled.allocate(len(rows), CPU)
        out.tokens.fill_(-7)
        raw = torch.from_numpy(logits.copy())
        sample_rows(
            raw, torch.tensor(rows, dtype=torch.int32), torch.tensor(positions, dtype=torch.int32), self.table,
            scratch, out, plan=self.plan, last_tokens=self.last, bitmask=bitmask, full=full,
        )  # fmt: skip
        np.testing.assert_array_equal(raw.numpy(), logits)
        return out


def acceptable(logits: np.ndarray, p: SamplingParams, tokens: list[int], prompt: int) -> set[int]:
    """The reference's token, and those it would choose if a threshold or a logit moved by a rounding of fp32."""
    found = set()
    noise = np.random.default_rng(0)
    for n in range(9):
        shift = 0.0 if n == 0 else 4e-6 * (-1) ** n
        q = p
        if 0.0 < p.top_p < 1.0:
            q = replace(q, top_p=p.top_p * (1 + shift))
        if p.min_p:
            q = replace(q, min_p=p.min_p * (1 + shift))
        moved = logits if n < 3 else logits + noise.normal(0, 1e-6 * max(p.temperature, 1e-3), len(logits))
        state = SamplingState.create(q, np.array(tokens, np.int32), prompt, len(logits))
        found.add(sample(moved.astype(np.float32), state, len(tokens))[0])
    return found


def expected(logits: np.ndarray, p: SamplingParams, tokens: list[int], prompt: int) -> int:
    state = SamplingState.create(p, np.array(tokens, np.int32), prompt, len(logits))
    return sample(logits, state, len(tokens))[0]


requests = st.builds(
    params,
    temperature=st.sampled_from([0.0, 1e-7, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 40, 199, 1000]),
    top_p=st.sampled_from([1.0, 1.0, 1e-4, 0.3, 0.9, 0.99]),
    min_p=st.sampled_from([0.0, 0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(-(2**63), 2**64 - 1),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.7, -1.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    logit_bias=st.lists(st.tuples(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 3.0, 100.0])), max_size=4).map(
        tuple
    ),
    min_tokens=st.sampled_from([0, 3]),
    stop_token_ids=st.lists(st.integers(0, VOCAB - 1), max_size=3).map(tuple),
)


@settings(max_examples=12, deadline=None)
@given(
    st.lists(requests, min_size=1, max_size=4), st.integers(0, 2**31), st.sampled_from([0.0, 0.01, 1.0, 8.0]),
    st.booleans(), st.sampled_from([NARROW, WIDE]),
)  # fmt: skip
def test_samples_what_the_reference_samples(
    some: list[SamplingParams], salt: int, spread: float, rounded: bool, plan: SamplePlan
) -> None:
    rng = np.random.default_rng(salt)
    device = Device(len(some), plan)
    logits = (rng.normal(size=(len(some), VOCAB)) * spread).astype(np.float32)
    if rounded:  # many equal logits
        logits = np.round(logits * 2) / 2
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[:, 0] = np.where(np.isfinite(logits[:, 0]), logits[:, 0], 0.0)
    histories = []
    for row, p in enumerate(some):
        prompt = int(rng.integers(1, 6))
        history = rng.integers(0, VOCAB, prompt + int(rng.integers(0, 5))).tolist()
        histories.append((history, prompt))
        device.admit(row, p, history, prompt)
    order = rng.permutation(len(some)).tolist()
    out = device.sample(logits[order], order, [len(histories[r][0]) for r in order])
    for s, row in enumerate(order):
        token = int(out.tokens[s])
        if token != expected(logits[row], some[row], *histories[row]):
            assert token in acceptable(logits[row], some[row], *histories[row]), some[row]
        assert device.last[row] == token


def test_sequences_and_their_counts_follow_the_reference() -> None:
    rng = np.random.default_rng(3)
    some = [
        params(temperature=0.0, frequency_penalty=0.9, presence_penalty=0.3),
        params(temperature=0.8, repetition_penalty=1.5, seed=5),
        params(temperature=0.0),
        params(temperature=0.0, min_tokens=4, stop_token_ids=(11, 12)),
    ]
    device = Device(4, WIDE)
    states, histories = [], []
    for row, p in enumerate(some):
        history = [1, 2, 3, 11]
        device.admit(row, p, history, 3)
        states.append(SamplingState.create(p, np.array(history, np.int32), 3, VOCAB))
        histories.append(history)
    for _ in range(6):
        logits = rng.normal(size=(4, VOCAB)).astype(np.float32)
        logits[:, 11] += 4.0
        out = device.sample(logits, [0, 1, 2, 3], [len(h) for h in histories])
        for row in range(4):
            token, _ = sample(logits[row], states[row], len(histories[row]))
            assert out.tokens[row] == token
            states[row].append(token)
            histories[row].append(token)
    assert histories[3].count(11) < histories[2].count(11)


def test_log_probabilities() -> None:
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(4, VOCAB)).astype(np.float32) * 3
    logits[1, 7] = logits[1, 8] = logits[1].max() + 1
    some = [
        params(temperature=1.0, logprobs=20, seed=1),
        params(temperature=0.0, logprobs=2),
        params(logprobs=0),
        params(),
    ]
    device = Device(4, NARROW)
    for row, p in enumerate(some):
        device.admit(row, p, [1], 1)
    out = device.sample(logits, [0, 1, 2, 3], [1] * 4)
    for row, count in enumerate((20, 2, 0)):
        want = logprobs_of(logits[row], int(out.tokens[row]), count)
        assert tuple(out.top_ids[row, :count].tolist()) == want.top_ids
        np.testing.assert_allclose(out.top_logprobs[row, :count].numpy(), want.top, atol=1e-5)
        np.testing.assert_allclose(float(out.logprobs[row]), want.token, atol=1e-5)


def test_grammar_mask() -> None:
    rng = np.random.default_rng(5)
    logits = rng.normal(size=(3, VOCAB)).astype(np.float32)
    allowed = rng.random((3, VOCAB)) < 0.1
    allowed[2] = False
    padded = np.zeros((3, -(-VOCAB // 32) * 32), bool)
    padded[:, :VOCAB] = allowed
    mask = torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32).copy())
    device = Device(3, WIDE)
    device.admit(0, params(temperature=0.0), [1], 1)
    device.admit(1, params(temperature=1.0, top_k=5, seed=9), [1], 1)
    device.admit(2, params(temperature=0.0), [1], 1)
    out = device.sample(logits, [0, 1, 2], [1, 1, 1], bitmask=mask)
    masked = np.where(allowed, logits, -np.inf).astype(np.float32)
    assert out.tokens.tolist() == [
        int(masked[0].argmax()), expected(masked[1], params(temperature=1.0, top_k=5, seed=9), [1], 1), -1,
    ]  # fmt: skip


def test_broken_logits_are_reported_and_padding_is_left_alone() -> None:
    logits = np.zeros((6, VOCAB), np.float32)
    logits[0, 150] = np.nan
    logits[1, 3] = np.inf
    logits[2] = -np.inf
    logits[4, 5] = 1.0
    device = Device(6, WIDE)
    some = [params(temperature=0.0), params(top_k=3), params(top_p=0.5), params(), params(temperature=0.0), params()]
    for row, p in enumerate(some):
        device.admit(row, p, [1], 1)
    out = device.sample(logits, [0, 1, 2, -1, 4, 5], [1] * 6)
    assert out.tokens.tolist()[:5] == [-1, -1, -1, -7, 5]
    assert device.last.tolist()[:5] == [0, 0, 0, 77, 5]
    assert out.tokens[5] == expected(logits[5], some[5], [1], 1)


def test_without_the_full_kernels_greedy_and_temperature_are_the_same() -> None:
    logits = np.random.default_rng(6).normal(size=(4, VOCAB)).astype(np.float32)
    logits[3, 1] = np.nan
    some = [params(temperature=0.0), params(seed=4), params(temperature=0.4, seed=5), params()]
    device = Device(4, WIDE)
    for row, p in enumerate(some):
        assert plain(p)
        device.admit(row, p, [1], 1)
    out = device.sample(logits, [0, 1, 2, 3], [1] * 4, full=False)
    assert out.tokens.tolist() == [expected(logits[r], some[r], [1], 1) for r in range(3)] + [-1]


@pytest.mark.parametrize("full", [True, False])
def test_a_step_writes_to_the_results_whose_turn_it_is(full: bool) -> None:
    some = [params(temperature=0.0, logprobs=2 if full else None), params(temperature=0.4, seed=5)]
    device, words = Device(2, WIDE), torch.full((3, 2 * 2 + 2 * 2 * MAX_LOGPROBS), -7, dtype=torch.int32)
    for row, p in enumerate(some):
        device.admit(row, p, [1], 1)
    ids = words[0, 4 : 4 + 2 * MAX_LOGPROBS].view(2, -1)
    tops = words[0, 4 + 2 * MAX_LOGPROBS :].view(torch.float32).view(2, -1)
    turn = torch.tensor([2, 99], dtype=torch.int32)
    turns = Sampled(words[0, :2], words[0, 2:4].view(torch.float32), ids, tops, turn, words.stride(0))
    logits = np.random.default_rng(7).normal(size=(2, VOCAB)).astype(np.float32)
    alone = device.sample(logits, [0, 1], [1, 1], full=full)
    device.sample(logits, [0, 1], [1, 1], full=full, out=turns)
    assert (words[:2] == -7).all() and torch.equal(words[2, :2], alone.tokens)
    if full:
        assert words[2, 2].view(torch.float32) == alone.logprobs[0]
        assert torch.equal(words[2, 4:6], alone.top_ids[0, :2])
        at = 4 + 2 * MAX_LOGPROBS
        assert torch.equal(words[2, at : at + 2].view(torch.float32), alone.top_logprobs[0, :2])
    else:
        assert (words[2, 2:] == -7).all()


def test_a_flat_distribution_takes_the_first_of_the_race_that_survives() -> None:
    rng = np.random.default_rng(7)
    some = [params(top_p=p, seed=s) for p in (0.95, 0.4, 0.02) for s in (1, 2)] + [
        params(top_k=150, seed=3),
        params(min_p=0.3),
    ]
    logits = (rng.normal(size=(len(some), VOCAB)) * 0.3).astype(np.float32)
    device = Device(len(some), NARROW)
    for row, p in enumerate(some):
        device.admit(row, p, [1], 1)
    out = device.sample(logits, list(range(len(some))), [1] * len(some))
    assert out.tokens.tolist() == [expected(logits[r], p, [1], 1) for r, p in enumerate(some)]


def test_limits_and_plain_rows() -> None:
    with pytest.raises(RequestError, match="logit_bias"):
        row_words(params(logit_bias=tuple((i, 1.0) for i in range(MAX_BIASES + 1))), 1)
    with pytest.raises(RequestError, match="stop tokens"):
        row_words(params(min_tokens=1, stop_token_ids=tuple(range(33))), 1)
    assert plain(params(temperature=0.0, top_k=4, stop_token_ids=(1,)))
    assert not plain(params(temperature=0.0, presence_penalty=0.1))
    assert plain(params(temperature=0.5, min_tokens=2)) and not plain(params(top_p=0.9))
