"""Matrix times a few tokens: y = residual + W norm(x), for 1 to 64 tokens; W plain or quantised (`packed_weights`).

Four kernels. `_gemv` is for one token (or a few, each reading W again, from L2): each program holds whole rows of W in
registers and reads them *before* it waits for its predecessor, so that under programmatic dependent launch the weights
are on their way while the kernel before still runs. It folds Gemma's normalisation into the product: every program
reads whole rows of x anyway, so the sum of squares is free, and its root divides the result at the end. `_dot` is for
more tokens, which are the M side of a tensor-core tile; there the fold costs more than a launch, since x then passes
through registers on its way to shared memory. `_row_tiles` has the weights on that side instead, which is what
quantised ones need: they pass through registers anyway. `_row_slices` is for plain matrices of few rows, where one
tile a multiprocessor leaves its warps little to do. On a Hopper card plain matrices that fit on the chip go to
linear_ahead.py, and quantised ones that meet one token to packed_linear.py, eight at most to packed_linear_rows.py.
"""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from longturn.kernels.dependent import FRESH, launch_options, wait_then_release
from longturn.kernels.linear_ahead import AheadPlan, ahead_pays, ahead_plan, linear_ahead
from longturn.kernels.norm import add_norm
from longturn.kernels.packed_linear import StreamPlan, stream_linear, streams
from longturn.kernels.packed_linear_rows import ring_linear, ring_plan
from longturn.kernels.packed_weights import PackedWeight, WeightFormat, as_packed
from longturn.kernels.packed_weights_decode import decode, load_scales, part_columns


