"""How long a step takes, learned online, and how large a prefill chunk may be beside running decodes.

A step's time is modelled as

    decode part                       mean of recent steps without prefill
    + per_token * prefill tokens      weights' arithmetic
    + per_pair * attention pairs      pairs (new token, earlier position) of the prefill chunks

The two prefill costs are fitted by least squares over exponentially forgotten sums, held to be non-negative. Sums are
touched only by steps that prefill, so that a long stretch of decoding does not wash them out. The arithmetic is plain
floats in a fixed order: equal inputs give equal chunks.
"""

from __future__ import annotations

import math

MIN_CHUNK_TOKENS = 32
"""A chunk is not made smaller than this for the sake of latency: prompts must make progress beside any decodes."""

_DECODE_WEIGHT = 0.2
_FORGET = 0.9
_OUTLIER = 4.0
_TRUSTED_STEPS = 4


class StepTimeModel:
    """Predicts step time from what is in the step. Times in nanoseconds."""

    __slots__ = ("_pp", "_steps", "_tp", "_tt", "_yp", "_yt", "decode_ns", "per_pair_ns", "per_token_ns")

    def __init__(self) -> None:
        self.decode_ns = 0.0
        self.per_token_ns = 0.0
        self.per_pair_ns = 0.0
        self._steps = 0
        # Sums over steps: t = tokens, p = pairs, y = time beyond the decode part.
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
        excess = max(0.0, elapsed_ns - (self.decode_ns if decodes else 0.0))
        predicted = self.per_token_ns * tokens + self.per_pair_ns * pairs
        if self._steps >= _TRUSTED_STEPS and predicted > 0.0:
            # A page fault or another process can cost a step many times its work. One such step must not shrink the
            # next chunks to nothing; a lasting change still arrives, by the factor with each step.
            excess = min(excess, _OUTLIER * predicted)
        self._steps += 1
        self._tt = _FORGET * self._tt + tokens * tokens
        self._tp = _FORGET * self._tp + tokens * pairs
        self._pp = _FORGET * self._pp + pairs * pairs
        self._yt = _FORGET * self._yt + excess * tokens
        self._yp = _FORGET * self._yp + excess * pairs
        self._fit()

    def _fit(self) -> None:
        """Non-negative least squares in two unknowns: the inner solution, or the better of the two edges."""
        determinant = self._tt * self._pp - self._tp * self._tp
        if self._pp > 0.0 and determinant > 1e-6 * self._tt * self._pp:
            per_token = (self._yt * self._pp - self._yp * self._tp) / determinant
            per_pair = (self._yp * self._tt - self._yt * self._tp) / determinant
            if per_token >= 0.0 and per_pair >= 0.0:
                self.per_token_ns, self.per_pair_ns = per_token, per_pair
                return
            # Explained sum of squares decides between the edges.
            if self._yp * self._yp * self._tt > self._yt * self._yt * self._pp:
                self.per_token_ns, self.per_pair_ns = 0.0, self._yp / self._pp
                return
        # Chunks that all look alike cannot tell the two costs apart: charge everything to the tokens.
        self.per_token_ns, self.per_pair_ns = self._yt / self._tt, 0.0

    def chunk_ns(self, start: int, count: int) -> float:
        """Predicted cost of computing positions `start .. start+count-1`."""
        return self.per_token_ns * count + self.per_pair_ns * attention_pairs(start, count)

    def chunk_tokens(self, start: int, budget_ns: float) -> int:
        """Most tokens from position `start` on that cost at most `budget_ns`."""
        if budget_ns <= 0.0:
            return 0
        linear = self.per_token_ns + self.per_pair_ns * (start + 0.5)
        square = 0.5 * self.per_pair_ns
        if linear <= 0.0:
            return 1 << 30
        # The stable form of the root of square*n^2 + linear*n = budget, also when square is 0.
        return int(2.0 * budget_ns / (linear + math.sqrt(linear * linear + 4.0 * square * budget_ns)))


def attention_pairs(start: int, count: int) -> float:
    """Pairs of a new position and a position it attends to, itself included."""
    return count * start + 0.5 * count * (count + 1)


class Allowance:
    """What one step may still take of prefill: tokens (a hard bound) and time (a minimum chunk may exceed it)."""

    __slots__ = ("_model", "_ns", "pairs", "spent_tokens", "tokens")

    def __init__(self, model: StepTimeModel, tokens: int, budget_ns: float | None) -> None:
        """`budget_ns` None: no latency to keep."""
        self._model = model
        self._ns = budget_ns
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
        count = min(need, self.tokens)
        if self._ns is not None:
            count = min(count, max(self._model.chunk_tokens(start, self._ns), MIN_CHUNK_TOKENS))
        if align <= count < need:
            count = (start + count) // align * align - start
        self.tokens -= count
        self.spent_tokens += count
        self.pairs += attention_pairs(start, count)
        if self._ns is not None:
            self._ns -= self._model.chunk_ns(start, count)
        return count
