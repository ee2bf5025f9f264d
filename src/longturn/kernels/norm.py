"""Residual addition and Gemma normalisation of whole rows."""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from longturn.kernels.dependent import FRESH, launch_options, wait_then_release


@triton.jit
def _add_norm(x, delta, weight, out, eps, N: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * N
    column = tl.arange(0, BLOCK)
    wait_then_release(PDL)
    square = tl.zeros([BLOCK], dtype=tl.float32)
    for k in tl.static_range(0, N, BLOCK):
        value = tl.load(x + row + k + column, cache_modifier=FRESH)
        if ADD:
            added = value.to(tl.float32) + tl.load(delta + row + k + column, cache_modifier=FRESH).to(tl.float32)
            value = added.to(value.dtype)
            tl.store(x + row + k + column, value)
        wide = value.to(tl.float32)
        square += wide * wide
    scale = tl.rsqrt(tl.sum(square, axis=0) / N + eps)
    # Where the row is one block, the compiler keeps it in registers; otherwise it comes back from L2.
    for k in tl.static_range(0, N, BLOCK):
        if N != BLOCK:
            wide = tl.load(x + row + k + column, cache_modifier=FRESH).to(tl.float32)
        result = wide * scale * (tl.load(weight + k + column).to(tl.float32) + 1.0)
        tl.store(out + row + k + column, result.to(out.dtype.element_ty))


def add_norm(
    x: Tensor, weight: Tensor, out: Tensor, *, delta: Tensor | None = None, eps: float = 1e-6, pdl: bool = False
) -> None:
    """out = norm(x) * (1 + weight), after x += delta in place if `delta` is given; all [rows, n], statistics in fp32.

    The sum is rounded to the type of x before it is normalised, as the next reader of x will see it.
    """
    n = x.shape[1]
    _add_norm[(x.shape[0],)](
        x, x if delta is None else delta, weight, out, eps,
        N=n, BLOCK=min(n & -n, 4096), ADD=delta is not None, num_warps=4, PDL=pdl, **launch_options(pdl),
    )  # fmt: skip
