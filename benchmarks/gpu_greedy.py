"""The end of the measuring stands' steps: the most likely token, and the next position. The engine samples instead
(`longturn.kernels.sampling`)."""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from longturn.kernels.dependent import FRESH, launch_options, wait_then_release


@triton.jit
def _greedy_parts(logits, values, indices, vocab, PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    part = tl.program_id(0)
    row = tl.program_id(1)
    wait_then_release(PDL)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    where = tl.full([BLOCK], 2147483647, tl.int32)
    for start in tl.range(part * BLOCK, vocab, PARTS * BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(logits + row.to(tl.int64) * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        better = value > best
        best = tl.where(better, value, best)
        where = tl.where(better, at, where)
    top = tl.max(best, axis=0)
    tl.store(values + row * PARTS + part, top)
    tl.store(indices + row * PARTS + part, tl.min(tl.where(best == top, where, 2147483647), axis=0))


@triton.jit
def _greedy_finish(values, indices, tokens, positions, PARTS: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0)
    wait_then_release(PDL)
    part = tl.arange(0, PARTS)
    value = tl.load(values + row * PARTS + part, cache_modifier=FRESH)
    index = tl.load(indices + row * PARTS + part, cache_modifier=FRESH)
    best = tl.min(tl.where(value == tl.max(value, axis=0), index, 2147483647), axis=0)
    best = tl.where(best == 2147483647, 0, best)  # nothing but NaN: a token that exists, never a wild embedding row
    position = tl.load(positions + row, cache_modifier=FRESH)
    tl.store(tokens + row, best, mask=position >= 0)
    tl.store(positions + row, position + 1, mask=position >= 0)


def greedy_step(
    logits: Tensor, values: Tensor, indices: Tensor, tokens: Tensor, positions: Tensor, *, pdl: bool = False
) -> None:
    """tokens[r] = the first most likely token of logits [rows, vocab]; positions[r] += 1. Padded rows (-1) keep theirs.

    Scratch: values fp32 and indices int32, both [rows, parts], parts a power of two.
    """
    rows, vocab = logits.shape
    parts = values.shape[1]
    more = {"PARTS": parts, "PDL": pdl, "num_warps": 4, **launch_options(pdl)}
    _greedy_parts[(parts, rows)](logits, values, indices, vocab, BLOCK=1024, **more)
    _greedy_finish[(rows,)](values, indices, tokens, positions, **more)
