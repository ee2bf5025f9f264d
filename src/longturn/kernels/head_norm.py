"""Per-head Gemma normalisation and rotary embedding, as a piece that several kernels do in registers."""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from longturn.kernels.dependent import FRESH


@triton.jit
def norm_rope_heads(heads_at, head_ok, norm_weight, cos_row, sin_row, eps, D: tl.constexpr, HALF: tl.constexpr):
    """Normalise and rotate heads: fp32 [H, D] of the rows at pointers `heads_at` [H].

    cos_row and sin_row point at this token's D factors: cos 1 and sin 0 where nothing rotates, sin negative in the
    first half, so that y = x * cos + partner * sin with partner HALF columns away. Rows where `head_ok` is false give
    0. Heads and factors are read past L1, since some callers read them before their wait (see dependent.py).
    """
    d = tl.arange(0, D)
    partner = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))
    ok = head_ok[:, None]
    x = tl.load(heads_at[:, None] + d[None, :], mask=ok, other=0.0, cache_modifier=FRESH).to(tl.float32)
    y = tl.load(heads_at[:, None] + partner[None, :], mask=ok, other=0.0, cache_modifier=FRESH).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
    x = x * scale * (tl.load(norm_weight + d).to(tl.float32) + 1.0)[None, :]
    y = y * scale * (tl.load(norm_weight + partner).to(tl.float32) + 1.0)[None, :]
    return (
        x * tl.load(cos_row + d, cache_modifier=FRESH)[None, :]
        + y * tl.load(sin_row + d, cache_modifier=FRESH)[None, :]
    )
