"""What the two sampling kernels share: the words of a row, its random numbers, and the order of logits."""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from longturn.kernels import sampling_table as table_words
from longturn.kernels.dependent import FRESH

NONE = tl.constexpr(2147483647)
RUN = tl.constexpr(table_words.RUN)
WORDS = tl.constexpr(table_words.ROW_WORDS)
STOP_ROW = tl.constexpr(table_words.MAX_STOPS)
BIAS_ROW = tl.constexpr(table_words.MAX_BIASES)
TOP_ROW = tl.constexpr(table_words.MAX_LOGPROBS)
TEMPERATURE = tl.constexpr(table_words.TEMPERATURE)
TOP_K = tl.constexpr(table_words.TOP_K)
TOP_P = tl.constexpr(table_words.TOP_P)
MIN_P = tl.constexpr(table_words.MIN_P)
SEED_LOW = tl.constexpr(table_words.SEED_LOW)
SEED_HIGH = tl.constexpr(table_words.SEED_HIGH)
FREQUENCY = tl.constexpr(table_words.FREQUENCY)
PRESENCE = tl.constexpr(table_words.PRESENCE)
REPETITION = tl.constexpr(table_words.REPETITION)
STOP_FROM = tl.constexpr(table_words.STOP_FROM)
STOPS = tl.constexpr(table_words.STOPS)
BIASES = tl.constexpr(table_words.BIASES)
PENALTY_SLOT = tl.constexpr(table_words.PENALTY_SLOT)
LOGPROBS = tl.constexpr(table_words.LOGPROBS)
COUNT_BITS = tl.constexpr(table_words.IN_PROMPT - 1)
FIELDS = tl.constexpr(table_words.FIELDS)
# Fields of a part: the largest adjusted logit; the best score of the race relative to it; the weight of its tokens
# relative to it; the logit from which its candidates are complete; the largest raw logit (NaN if any is NaN) and the
# sum of exp(raw - largest).
TOP = tl.constexpr(0)
BEST = tl.constexpr(1)
MASS = tl.constexpr(2)
CUT = tl.constexpr(3)
RAW_TOP = tl.constexpr(4)
RAW_SUM = tl.constexpr(5)


# No kernel here has an argument named `params`: Triton's launcher keeps a variable of that name.


@triton.jit
def row_word(words, row, NUMBER: tl.constexpr):
    """Word NUMBER of a row of `words`, int32 [rows, ROW_WORDS] (`sampling_table`)."""
    return tl.load(words + row * WORDS + NUMBER, cache_modifier=FRESH)


@triton.jit
def row_number(words, row, NUMBER: tl.constexpr):
    """The same, as the fp32 whose bits it holds."""
    return row_word(words, row, NUMBER).to(tl.float32, bitcast=True)


@triton.jit
def random_stream(words, row, position):
    """The two 32-bit keys of (seed, position): splitmix64's finaliser, twice."""
    low = row_word(words, row, SEED_LOW).to(tl.uint32, bitcast=True).to(tl.uint64)
    high = row_word(words, row, SEED_HIGH).to(tl.uint32, bitcast=True).to(tl.uint64)
    golden = tl.full([], 0x9E3779B97F4A7C15, tl.uint64)
    x = ((high << 32) | low) * golden
    x += position.to(tl.uint64) * tl.full([], 0xD1B54A32D192ED03, tl.uint64) + tl.full(
        [], 0x2545F4914F6CDD1D, tl.uint64
    )
    for _ in tl.static_range(2):
        x = (x ^ (x >> 30)) * tl.full([], 0xBF58476D1CE4E5B9, tl.uint64)
        x = (x ^ (x >> 27)) * tl.full([], 0x94D049BB133111EB, tl.uint64)
        x = (x ^ (x >> 31)) + golden
    return (x & 0xFFFFFFFF).to(tl.uint32), (x >> 32).to(tl.uint32)


@triton.jit
def _mixed(h):
    h ^= h >> 16
    h *= tl.full([], 0x85EBCA6B, tl.uint32)
    h ^= h >> 13
    h *= tl.full([], 0xC2B2AE35, tl.uint32)
    return h ^ (h >> 16)


@triton.jit
def log_exponential(ids, low, high):
    """log of each id's exponential random number -log(1 - u), u = (hash + 0.5) / 2**32."""
    h = ids.to(tl.uint32) * tl.full([], 0x9E3779B1, tl.uint32)
    h = _mixed(_mixed(h ^ low) ^ high)
    u = (h.to(tl.float32) + 0.5) * 2.0**-32
    rest = ((h ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.0**-32  # 1 - u, exact where u rounds to 1
    # fp32 loses -log(1 - u) for small u, which is what wins races: take the series there.
    series = u * (1.0 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u * (1 / 5 + u * (1 / 6))))))
    return tl.log(tl.where(u < 0.0625, series, -tl.log(rest)))


@triton.jit
def order_key(value):
    """int32 keys in the order of fp32 values (-0 below +0, like equal ids apart from each other only in ties)."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