@triton.jit
def matvec(
    words, scales, row_scales, row, row_ok, x, norm_weight, eps,
    K: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr, STAGES: tl.constexpr,
    WAIT: tl.constexpr, PDL: tl.constexpr, PARTS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Rows `row` (int64 [R]) of a matrix times norm(x): fp32 [R]. Waits for the predecessor if WAIT.

    A row that is one tile is read into registers before the wait. Longer rows are many bytes, where what counts is
    loads in flight, not the head start: they go through a pipeline in shared memory, after the wait.
    """
    W: tl.constexpr = BLOCK_K // PARTS
    word = tl.arange(0, W)
    at = words + row[:, None] * (K // PARTS) + word[None, :]
    if PARTS > 1:
        factor = tl.load(row_scales + row, mask=row_ok, other=0.0)
    if K == BLOCK_K:
        tile = tl.load(at, mask=row_ok[:, None], other=0, eviction_policy="evict_first")
        scale = load_scales(scales, row, 0, row_ok, W, PARTS, K)
        if NORM and PARTS == 1:
            gain = tl.load(norm_weight + word).to(tl.float32) + 1.0
        if WAIT:
            wait_then_release(PDL)
        parts = decode(tile, scale, PARTS, ASM, True)
        total = tl.zeros([row.shape[0], W], dtype=tl.float32)
        square = tl.zeros([W], dtype=tl.float32)
        for j in tl.static_range(PARTS):
            column = part_columns(word, j, PARTS)
            value = tl.load(x + column, cache_modifier=FRESH).to(tl.float32)
            if NORM:
                square += value * value
                if PARTS > 1:
                    gain = tl.load(norm_weight + column).to(tl.float32) + 1.0
                value = value * gain
            total += parts[j].to(tl.float32) * value[None, :]
    else:
        if WAIT:
            wait_then_release(PDL)
        total = tl.zeros([row.shape[0], W], dtype=tl.float32)
        square = tl.zeros([W], dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            tile = tl.load(at + k // PARTS, mask=row_ok[:, None], other=0)
            parts = decode(tile, load_scales(scales, row, k, row_ok, W, PARTS, K), PARTS, ASM, True)
            for j in tl.static_range(PARTS):
                column = k + part_columns(word, j, PARTS)
                value = tl.load(x + column, cache_modifier=FRESH).to(tl.float32)
                if NORM:
                    square += value * value
                    value = value * (tl.load(norm_weight + column).to(tl.float32) + 1.0)
                total += parts[j].to(tl.float32) * value[None, :]
    y = tl.sum(total, axis=1)
    if PARTS > 1:
        y = y * factor
    if NORM:
        y = y * tl.rsqrt(tl.sum(square, axis=0) / K + eps)
    return y


@triton.jit
def _gemv(
    x, norm_weight, words, scales, row_scales, residual, out, rows, eps,
    K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
    NORM: tl.constexpr, RESIDUAL: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
    PARTS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1).to(tl.int64)
    y = matvec(
        words, scales, row_scales, row.to(tl.int64), row < rows, x + token * K, norm_weight, eps,
        K, BLOCK_K, NORM, STAGES, True, PDL, PARTS, ASM,
    )  # fmt: skip
    to = token * rows + row
    if RESIDUAL:
        y += tl.load(residual + to, mask=row < rows, other=0.0, cache_modifier=FRESH).to(tl.float32)
    tl.store(out + to, y.to(out.dtype.element_ty), mask=row < rows)


@triton.jit
def rows_dot(
    words, scales, row_scales, row, row_ok, x, token, ok,
    K: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Rows `row` (int64 [R]) of a quantised matrix times rows `token` (int64 [T]) of x [*, K]: fp32 [R, T].

    Weights are the M side of the tensor-core tile: they go from shared memory through registers, where their codes
    become fp16, into the product, each once; x is the side that stays in shared memory, if it is fp16 (`as_operand`).
    """
    W: tl.constexpr = BLOCK_K // PARTS
    word = tl.arange(0, W)
    at = words + row[:, None] * (K // PARTS) + word[None, :]
    factor = tl.load(row_scales + row, mask=row_ok, other=0.0)
    x_row = x + token[:, None] * K
    total = tl.zeros([row.shape[0], token.shape[0]], dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        tile = tl.load(at + k // PARTS, mask=row_ok[:, None], other=0)
        parts = decode(tile, load_scales(scales, row, k, row_ok, W, PARTS, K), PARTS, ASM)
        for j in tl.static_range(PARTS):
            value = tl.load(x_row + (k + part_columns(word, j, PARTS))[None, :], mask=ok[:, None], other=0.0)
            total = tl.dot(parts[j], tl.trans(value.to(parts[j].dtype)), total, input_precision="ieee")
    return total * factor[:, None]


@triton.jit
def _row_tiles(
    x, words, scales, row_scales, residual, out, tokens, rows,
    K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    RESIDUAL: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr, PARTS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    wait_then_release(PDL)
    total = rows_dot(
        words, scales, row_scales, row.to(tl.int64), row < rows, x, token.to(tl.int64), token < tokens,
        K, BLOCK_K, STAGES, PARTS, ASM,
    )  # fmt: skip
    at = token[None, :].to(tl.int64) * rows + row[:, None]
    ok = (token < tokens)[None, :] & (row < rows)[:, None]
    if RESIDUAL:
        total += tl.load(residual + at, mask=ok, other=0.0, cache_modifier=FRESH).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=ok)


@triton.jit
def _row_slices(
    x, weight, residual, out, tokens, rows,
    K: tl.constexpr, SLICES: tl.constexpr, W: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    RESIDUAL: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SLICES is the number of warps: each multiplies its own W of every turn's columns, for all rows and tokens of the
    tile, and their sums are added at the end, in one order. So a few rows keep several warps busy."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    column = (tl.arange(0, SLICES) * W)[:, None, None] + tl.arange(0, W)[None, None, :]
    wait_then_release(PDL)
    w_at = weight + row[None, :, None].to(tl.int64) * K + column
    x_at = x + token[None, :, None].to(tl.int64) * K + column
    total = tl.zeros([SLICES, ROWS, TOKENS], dtype=tl.float32)
    for k in tl.range(0, K, SLICES * W, num_stages=STAGES):
        tile = tl.load(w_at + k, mask=(row < rows)[None, :, None], other=0.0)
        value = tl.load(x_at + k, mask=(token < tokens)[None, :, None], other=0.0)
        total = tl.dot(tile, tl.permute(value, [0, 2, 1]), total, input_precision="ieee")
    y = tl.sum(total, axis=0)
    at = token[None, :].to(tl.int64) * rows + row[:, None]
    ok = (token < tokens)[None, :] & (row < rows)[:, None]
    if RESIDUAL:
        y += tl.load(residual + at, mask=ok, other=0.0, cache_modifier=FRESH).to(tl.float32)
    tl.store(out + at, y.to(out.dtype.element_ty), mask=ok)


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
    """Rows of W and columns of a tile, warps, stages; 0 leaves it to shape and format. `gemv_tokens` is the register
    kernel's limit. Above it quantised weights use `tile_*`, plain ones `dot_*`, or 16 rows and a slice of columns a
    warp with `slices`. Fewer than four warps give up warp-group products, which take 64 rows at least and make four
    warps wait for each other."""

    rows: int = 0
    warps: int = 4
    block: int = 0
    dot_rows: int = 0
    dot_block: int = 256
    dot_stages: int = 0
    gemv_tokens: int = 1
    tile_rows: int = 64
    tile_block: int = 0
    tile_stages: int = 3
    slices: bool = False
    ahead: bool | None = None
    """Whether weights wait in shared memory (linear_ahead.py) where they can; None leaves it to what was measured."""
    stream: bool = True
    """Whether quantised weights of one token are streamed (packed_linear.py) where they can be."""
    ring: bool = True
    """Whether those of two to eight tokens are (packed_linear_rows.py), likewise."""
    stream_slices: int = 0
    """How those of one token are then dealt out (`StreamPlan`); 0 leaves it to shape and format."""
    stream_row_warps: int = 1
    stream_words: int = 128

    @staticmethod
    def before_attention(tokens: int, max_blocks: int) -> LinearPlan:
        """For the projection before sparse attention over up to so many blocks."""
        return LinearPlan(
            ahead=True if tokens == 1 and max_blocks <= 64 else None, dot_stages=4 if 16 < tokens <= 32 else 0
        )


def small_linear(
    x: Tensor, weight: Tensor | PackedWeight, out: Tensor, *, norm_weight: Tensor | None = None,
    normed: Tensor | None = None, residual: Tensor | None = None, eps: float = 1e-6, plan: LinearPlan | None = None,
    exact: bool = False, pdl: bool = False,
) -> None:  # fmt: skip
    """out = residual + weight @ norm(x), into `out` [T, N] (fp32 or bf16); products accumulate in fp32.

    x [T, K] contiguous (bf16 or fp16 on a GPU where the weight is quantised) and weight [N, K], contiguous or packed;
    norm_weight [K] applies Gemma's normalisation to x first; residual [T, N] may be `out` itself. Up to
    `plan.gemv_tokens` tokens, or all if `exact`, use the register kernel, which rounds nothing between norm and
    product (a router needs that: fp32 weights on tensor cores are tf32). Above it, x is normalised by a launch of its
    own into `normed` [T, K] of the weight's type (bf16 for quantised weights, which write fp16 there). fp16 x that was
    never bf16 is what quantised weights take without a conversion in every program. Where `normed` is given and a
    quantised row is longer than a register tile, one token takes that way too.
    """
    plan = plan or LinearPlan()
    tokens, width = x.shape
    w = as_packed(weight)
    plain = w.format is WeightFormat.PLAIN
    n = w.shape[0]
    # An unused pointer argument still has to be a tensor.
    residual_arg = x if residual is None else residual
    flags = {"RESIDUAL": residual is not None, "PDL": pdl, **launch_options(pdl)}
    form = {"PARTS": int(w.format), "ASM": w.words.is_cuda}
    if tokens == 1 and not exact and (ahead := _ahead(plan, x, w, norm_weight is not None)) is not None:
        linear_ahead(x, w.words, out, norm_weight, residual, eps, ahead, flags)
        return
    if not exact and (stream := _stream(plan, x, w)) is not None:
        stream_linear(x, w, out, norm_weight, residual, eps, stream, flags)
        return
    # Long quantised rows decode faster inside the tensor cores, and folding the norm costs more than its own launch.
    short = plain or packed_block(width, w) == width or (norm_weight is not None and normed is None)
    if exact or (tokens <= plan.gemv_tokens and short):
        rows = plan.rows or (4 if plain else 8)
        _gemv[(triton.cdiv(n, rows), tokens)](
            x, x if norm_weight is None else norm_weight, w.words, w.scales, w.row_scales, residual_arg, out, n, eps,
            K=width, BLOCK_K=plan.block or packed_block(width, w), ROWS=rows, NORM=norm_weight is not None,
            STAGES=3, num_warps=plan.warps, **form, **flags,
        )  # fmt: skip
        return
    if norm_weight is not None:
        if normed is None:
            raise ValueError("small_linear needs `normed` above plan.gemv_tokens tokens")
        normed = normed if plain else as_operand(normed)
        add_norm(x, norm_weight, normed, eps=eps, pdl=pdl)
        x = normed
    if (ahead := _ahead(plan, x, w, norm=False)) is not None:
        linear_ahead(x, w.words, out, None, residual, eps, ahead, flags)
        return
    if plan.ring and (ring := ring_plan(x, w)) is not None:
        ring_linear(x, w, out, residual, ring, flags)
        return
    block_m = 16 if tokens <= 16 else 32
    if not plain:
        if tokens <= 8 and plan.warps < 4:
            block_m = 8  # what the tensor cores take where they are not driven by groups of four warps
        # With one program a multiprocessor or fewer, it takes longer rows to have enough bytes in flight. If x has to
        # be converted, there are no registers for them.
        few = triton.cdiv(n, plan.tile_rows) <= 132 and tokens <= 16 and x.dtype == torch.float16
        block = plan.tile_block or (512 if few else 256)
        _row_tiles[(triton.cdiv(n, plan.tile_rows), triton.cdiv(tokens, block_m))](
            x, w.words, w.scales, w.row_scales, residual_arg, out, tokens, n,
            K=width, BLOCK_K=largest_power_of_two(width, block), ROWS=plan.tile_rows, TOKENS=block_m,
            STAGES=plan.tile_stages, num_warps=plan.warps, **form, **flags,
        )  # fmt: skip
        return
    if plan.slices:
        columns = largest_power_of_two(width, 64)
        _row_slices[(triton.cdiv(n, 16), triton.cdiv(tokens, block_m))](
            x, w.words, residual_arg, out, tokens, n,
            K=width, SLICES=largest_power_of_two(width, columns * plan.warps) // columns, W=columns, ROWS=16,
            TOKENS=block_m, STAGES=4, num_warps=plan.warps, **flags,
        )  # fmt: skip
        return
    small = n <= 4096
    dot_rows = plan.dot_rows or (16 if small else 32)
    _dot[(triton.cdiv(n, dot_rows), triton.cdiv(tokens, block_m))](
        x, w.words, residual_arg, out, tokens, n,
        K=width, BLOCK_K=largest_power_of_two(width, plan.dot_block), ROWS=dot_rows, TOKENS=block_m,
        STAGES=plan.dot_stages or (5 if small and tokens <= 16 else 3), num_warps=plan.warps, **flags,
    )  # fmt: skip


def as_operand(buffer: Tensor) -> Tensor:
    """The same memory in the type that decoded weights are multiplied by: fp16 where the buffer is bf16."""
    return buffer.view(torch.float16) if buffer.dtype == torch.bfloat16 else buffer


def _ahead(plan: LinearPlan, x: Tensor, weight: PackedWeight, norm: bool) -> AheadPlan | None:
    if plan.ahead is False or weight.format is not WeightFormat.PLAIN or (plan.slices and plan.ahead is None):
        return None
    held = ahead_plan(x, weight.words, norm)
    return held if held is not None and (plan.ahead or ahead_pays(x.shape[0], held)) else None


def _stream(plan: LinearPlan, x: Tensor, weight: PackedWeight) -> StreamPlan | None:
    if not plan.stream or not streams(x, weight):
        return None
    stream = StreamPlan.of(weight.format, weight.shape[0])
    if plan.stream_slices:
        stream = StreamPlan(plan.stream_slices, plan.stream_row_warps, plan.stream_words)
    return stream if stream.fits(weight.format, *weight.shape) else None


def row_block(width: int) -> int:
    """Columns of a register tile: a whole row if it is a power of two up to 2,048, else pieces for the pipeline."""
    whole = width & -width
    return width if whole == width and width <= 2048 else min(whole, 1024)


def packed_block(width: int, weight: PackedWeight) -> int:
    """`row_block` for a packed weight: longer pieces, so that a row's piece has as many bytes."""
    if weight.format is WeightFormat.PLAIN or width & -width == width <= 2048:
        return row_block(width)
    return largest_power_of_two(width, 1024 * int(weight.format))


def largest_power_of_two(width: int, most: int) -> int:
    """Largest power of two that divides `width` and is not above `most`."""
    return min(width & -width, most)
