"""How long a step takes, learned online, and how large a prefill chunk may be beside running decodes.

A step's time is modelled as

    decode part                       mean of recent steps without prefill
    + fixed part                      what any chunk adds, however short: launches, experts that decodes leave unread
    + per_token * prefill tokens      weights' arithmetic
    + per_pair * attention pairs      pairs (new token, earlier position) of the prefill chunks

The two slopes are fitted by least squares to how steps differ from the mean of recent ones, held to be non-negative;
the fixed part is what they leave of the mean of steps with both decodes and chunks. Chunks that are all alike do not
say what of their time is fixed: they move the means alone, and slopes stay as steps of other sizes have left them.
Nothing is touched by steps without prefill, so that a long stretch of decoding does not wash prefill out. The
arithmetic is plain floats in a fixed order: equal inputs give equal chunks.
"""

from __future__ import annotations

import math

MIN_CHUNK_TOKENS = 32
"""A chunk is not made smaller than this for the sake of latency: prompts must make progress beside any decodes."""
LEAST_WORK = 1.0
"""A target that leaves a chunk less time for its tokens than this many times the fixed part counts as one that cannot
be kept: more than half of what prompts take would be the fixed part, again and again. With experts it is large, since
a chunk reads nearly all of them, however short it is."""
LOST_WORK = 6.0
"""What a chunk then takes, times the fixed part: as the target is missed anyway, prompts should not be slow as well."""

_DECODE_WEIGHT = 0.2
_FORGET = 0.9
_OUTLIER = 4.0
_TRUSTED_STEPS = 4
_ALIKE = 0.1
"""Chunks whose tokens differ from the mean by less than this share say nothing of slopes."""
_PRIOR = 0.003
"""Weight of the assumption that nothing is fixed, against the relative variance of tokens: it decides as long as sizes
have not differed."""


class _Means:
    """Means over recent steps of one kind: prefill tokens, pairs, and time beyond the decode part."""

    __slots__ = ("ns", "pairs", "steps", "tokens")

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = self.pairs = self.ns = 0.0

    def move(self, tokens: float, pairs: float, ns: float) -> None:
        """Towards a step that differs from the means by so much."""
        self.steps += 1
        weight = max(1.0 - _FORGET, 1.0 / self.steps)
        self.tokens += weight * tokens
        self.pairs += weight * pairs
        self.ns += weight * ns


class StepTimeModel:
    """Predicts step time from what is in the step. Times in nanoseconds."""

    __slots__ = ("_alone", "_beside", "_pp", "_tp", "_tt", "_yp", "_yt", "decode_ns", "fixed_ns", "per_pair_ns",
                 "per_token_ns")  # fmt: skip

    def __init__(self) -> None:
        self.decode_ns = 0.0
        self.fixed_ns = 0.0
        self.per_token_ns = 0.0
        self.per_pair_ns = 0.0
        self._alone = _Means()
        """Steps with chunks and no decodes: their fixed part is another."""
        self._beside = _Means()
        # Recent products of differences from the means: t = tokens, p = pairs, y = time beyond the decode part.
        self._tt = self._tp = self._pp = self._yt = self._yp = 0.0

    def observe(self, elapsed_ns: int, decodes: int, tokens: int, pairs: float) -> None:
        """A step took `elapsed_ns`; it had `decodes` decode rows and prefill of `tokens` tokens over `pairs` pairs."""
        if elapsed_ns <= 0:
            return
        if tokens == 0:
            if self.decode_ns == 0.0:
                self.decode_ns = float(elapsed_ns)
            else:
                seen = min(float(elapsed_ns), _OUTLIER * self.decode_ns)
                self.decode_ns += _DECODE_WEIGHT * (seen - self.decode_ns)
            return
        means = self._beside if decodes else self._alone
        excess = max(0.0, elapsed_ns - (self.decode_ns if decodes else 0.0))
        if means.steps >= _TRUSTED_STEPS:
            # A page fault or another process can cost a step many times its work. One such step must not shrink the
            # next chunks to nothing; a lasting change still arrives, by the factor with each step.
            slope = self.per_token_ns * (tokens - means.tokens) + self.per_pair_ns * (pairs - means.pairs)
            predicted = max(means.ns + slope, self.per_token_ns * tokens + self.per_pair_ns * pairs)
            excess = min(excess, _OUTLIER * predicted) if predicted > 0.0 else excess
        t, p, y = tokens - means.tokens, pairs - means.pairs, excess - means.ns
        if means.steps and abs(t) > _ALIKE * means.tokens:
            kept, fresh = _FORGET, _FORGET * (1.0 - _FORGET)
            self._tt = kept * self._tt + fresh * t * t
            self._tp = kept * self._tp + fresh * t * p
            self._pp = kept * self._pp + fresh * p * p
            self._yt = kept * self._yt + fresh * y * t
            self._yp = kept * self._yp + fresh * y * p
        means.move(t, p, y)
        self._fit()

    def _fit(self) -> None:
        """Slopes through the differences, and through the origin as far as those don't say; then the fixed part."""
        at = self._beside if self._beside.steps else self._alone
        self.per_token_ns, self.per_pair_ns = _slopes(
            self._tt + _PRIOR * at.tokens * at.tokens,
            self._tp + _PRIOR * at.tokens * at.pairs,
            self._pp + _PRIOR * at.pairs * at.pairs,
            self._yt + _PRIOR * at.ns * at.tokens,
            self._yp + _PRIOR * at.ns * at.pairs,
        )
        work = self.per_token_ns * at.tokens + self.per_pair_ns * at.pairs
        if work > at.ns:  # cheaper chunks have come, all of one size
            share = at.ns / work
            self.per_token_ns *= share
            self.per_pair_ns *= share
        self.fixed_ns = max(0.0, at.ns - work) if self._beside.steps else 0.0

    def untold(self, tokens: int) -> bool:
        """Whether chunks have been of one size so far, and this would be another of it: a larger one tells more."""
        mean = self._beside.tokens
        return self._tt <= _PRIOR * mean * mean and abs(tokens - mean) <= _ALIKE * mean

    def chunk_ns(self, start: int, count: int) -> float:
        """Predicted cost of computing positions `start .. start+count-1`, beside `fixed_ns` for the first of a step."""
        return self.per_token_ns * count + self.per_pair_ns * attention_pairs(start, count)

    def chunk_tokens(self, start: int, budget_ns: float) -> int:
        """Most tokens from position `start` on whose `chunk_ns` is at most `budget_ns`."""
        if budget_ns <= 0.0:
            return 0
        linear = self.per_token_ns + self.per_pair_ns * (start + 0.5)
        square = 0.5 * self.per_pair_ns
        if linear <= 0.0:
            return 1 << 30
        # The stable form of the root of square*n^2 + linear*n = budget, also when square is 0.
        return int(2.0 * budget_ns / (linear + math.sqrt(linear * linear + 4.0 * square * budget_ns)))


