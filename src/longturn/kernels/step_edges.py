"""The first kernel of a step: embedding and rotation factors."""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from longturn.kernels.dependent import FRESH, launch_options, wait_then_release


@triton.jit
def begin_row(
    row, token, position, embedding, inv_freq, x, cos, sin,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One row of `begin_step`, for its token (int64) and position."""
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


@triton.jit
def _begin(
    tokens, positions, embedding, inv_freq, x, cos, sin,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    wait_then_release(PDL)
    position = tl.load(positions + row, cache_modifier=FRESH)
    token = tl.load(tokens + row, mask=position >= 0, other=0, cache_modifier=FRESH).to(tl.int64)
    begin_row(row, token, position, embedding, inv_freq, x, cos, sin, WIDTH, BLOCK, D, HALF)


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
