"""Figures of quality: hand-computed ones, and a twin that computes position by position in Python's own floats."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.bench.quality import AnswerPair, common_prefix, compare_logits, join_scores, quality_metrics
from longturn.bench.texts import NamedText, digest, read_prompts, read_texts, shipped_prompts, shipped_texts
from longturn.errors import ConfigError, LongturnError


def logits_of(*rows: list[float]) -> np.ndarray:
    """Float32 logits whose softmax is `rows`."""
    return np.log(np.array(rows, np.float64)).astype(np.float32)


def test_hand_computed() -> None:
    reference = logits_of([0.5, 0.25, 0.25], [0.8, 0.1, 0.1])
    # The second row is shifted, which must not matter: softmax does not see it.
    candidate = logits_of([0.25, 0.5, 0.25], [0.8, 0.1, 0.1]) + np.array([[0.0], [7.0]], np.float32)
    scores = compare_logits(reference, candidate, np.array([0, 2], np.int32))
    assert scores.reference_loss == pytest.approx([math.log(2), math.log(10)], rel=1e-6)
    assert scores.candidate_loss == pytest.approx([math.log(4), math.log(10)], rel=1e-6)
    # 0.5 log 2 + 0.25 log 1/2 + 0 = 0.25 log 2
    assert scores.kl == pytest.approx([0.25 * math.log(2), 0.0], abs=1e-6)
    assert scores.same_top.tolist() == [False, True]
    metrics = quality_metrics(scores)
    assert metrics is not None
    assert metrics.positions == 2
    assert metrics.reference_perplexity == pytest.approx(math.sqrt(20), rel=1e-6)
    assert metrics.candidate_perplexity == pytest.approx(math.sqrt(40), rel=1e-6)
    assert metrics.perplexity_delta == pytest.approx(math.sqrt(2) - 1, rel=1e-5)
    # Differences log 2 and 0: sample deviation log 2 / sqrt 2, of the mean log 2 / 2, times sqrt 2 for the ratio.
    assert metrics.perplexity_delta_error == pytest.approx(math.log(2) / 2 * math.sqrt(2), rel=1e-5)
    assert metrics.top1_agreement == 0.5
    assert metrics.kl.max == pytest.approx(0.25 * math.log(2), rel=1e-5)
    assert metrics.kl.mean == pytest.approx(0.125 * math.log(2), rel=1e-5)


def test_kl_has_a_direction() -> None:
    sharp, flat = logits_of([0.98, 0.01, 0.01]), logits_of([1 / 3, 1 / 3, 1 / 3])
    target = np.zeros(1, np.int32)
    assert compare_logits(sharp, flat, target).kl[0] == pytest.approx(
        0.98 * math.log(0.98 * 3) + 0.02 * math.log(0.03), rel=1e-5
    )
    assert compare_logits(flat, sharp, target).kl[0] == pytest.approx(
        (-math.log(2.94) - 2 * math.log(0.03)) / 3, rel=1e-5
    )


def slow_scores(a: list[float], b: list[float], target: int) -> tuple[float, float, float, bool]:
    def probabilities(logits: list[float]) -> list[float]:
        top = max(logits)
        weights = [math.exp(value - top) for value in logits]
        return [weight / math.fsum(weights) for weight in weights]

    p, q = probabilities(a), probabilities(b)
    kl = math.fsum(x * math.log(x / y) for x, y in zip(p, q, strict=True) if x > 0)
    return -math.log(p[target]), -math.log(q[target]), kl, a.index(max(a)) == b.index(max(b))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    count=st.integers(1, 50),
    vocab=st.integers(2, 40),
    noise=st.sampled_from([0.0, 0.01, 1.0, 5.0]),
    cuts=st.lists(st.integers(0, 50), max_size=4),
)
def test_agrees_with_the_twin_however_it_is_cut(
    seed: int, count: int, vocab: int, noise: float, cuts: list[int]
) -> None:
    rng = np.random.default_rng(seed)
    a = (rng.standard_normal((count, vocab)) * 4).astype(np.float32)
    b = (a + noise * rng.standard_normal(a.shape)).astype(np.float32)
    a[rng.random(a.shape) < 0.2] = 3.0  # equal logits: both must choose the lowest id
    targets = rng.integers(0, vocab, count).astype(np.int32)
    edges = [0, *sorted(min(cut, count) for cut in cuts), count]
    chunks = list(itertools.pairwise(edges))
    scores = join_scores(compare_logits(a[i:j], b[i:j], targets[i:j]) for i, j in chunks)
    slow = [slow_scores(a[i].tolist(), b[i].tolist(), int(targets[i])) for i in range(count)]
    columns = list(zip(*slow, strict=True))
    assert scores.reference_loss == pytest.approx(columns[0], rel=1e-9, abs=1e-12)
    assert scores.candidate_loss == pytest.approx(columns[1], rel=1e-9, abs=1e-12)
    assert scores.kl == pytest.approx(columns[2], rel=1e-7, abs=1e-12)
    assert scores.same_top.tolist() == list(columns[3])
    metrics = quality_metrics(scores)
    assert metrics is not None
    assert metrics.positions == count
    assert metrics.reference_perplexity == pytest.approx(math.exp(statistics.fmean(columns[0])))
    assert metrics.perplexity_delta == pytest.approx(
        math.exp(statistics.fmean(columns[1])) / math.exp(statistics.fmean(columns[0])) - 1, abs=1e-9
    )
    if count > 1:
        cut = statistics.quantiles(columns[2], n=100, method="inclusive")
        assert (metrics.kl.p50, metrics.kl.p90, metrics.kl.p99) == pytest.approx(
            (cut[49], cut[89], cut[98]), rel=1e-6, abs=1e-12
        )
    else:
        assert metrics.perplexity_delta_error is None


def test_the_same_logits_differ_by_exactly_nothing() -> None:
    logits = np.random.default_rng(0).standard_normal((40, 300)).astype(np.float32)
    metrics = quality_metrics(compare_logits(logits, logits.copy(), np.arange(40, dtype=np.int32)))
    assert metrics is not None
    assert (metrics.perplexity_delta, metrics.perplexity_delta_error, metrics.top1_agreement) == (0.0, 0.0, 1.0)
    assert (metrics.kl.mean, metrics.kl.max) == (0.0, 0.0)


def test_no_positions() -> None:
    assert quality_metrics(join_scores([])) is None


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite(value: float) -> None:
    good = np.zeros((3, 4), np.float32)
    bad = good.copy()
    bad[1, 2] = value
    targets = np.zeros(3, np.int32)
    with pytest.raises(LongturnError, match="the candidate gives logits that are not finite \\(position 1 of 3\\)"):
        compare_logits(good, bad, targets)
    with pytest.raises(LongturnError, match="the reference"):
        compare_logits(bad, good, targets)


def test_shapes_and_targets_are_checked() -> None:
    logits = np.zeros((3, 4), np.float32)
    with pytest.raises(ValueError, match="shapes differ"):
        compare_logits(logits, np.zeros((3, 5), np.float32), np.zeros(3, np.int32))
    with pytest.raises(ValueError, match="shapes differ"):
        compare_logits(logits, logits, np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="outside the vocabulary of 4"):
        compare_logits(logits, logits, np.array([0, 4, 0], np.int32))


def test_a_perplexity_that_is_no_float() -> None:
    logits = np.array([[0.0, 1000.0]], np.float32)
    with pytest.raises(LongturnError, match="1000 nats has no perplexity"):
        quality_metrics(compare_logits(logits, logits, np.zeros(1, np.int32)))


def test_answers_agree_until_the_first_difference() -> None:
    assert common_prefix([1, 2, 3], [1, 9, 3]) == 1
    assert common_prefix([1, 2], [1, 2, 3]) == 2
    assert common_prefix([], [1]) == 0
    pair = AnswerPair("p", 5, (1, 2), (1, 2, 3))
    assert (pair.agreed_tokens, pair.same) == (2, False)
    assert AnswerPair("p", 5, (1, 2), (1, 2)).same


# --- texts -----------------------------------------------------------------------------------------------------------


def test_shipped_texts_and_prompts() -> None:
    texts, prompts = shipped_texts(), shipped_prompts()
    assert [text.name for text in texts] == ["prose", "code", "session", "data"]
    assert all(len(text.text) > 1500 for text in texts)
    compile(texts[1].text, "code.txt", "exec")
    assert len({prompt.name for prompt in prompts}) == len(prompts) == 8


def test_digest_sees_where_a_text_ends() -> None:
    one, two = [NamedText("a", "xy"), NamedText("b", "z")], [NamedText("a", "x"), NamedText("b", "yz")]
    assert digest(one) != digest(two)
    assert digest(one) == digest([NamedText("c", "xy"), NamedText("d", "z")])


def test_files(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("Grüße\n")
    (tmp_path / "p.txt").write_text("first\n\n  second \n")
    (tmp_path / "p.json").write_text(json.dumps([{"text": "x"}, {"name": "n", "text": "y"}]))
    assert read_texts([tmp_path / "a.md"]) == (NamedText("a.md", "Grüße\n"),)
    assert [item.text for item in read_prompts(tmp_path / "p.txt")] == ["first", "second"]
    assert read_prompts(tmp_path / "p.json") == (NamedText("prompt 1", "x"), NamedText("n", "y"))


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"ok \xff", "not UTF-8 text \\(byte 3\\)"),
        ("a.txt", b" \n", "holds no text"),
        ("missing", None, "No such file"),
        ("a.json", b"[{]", "not JSON"),
        ("a.json", b"{}", "must be a list of prompts"),
        ("a.json", b'[{"text": "x"}, {"name": "y"}]', "prompt 2 has no text"),
    ],
)
def test_files_that_are_no_prompts(name: str, data: bytes | None, message: str, tmp_path: Path) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=message) as caught:
        read_prompts(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