def _slopes(tt: float, tp: float, pp: float, yt: float, yp: float) -> tuple[float, float]:
    """Non-negative least squares in two unknowns, a token's and a pair's cost: the inner solution, or the better of the
    two edges."""
    determinant = tt * pp - tp * tp
    if pp > 0.0 and determinant > 1e-6 * tt * pp:
        per_token = (yt * pp - yp * tp) / determinant
        per_pair = (yp * tt - yt * tp) / determinant
        if per_token >= 0.0 and per_pair >= 0.0:
            return per_token, per_pair
        # Explained sum of squares decides between the edges.
        if yp > 0.0 and yp * yp * tt > yt * yt * pp:
            return 0.0, yp / pp
    # Chunks that all look alike cannot tell the two costs apart: charge everything to the tokens.
    return max(0.0, yt / tt), 0.0


def attention_pairs(start: int, count: int) -> float:
    """Pairs of a new position and a position it attends to, itself included."""
    return count * start + 0.5 * count * (count + 1)


class Allowance:
    """What one step may still take of prefill: tokens (a hard bound) and time (a minimum chunk may exceed it)."""

    __slots__ = ("_model", "_most", "_ns", "pairs", "spent_tokens", "tokens")

    def __init__(self, model: StepTimeModel, tokens: int, budget_ns: float | None, most: int = 0) -> None:
        """
        Args:
            model: predicts what chunks take.
            tokens: of all chunks together.
            budget_ns: beyond the decode part; None: no latency to keep.
            most: tokens of one chunk; 0 is no bound.
        """
        self._model = model
        self._most = most or tokens
        self._ns: float | None = None
        """For tokens; the fixed part is off already."""
        if budget_ns is not None:
            fixed_ns = model.fixed_ns
            work_ns = budget_ns - fixed_ns
            self._ns = work_ns if work_ns >= LEAST_WORK * fixed_ns else LOST_WORK * fixed_ns
        self.tokens = tokens
        self.spent_tokens = 0
        self.pairs = 0.0

    @property
    def open(self) -> bool:
        """Whether another chunk may go into this step."""
        if self.tokens <= 0:
            return False
        if self.spent_tokens == 0 or self._ns is None:
            return True
        return self._model.chunk_ns(0, min(MIN_CHUNK_TOKENS, self.tokens)) <= self._ns

    def take(self, start: int, need: int, align: int) -> int:
        """Size the next chunk, at least one token, and charge for it.

        A chunk that is not the prompt's last ends on a multiple of `align` if it is long enough, so that pages
        complete (and can be shared) early.
        """
        count = min(need, self.tokens, self._most)
        if self._ns is not None:
            sized = max(self._model.chunk_tokens(start, self._ns), MIN_CHUNK_TOKENS)
            count = min(count, 2 * sized if self.spent_tokens == 0 and self._model.untold(sized) else sized)
        if align <= count < need:
            count = (start + count) // align * align - start
        self.tokens -= count
        self.spent_tokens += count
        self.pairs += attention_pairs(start, count)
        if self._ns is not None:
            self._ns -= self._model.chunk_ns(start, count)
        return count
