"""A quantised matrix times one token, y = residual + W norm(x), its words streamed from memory straight into
tensor-core operands.

What other kernels do through shared memory (copy, `ldmatrix`, barriers of the program) leaves one token far from the
memory's bandwidth. Here a lane loads 16 bytes of a row at a time, in the very places where the product's left operand
wants them: a lane's words may be any of the row's, as long as x is laid out likewise, which happens once, in shared
memory. No barrier is left in the loop, and the first words are on their way before the program waits for its
predecessor.

A program has slices * row warps: each multiplies 16 rows and one slice of their columns, a chunk of words at a time,
with two chunks in registers. The eight columns of the tensor cores' tile are the same token.

Written in Gluon, Triton's lower layer, which its interpreter does not run: `_row_tiles` (small_linear.py) is the form
that it checks, and `benchmarks/gpu_formats.py decode` compares every code of both on a card.
"""

# Functions under gluon.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from longturn.kernels.dependent_gluon import wait_then_release
from longturn.kernels.packed_weights import GROUP, SCALE_BITS, PackedWeight, WeightFormat
from longturn.kernels.packed_weights_decode import ASSEMBLY

_PIECE_VALUES = 1024
PIECE = gl.constexpr(_PIECE_VALUES)
"""Values of x that a program lays out at a time."""
_PROGRAMS = 132
"""Multiprocessors of an H200 or H100 SXM; on a card with fewer, some programs wait for a place, no harm else."""
_LEAST_WORDS = 64
"""What a lane of an operand takes 16 bytes a row of, twice."""
_NVFP4, _MXFP8 = WeightFormat.NVFP4, WeightFormat.MXFP8
_WORDS = {int(form): GROUP[form] // int(form) for form in (_NVFP4, _MXFP8)}
# Factors travel as 32-bit numbers of two equal halves, so that a byte becomes the factors of two words by one product.
_STEP = {int(form): SCALE_BITS[form][0] * 0x10001 for form in (_NVFP4, _MXFP8)}
_BASE = {int(form): SCALE_BITS[form][1] * 0x10001 for form in (_NVFP4, _MXFP8)}
_NVFP4_ASM = gl.constexpr(ASSEMBLY[_NVFP4][0])
_MXFP8_ASM = gl.constexpr(ASSEMBLY[_MXFP8][0])


@gluon.constexpr_function
def _words_of_group(parts):
    return _WORDS[int(parts)]


@gluon.constexpr_function
def _scale_step(parts):
    return _STEP[int(parts)]


@gluon.constexpr_function
def _scale_base(parts):
    return _BASE[int(parts)]


@gluon.constexpr_function
def product_layout(slices, row_warps):
    """Of sums [slices, rows, 8]."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[slices, row_warps, 1], instr_shape=[1, 16, 8])


@gluon.constexpr_function
def by_group(linear, group):
    """Where words lie, as [slices, rows, groups, words of a group]."""

    def cut(bases):
        return [[s, r, w // group, w % group] for s, r, w in bases]

    slices, rows, words = linear.shape
    return gl.DistributedLinearLayout(
        cut(linear.reg_bases), cut(linear.lane_bases), cut(linear.warp_bases), cut(linear.block_bases),
        [slices, rows, words // group, group],
    )  # fmt: skip


@gluon.jit
def _pointers(
    words, scales, row, K: gl.constexpr, S: gl.constexpr, R: gl.constexpr, CW: gl.constexpr, PARTS: gl.constexpr,
    LEFT: gl.constexpr,
):  # fmt: skip
    """Pointers to the first chunk of each slice of rows `row` (int64 [S, R]): words [S, R, CW] where the left operand
    wants them, and scales [S, R, groups of a chunk] where their words are."""
    GW: gl.constexpr = _words_of_group(PARTS)
    s = gl.arange(0, S, gl.SliceLayout(1, gl.SliceLayout(2, LEFT))).to(gl.int64)
    w = gl.arange(0, CW, gl.SliceLayout(0, gl.SliceLayout(1, LEFT)))
    begin = gl.convert_layout(row, gl.SliceLayout(2, LEFT)) * (K // PARTS) + (s * (K // PARTS // S))[:, None]
    word_at = words + begin[:, :, None] + w[None, None, :]
    groups: gl.constexpr = gl.SliceLayout(3, by_group(gl.to_linear_layout(LEFT, [S, R, CW]), GW))
    s = gl.arange(0, S, gl.SliceLayout(1, gl.SliceLayout(2, groups))).to(gl.int64)
    g = gl.arange(0, CW // GW, gl.SliceLayout(0, gl.SliceLayout(1, groups)))
    begin = (
        gl.convert_layout(row, gl.SliceLayout(2, groups)) * (K // PARTS // GW) + (s * (K // PARTS // GW // S))[:, None]
    )
    return word_at, scales + begin[:, :, None] + g[None, None, :]


@gluon.jit
def _load_chunk(word_at, scale_at, i, CW: gl.constexpr, PARTS: gl.constexpr):
    """Words and scales of chunk `i` of each slice."""
    words = gl.load(word_at + i * CW, eviction_policy="evict_first")
    return words, gl.load(scale_at + i * (CW // _words_of_group(PARTS)))


@gluon.jit
def _decoded(words, factor, PARTS: gl.constexpr):
    """Words int16 and their factors, two fp16 in an int32, to PARTS tiles of fp16."""
    # Two words bring two factors, the same: the second is not read.
    if PARTS == 4:
        four: gl.constexpr = (gl.float16, gl.float16, gl.float16, gl.float16)
        return gl.inline_asm_elementwise(
            _NVFP4_ASM, "=&r,=&r,=&r,=&r,r,r,r", [words, factor], four, is_pure=True, pack=2
        )
    else:
        two: gl.constexpr = (gl.float16, gl.float16)
        return gl.inline_asm_elementwise(_MXFP8_ASM, "=&r,=&r,r,r,r", [words, factor], two, is_pure=True, pack=2)


@gluon.jit
def _take(
    total, words, scale, room, i,
    S: gl.constexpr, R: gl.constexpr, CW: gl.constexpr, PARTS: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr,
):  # fmt: skip
    """Add chunk `i`'s products to `total` [S, R, 8]."""
    GW: gl.constexpr = _words_of_group(PARTS)
    factor = scale.to(gl.int32) * _scale_step(PARTS) + _scale_base(PARTS)
    factor = gl.expand_dims(factor, 3).broadcast_to(S, R, CW // GW, GW)
    factor = gl.convert_layout(gl.reshape(factor, [S, R, CW]), LEFT, assert_trivial=True)
    parts = _decoded(words, factor, PARTS)
    for j in gl.static_range(PARTS):
        value = room.index(i * PARTS + j).permute((0, 2, 1)).load(RIGHT)
        total = mma_v2(parts[j], value.broadcast_to(S, CW, 8), total)
    return total


@gluon.jit
def _columns(K: gl.constexpr, S: gl.constexpr, CW: gl.constexpr, PARTS: gl.constexpr, layout: gl.constexpr):
    """Columns of x that stand in the first piece of its room: part after part of a chunk's words, in their order. Each
    further piece is PIECE / S columns on in every slice."""
    GW: gl.constexpr = _words_of_group(PARTS)
    at = gl.arange(0, PIECE, layout)
    part = (at // (CW * S)) % PARTS
    word = at // (CW * S * PARTS) * CW + at % CW
    column = (at // CW) % S * (K // S) + (word // GW) * (GW * PARTS) + part * GW + word % GW
    return gl.max_contiguous(gl.multiple_of(column, GW), GW)


@gluon.jit
def _lay_out(
    x, norm_weight, eps, pieces,
    K: gl.constexpr, S: gl.constexpr, CW: gl.constexpr, PARTS: gl.constexpr, NORM: gl.constexpr,
):  # fmt: skip
    """Copy x [K], or its norm, to its room as fp16."""
    layout: gl.constexpr = gl.BlockedLayout([PIECE // 32 // gl.num_warps()], [32], [gl.num_warps()], [0])
    column = _columns(K, S, CW, PARTS, layout)
    values = ()
    for p in gl.static_range(K // PIECE):
        values = values + (gl.load(x + column + p * (PIECE // S), cache_modifier=".cg"),)  # type: ignore[assignment]  # noqa: RUF005
    if NORM:
        square = gl.full([PIECE], 0.0, gl.float32, layout)
        for p in gl.static_range(K // PIECE):
            square += values[p].to(gl.float32) * values[p].to(gl.float32)
        scale = gl.rsqrt(gl.sum(square, axis=0) / K + eps)
        for p in gl.static_range(K // PIECE):
            gain = gl.load(norm_weight + column + p * (PIECE // S)).to(gl.float32) + 1.0
            pieces.index(p).store((values[p].to(gl.float32) * scale * gain).to(gl.float16))
    else:
        for p in gl.static_range(K // PIECE):
            pieces.index(p).store(values[p].to(gl.float16))
    gl.thread_barrier()


@gluon.jit
def _stream_linear(
    x, norm_weight, words, scales, row_scales, residual, out, eps,
    K: gl.constexpr, S: gl.constexpr, RW: gl.constexpr, CW: gl.constexpr, PARTS: gl.constexpr,
    NORM: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    R: gl.constexpr = 16 * RW
    CHUNKS: gl.constexpr = K // (CW * S * PARTS)
    product: gl.constexpr = product_layout(S, RW)
    left: gl.constexpr = gl.DotOperandLayout(0, product, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, product, 8)
    flat: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    first = gl.program_id(0) * R
    row = (first + gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(2, product)))).to(gl.int64)
    row_of_slice = gl.full([S, R], 0, gl.int64, gl.SliceLayout(2, product)) + row[None, :]
    word_at, scale_at = _pointers(words, scales, row_of_slice, K, S, R, CW, PARTS, left)
    words_0, scales_0 = _load_chunk(word_at, scale_at, 0, CW, PARTS)
    words_1, scales_1 = _load_chunk(word_at, scale_at, 1, CW, PARTS)
    mine = first + gl.arange(0, R, flat)
    factor = gl.load(row_scales + mine)
    tiles: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    room = gl.allocate_shared_memory(gl.float16, [K // (CW * S), S, 1, CW], tiles)
    if PDL:
        wait_then_release()
    _lay_out(x, norm_weight, eps, room._reinterpret(gl.float16, [K // PIECE, PIECE], line), K, S, CW, PARTS, NORM)
    total = gl.full([S, R, 8], 0.0, gl.float32, product)
    for i in range(0, CHUNKS - 2, 2):
        total = _take(total, words_0, scales_0, room, i, S, R, CW, PARTS, left, right)
        words_0, scales_0 = _load_chunk(word_at, scale_at, i + 2, CW, PARTS)
        total = _take(total, words_1, scales_1, room, i + 1, S, R, CW, PARTS, left, right)
        words_1, scales_1 = _load_chunk(word_at, scale_at, i + 3, CW, PARTS)
    total = _take(total, words_0, scales_0, room, CHUNKS - 2, S, R, CW, PARTS, left, right)
    total = _take(total, words_1, scales_1, room, CHUNKS - 1, S, R, CW, PARTS, left, right)
    y = gl.convert_layout(gl.max(gl.sum(total, axis=0), axis=1), flat) * factor
    if RESIDUAL:
        y += gl.load(residual + mine, cache_modifier=".cg").to(gl.float32)
    gl.store(out + mine, y.to(out.dtype.element_ty))


@dataclass(frozen=True)
class StreamPlan:
    """Slices of a row's columns, a warp each; warps of 16 rows a slice; words of a row that a warp takes at a time."""

    slices: int
    row_warps: int
    words: int

    @staticmethod
    def of(form: WeightFormat, rows: int) -> StreamPlan:
        """For a matrix of so many rows (docs/performance.md): words in flight are what counts, in four warps a program
        of which the chip holds all at once, three a multiprocessor."""
        slices = 4 if rows <= 3 * _PROGRAMS * 16 else 2
        return StreamPlan(slices, 4 // slices, 128 if form is WeightFormat.MXFP8 else 64)

    def fits(self, form: WeightFormat, rows: int, width: int) -> bool:
        """Whether a matrix [rows, width] is dealt out evenly: pairs of chunks, whole pieces of x."""
        chunk = self.words * self.slices * int(form)
        if self.words % _LEAST_WORDS or _PIECE_VALUES % chunk or _PIECE_VALUES % (32 * self.slices * self.row_warps):
            return False
        return rows % (16 * self.row_warps) == 0 and width % (2 * chunk) == 0 and width % _PIECE_VALUES == 0


def streams(x: Tensor, weight: PackedWeight) -> bool:
    """Whether this device and these types are what the kernel is written for: one token, tensor cores that take fp16
    from registers, conversions from e4m3 (measured on compute capability 9.0)."""
    return (
        x.is_cuda
        and x.shape[0] == 1
        and weight.format is not WeightFormat.PLAIN
        and x.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(x.device) == (9, 0)
    )


def stream_linear(
    x: Tensor, weight: PackedWeight, out: Tensor, norm_weight: Tensor | None, residual: Tensor | None, eps: float,
    plan: StreamPlan, flags: dict[str, Any],
) -> None:  # fmt: skip
    """out = residual + weight @ norm(x), for x [1, K] (bf16 or fp16) that `streams` and weight [N, K] that `plan.fits`.

    The norm is in fp32, x rounded to fp16 after it. `flags` are RESIDUAL, PDL and the launch's own.
    """
    rows, width = weight.shape
    _stream_linear[(rows // (16 * plan.row_warps),)](
        x, x if norm_weight is None else norm_weight, weight.words, weight.scales, weight.row_scales,
        x if residual is None else residual, out, eps, K=width, S=plan.slices, RW=plan.row_warps, CW=plan.words,
        PARTS=int(weight.format), NORM=norm_weight is not None, num_warps=plan.slices * plan.row_warps, **flags,
    )  # fmt: skip
