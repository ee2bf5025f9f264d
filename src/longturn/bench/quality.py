"""How far two configurations of a model differ, from their logits and their greedy answers.

One of the two is the reference. Definitions, all over positions whose next token is known:
- Loss: -log p(next token), in nats. Perplexity: exp(mean loss).
- Perplexity delta: relative, candidate's perplexity / reference's - 1; +0.01 is 1 % worse. Its standard error comes
  from the paired differences of loss, so what is hard in the text cancels. Neighbouring positions are not independent:
  the true error is larger.
- KL: sum of p * log(p / q) over the vocabulary, p the reference's distribution and q the candidate's, in nats.
- Top-1 agreement: share of positions where both have the same most likely token (the lowest id of equals).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longturn.errors import LongturnError

_ROWS = 16
"""Positions computed at once in float64: a vocabulary of 200,000 takes 26 MB an array."""
_MAX_LOSS = 700.0
"""Above it, exp overflows a float."""


@dataclass(frozen=True, slots=True)
class PositionScores:
    """One value for each of n positions; nothing of the vocabulary's size is kept."""

    reference_loss: npt.NDArray[np.float64]
    candidate_loss: npt.NDArray[np.float64]
    kl: npt.NDArray[np.float64]
    same_top: npt.NDArray[np.bool_]


def compare_logits(
    reference: npt.NDArray[np.float32], candidate: npt.NDArray[np.float32], targets: npt.NDArray[np.int32]
) -> PositionScores:
    """Compare two models' next-token distributions.

    Args:
        reference: [n, vocab] logits.
        candidate: [n, vocab] logits of the other model at the same positions.
        targets: [n] the token that does come next.

    Raises:
        ValueError: the shapes do not agree, or a target is outside the vocabulary.
        LongturnError: a logit is NaN or infinite; names the side and the first such row.
    """
    if reference.shape != candidate.shape or targets.shape != reference.shape[:1]:
        raise ValueError(f"shapes differ: {reference.shape}, {candidate.shape}, targets {targets.shape}")
    if len(targets) and not (0 <= targets.min() and targets.max() < reference.shape[1]):
        raise ValueError(f"a target is outside the vocabulary of {reference.shape[1]}")
    for side, logits in (("reference", reference), ("candidate", candidate)):
        bad = np.flatnonzero(~np.isfinite(logits).all(axis=1))
        if len(bad):
            raise LongturnError(f"the {side} gives logits that are not finite (position {bad[0]} of {len(logits)})")
    parts = [
        _compare_few(reference[at : at + _ROWS], candidate[at : at + _ROWS], targets[at : at + _ROWS])
        for at in range(0, len(targets), _ROWS)
    ]
    return join_scores(parts)


def _compare_few(
    reference: npt.NDArray[np.float32], candidate: npt.NDArray[np.float32], targets: npt.NDArray[np.int32]
) -> PositionScores:
    p, q = _log_softmax(reference), _log_softmax(candidate)
    at = targets[:, None]
    return PositionScores(
        reference_loss=-np.take_along_axis(p, at, axis=1)[:, 0],
        candidate_loss=-np.take_along_axis(q, at, axis=1)[:, 0],
        # Never below 0 but for rounding, which would read as an impossible figure.
        kl=np.maximum((np.exp(p) * (p - q)).sum(axis=1), 0.0),
        same_top=reference.argmax(axis=1) == candidate.argmax(axis=1),
    )


def _log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    wide -= np.log(np.exp(wide).sum(axis=1, keepdims=True))
    return wide


def join_scores(parts: Iterable[PositionScores]) -> PositionScores:
    """The positions of all parts, in their order."""
    items = list(parts)
    none = np.empty(0, np.float64)
    return PositionScores(
        reference_loss=np.concatenate([none, *(item.reference_loss for item in items)]),
        candidate_loss=np.concatenate([none, *(item.candidate_loss for item in items)]),
        kl=np.concatenate([none, *(item.kl for item in items)]),
        same_top=np.concatenate([np.empty(0, np.bool_), *(item.same_top for item in items)]),
    )


@dataclass(frozen=True, slots=True)
class KlSummary:
    """Of KL over positions, nats."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class QualityMetrics:
    """The figures of some positions."""

    positions: int
    reference_perplexity: float
    candidate_perplexity: float
    perplexity_delta: float
    perplexity_delta_error: float | None
    """Standard error; None for a single position."""
    top1_agreement: float
    kl: KlSummary


def quality_metrics(scores: PositionScores) -> QualityMetrics | None:
    """The figures of all positions together; None if there are none.

    Raises:
        LongturnError: the text is so improbable to a model that its perplexity is no float.
    """
    count = len(scores.kl)
    if not count:
        return None
    reference, candidate = float(scores.reference_loss.mean()), float(scores.candidate_loss.mean())
    if max(reference, candidate) > _MAX_LOSS:
        raise LongturnError(
            f"a mean loss of {max(reference, candidate):.0f} nats has no perplexity: the model is broken"
        )
    difference = scores.candidate_loss - scores.reference_loss
    mean = float(difference.mean())
    error = float(difference.std(ddof=1)) / math.sqrt(count) * math.exp(mean) if count > 1 else None
    p50, p90, p99 = (float(value) for value in np.percentile(scores.kl, (50, 90, 99)))
    return QualityMetrics(
        positions=count,
        reference_perplexity=math.exp(reference),
        candidate_perplexity=math.exp(candidate),
        perplexity_delta=math.expm1(mean),
        perplexity_delta_error=error,
        top1_agreement=float(scores.same_top.mean()),
        kl=KlSummary(float(scores.kl.mean()), p50, p90, p99, float(scores.kl.max())),
    )


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """Greedy answers of both configurations to one prompt, as token ids, their end tokens included."""

    name: str
    prompt_tokens: int
    reference: tuple[int, ...]
    candidate: tuple[int, ...]

    @property
    def agreed_tokens(self) -> int:
        """Tokens until the first difference. After it the answers are to different prompts: no later token counts."""
        return common_prefix(self.reference, self.candidate)

    @property
    def same(self) -> bool:
        return self.reference == self.candidate


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    pairs = zip(a, b, strict=False)
    return next((index for index, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
