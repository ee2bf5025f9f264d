"""Matrix times a few tokens: y = residual + W norm(x), for 1 to 64 tokens.

Two kernels. `_gemv` is for one token (or a few, each reading W again, from L2): each program holds whole rows of W in
registers and reads them *before* it waits for its predecessor, so that under programmatic dependent launch the weights
are on their way while the kernel before still runs. It folds Gemma's normalisation into the product: every program
reads whole rows of x anyway, so the sum of squares is free, and its root divides the result at the end. `_dot` is for
more tokens, which are the M side of a tensor-core tile; there the fold costs more than a launch, since x then passes
through registers on its way to shared memory.
"""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from longturn.kernels.dependent import FRESH, launch_options, wait_then_release
from longturn.kernels.norm import add_norm


@triton.jit
def matvec(
    at, row_ok, x, norm_weight, eps,
    K: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr, STAGES: tl.constexpr,
    WAIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rows of W at pointers `at` [R, BLOCK_K] times norm(x): fp32 [R]. Waits for the predecessor if WAIT.

    A row that is one tile is read into registers before the wait. Longer rows are many bytes, where what counts is
    loads in flight, not the head start: they go through a pipeline in shared memory, after the wait.
    """
    column = tl.arange(0, BLOCK_K)
    if K == BLOCK_K:
        tile = tl.load(at, mask=row_ok, other=0.0, eviction_policy="evict_first").to(tl.float32)
        if NORM:
            gain = tl.load(norm_weight + column).to(tl.float32) + 1.0
        if WAIT:
            wait_then_release(PDL)
        value = tl.load(x + column, cache_modifier=FRESH).to(tl.float32)
        if NORM:
            square = value * value
            value = value * gain
        total = tile * value[None, :]
    else:
        if WAIT:
            wait_then_release(PDL)
        total = tl.zeros([at.shape[0], BLOCK_K], dtype=tl.float32)
        square = tl.zeros([BLOCK_K], dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            tile = tl.load(at + k, mask=row_ok, other=0.0).to(tl.float32)
            value = tl.load(x + k + column, cache_modifier=FRESH).to(tl.float32)
            if NORM:
                square += value * value
                value = value * (tl.load(norm_weight + k + column).to(tl.float32) + 1.0)
            total += tile * value[None, :]
    y = tl.sum(total, axis=1)
    if NORM:
        y = y * tl.rsqrt(tl.sum(square, axis=0) / K + eps)
    return y


@triton.jit
def _gemv(
    x, norm_weight, weight, residual, out, rows, eps,
    K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1).to(tl.int64)
    at = weight + row[:, None].to(tl.int64) * K + tl.arange(0, BLOCK_K)[None, :]
    y = matvec(at, (row < rows)[:, None], x + token * K, norm_weight, eps, K, BLOCK_K, NORM, STAGES, True, PDL)
    to = token * rows + row
    if RESIDUAL:
        y += tl.load(residual + to, mask=row < rows, other=0.0, cache_modifier=FRESH).to(tl.float32)
    tl.store(out + to, y.to(out.dtype.element_ty), mask=row < rows)


@triton.jit
def _dot(
    x, weight, residual, out, tokens, rows,
    K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    RESIDUAL: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, BLOCK_K)
    wait_then_release(PDL)
    w_at = weight + row[:, None].to(tl.int64) * K + column[None, :]
    x_at = x + token[:, None].to(tl.int64) * K + column[None, :]
    total = tl.zeros([TOKENS, ROWS], dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        tile = tl.load(w_at + k, mask=(row < rows)[:, None], other=0.0)
        value = tl.load(x_at + k, mask=(token < tokens)[:, None], other=0.0)
        total = tl.dot(value, tl.trans(tile), total, input_precision="ieee")
    at = token[:, None].to(tl.int64) * rows + row[None, :]
    ok = (token < tokens)[:, None] & (row < rows)[None, :]
    if RESIDUAL:
        total += tl.load(residual + at, mask=ok, other=0.0, cache_modifier=FRESH).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=ok)


@dataclass(frozen=True)
class LinearPlan:
    """Rows of W and columns of a tile, warps, stages; 0 leaves it to the shape. `gemv_tokens` is the register kernel's
    limit."""

    rows: int = 4
    warps: int = 4
    block: int = 0
    dot_rows: int = 0
    dot_block: int = 256
    dot_stages: int = 3
    gemv_tokens: int = 1


def small_linear(
    x: Tensor, weight: Tensor, out: Tensor, *, norm_weight: Tensor | None = None, normed: Tensor | None = None,
    residual: Tensor | None = None, eps: float = 1e-6, plan: LinearPlan | None = None, exact: bool = False,
    pdl: bool = False,
) -> None:  # fmt: skip
    """out = residual + weight @ norm(x), into `out` [T, N] (fp32 or bf16); products accumulate in fp32.

    x [T, K] and weight [N, K] contiguous; norm_weight [K] applies Gemma's normalisation to x first; residual [T, N]
    may be `out` itself. Up to `plan.gemv_tokens` tokens, or all if `exact`, use the register kernel, which rounds
    nothing between norm and product (a router needs that: fp32 weights on tensor cores are tf32). Above it, x is
    normalised by a launch of its own into `normed` [T, K] of the weight's type.
    """
    plan = plan or LinearPlan()
    tokens, width = x.shape
    n = weight.shape[0]
    # An unused pointer argument still has to be a tensor.
    residual_arg = x if residual is None else residual
    flags = {"RESIDUAL": residual is not None, "PDL": pdl, **launch_options(pdl)}
    if tokens <= plan.gemv_tokens or exact:
        _gemv[(triton.cdiv(n, plan.rows), tokens)](
            x, x if norm_weight is None else norm_weight, weight, residual_arg, out, n, eps,
            K=width, BLOCK_K=plan.block or row_block(width), ROWS=plan.rows, NORM=norm_weight is not None, STAGES=3,
            num_warps=plan.warps, **flags,
        )  # fmt: skip
        return
    if norm_weight is not None:
        if normed is None:
            raise ValueError("small_linear needs `normed` above plan.gemv_tokens tokens")
        add_norm(x, norm_weight, normed, eps=eps, pdl=pdl)
        x = normed
    block_m = 16 if tokens <= 16 else 32
    dot_rows = plan.dot_rows or (16 if n <= 4096 else 32)
    _dot[(triton.cdiv(n, dot_rows), triton.cdiv(tokens, block_m))](
        x, weight, residual_arg, out, tokens, n,
        K=width, BLOCK_K=largest_power_of_two(width, plan.dot_block), ROWS=dot_rows, TOKENS=block_m,
        STAGES=plan.dot_stages, num_warps=plan.warps, **flags,
    )  # fmt: skip


def row_block(width: int) -> int:
    """Columns of a register tile: a whole row if it is a power of two up to 2,048, else pieces for the pipeline."""
    whole = width & -width
    return width if whole == width and width <= 2048 else min(whole, 1024)


def largest_power_of_two(width: int, most: int) -> int:
    """Largest power of two that divides `width` and is not above `most`."""
    return min(width & -width, most)
