"""The formula of each kernel family: bytes and operations in, nanoseconds out.

They take numbers or arrays of them, so that the fit and the model share one text. All of them grow with bytes and
operations and fall with rates: `smooth_max` is monotone in both of its times.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", float, NDArray[np.float64])

GEMM_SHARPNESS = 3.0
"""Overlap of streaming weights with computing, in projections: close to the longer of the two."""

_RAMP_NS = 1e5
"""Where `stream_exponent` pivots: a stream of 0.1 ms runs at the stated fraction whatever the exponent."""


def smooth_max(first: Number, second: Number, sharpness: float) -> Number:
    """(a^p + b^p)^(1/p): the sum for p = 1, the maximum for large p."""
    total: Number = (first**sharpness + second**sharpness) ** (1.0 / sharpness)
    return total


def gemm_ns(stream_ns: Number, compute_ns: Number) -> Number:
    """A matrix of weights that is read once, times some tokens. Both times at the rates that the kernel reaches."""
    return smooth_max(stream_ns, compute_ns, GEMM_SHARPNESS)


def experts_ns(
    stream_ns: Number,
    compute_ns: Number,
    activation_ns: Number,
    *,
    fixed_ns: float,
    stream: float,
    stream_exponent: float,
    compute: float,
    sharpness: float,
    uneven: float = 0.0,
) -> Number:
    """Routed experts of one layer on one rank.

    Args:
        stream_ns: bytes of the distinct experts at the peak memory bandwidth.
        compute_ns: operations at the peak rate.
        activation_ns: bytes moved with tokens, at the peak memory bandwidth.
        uneven: share by which computing takes longer because experts get unequally many tokens.
    """
    read: Number = _RAMP_NS * (stream_ns / _RAMP_NS) ** stream_exponent / stream
    return fixed_ns + smooth_max(read, compute_ns * (1.0 + uneven) / compute, sharpness) + activation_ns


def attended(end: Number, limit: float) -> Number:
    """Sum over positions 1..end of min(position, limit): tokens attended to by a prompt of `end` tokens."""
    low = (end + limit - abs(end - limit)) / 2.0
    return low * (low + 1.0) / 2.0 + (end - low) * limit


def pairs(end: Number) -> Number:
    """Sum over positions 1..end of the position: what attention without a limit reads."""
    return end * (end + 1.0) / 2.0


def distinct_keys(end: float, tokens: int, limit: float) -> float:
    """Keys, of `end`, in the blocks that `tokens` tokens choose, each as many as hold `limit` keys and independently of
    the others: chance leaves fewer out the more there are."""
    return end if end <= limit else end * (1.0 - (1.0 - limit / end) ** tokens)


def projection_elements(
    hidden: Number, heads: Number, kv_heads: Number, index_heads: Number, head_dim: int, index_dim: int
) -> Number:
    """Weights of one attention layer on one rank: query, key, value, index query, index key and output. The index key
    has one head, which every rank holds; a layer without an index has `index_dim` 0."""
    rows = (heads + 2.0 * kv_heads) * head_dim + (index_heads + 1.0) * index_dim
    return (rows + heads * head_dim) * hidden


def index_operations(scored: Number, index_heads: Number, index_dim: int) -> Number:
    """FLOP for scoring pairs of a query token and an index key."""
    return 2.0 * scored * index_heads * index_dim


def attend_operations(attended_pairs: Number, heads: Number, head_dim: int) -> Number:
    """FLOP for scores and weighted sum over pairs of a query token and a key."""
    return 4.0 * attended_pairs * heads * head_dim
