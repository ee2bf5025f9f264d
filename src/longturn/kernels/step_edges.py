"""The first and last kernels of a step: embedding and rotation factors, the most likely token, the next position."""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from longturn.kernels.dependent import FRESH, launch_options, wait_then_release


@triton.jit
def _begin(
    tokens, positions, embedding, inv_freq, x, cos, sin,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    wait_then_release(PDL)
    position = tl.load(positions + row, cache_modifier=FRESH)
    token = tl.load(tokens + row, mask=position >= 0, other=0, cache_modifier=FRESH).to(tl.int64)
    column = tl.arange(0, BLOCK)
    for k in tl.static_range(0, WIDTH, BLOCK):
        tl.store(x + row * WIDTH + k + column, tl.load(embedding + token * WIDTH + k + column))
    d = tl.arange(0, D)
    turns = tl.where(d < HALF, d, d - HALF)
    rotated = d < 2 * HALF
    # fp32 angle, as the published models compute it; the reduction of angles near 1e5 is the library's exact one.
    angle = position.to(tl.float32) * tl.load(inv_freq + turns, mask=rotated, other=0.0)
    sine = tl.sin(angle)
    tl.store(cos + row * D + d, tl.where(rotated, tl.cos(angle), 1.0))
    tl.store(sin + row * D + d, tl.where(d < HALF, -sine, tl.where(rotated, sine, 0.0)))


def begin_step(
    tokens: Tensor, positions: Tensor, embedding: Tensor, inv_freq: Tensor, x: Tensor, cos: Tensor, sin: Tensor,
    *, pdl: bool = False,
) -> None:  # fmt: skip
    """x[r] = embedding[tokens[r]], and the rotation factors of positions[r] as `norm_rope_heads` wants them.

    tokens, positions int32 [rows] (a padded row has position -1 and reads token 0); inv_freq fp32 [rotary_dim / 2];
    x [rows, n] of the embedding's dtype; cos, sin fp32 [rows, head_dim].
    """
    width, head_dim = x.shape[1], cos.shape[1]
    _begin[(x.shape[0],)](
        tokens, positions, embedding, inv_freq, x, cos, sin,
        WIDTH=width, BLOCK=width & -width, D=head_dim, HALF=inv_freq.shape[0], num_warps=4, PDL=pdl,
        **launch_options(pdl),
    )  # fmt: skip


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
