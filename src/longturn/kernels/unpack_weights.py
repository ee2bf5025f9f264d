"""Quantised weights back to plain ones on the device, for the kernels of many tokens, which read plain weights."""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from longturn.kernels.dependent import launch_options, wait_then_release
from longturn.kernels.packed_weights import GROUP, PackedWeight, WeightFormat
from longturn.kernels.packed_weights_decode import MXFP8_WORDS, NVFP4_WORDS, decode, load_scales

_ROWS = 8
_MOST_COLUMNS = 1024


@triton.jit
def _unpack(
    words, scales, row_scales, out, rows,
    K: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    start = tl.program_id(1) * COLUMNS
    W: tl.constexpr = COLUMNS // PARTS
    word = tl.arange(0, W)
    ok = row < rows
    at = words + row[:, None] * (K // PARTS) + (start // PARTS + word)[None, :]
    tile = tl.load(at, mask=ok[:, None], other=0)
    scale = load_scales(scales, row, start, ok, W, PARTS, K)
    factor = tl.load(row_scales + row, mask=ok, other=0.0)
    parts = decode(tile, scale, PARTS, ASM)
    # `out` is scratch that the kernels before still read.
    wait_then_release(PDL)
    to = out + row[:, None] * K + (start + tl.arange(0, COLUMNS))[None, :]
    tl.store(to, _in_order(parts, factor, out.dtype.element_ty, ROWS, COLUMNS, PARTS), mask=ok[:, None])


@triton.jit
def _in_order(
    parts, factor, FORM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """The values [ROWS, COLUMNS] of a tile's decoded parts, times a factor for each row.

    A group's words hold its values part by part. Stored so, NVFP4 would be written in pieces of 8 bytes: 1,005 us where
    a mini60 layer's bytes need 234.
    """
    first = (parts[0].to(tl.float32) * factor[:, None]).to(FORM)
    second = (parts[1].to(tl.float32) * factor[:, None]).to(FORM)
    both = tl.join(first, second)
    if PARTS == 4:
        third = (parts[2].to(tl.float32) * factor[:, None]).to(FORM)
        fourth = (parts[3].to(tl.float32) * factor[:, None]).to(FORM)
        every = tl.reshape(tl.join(both, tl.join(third, fourth)), [ROWS, COLUMNS // 16, NVFP4_WORDS, 2, 2])
        return tl.reshape(tl.permute(every, [0, 1, 4, 3, 2]), [ROWS, COLUMNS])
    else:
        every = tl.reshape(both, [ROWS, COLUMNS // 32, MXFP8_WORDS, 2])
        return tl.reshape(tl.permute(every, [0, 1, 3, 2]), [ROWS, COLUMNS])


def unpack(weight: PackedWeight, out: Tensor, *, pdl: bool = False) -> None:
    """The values of a quantised `weight` [..., rows, width] into `out` of that shape, rounded once to its type."""
    if weight.format is WeightFormat.PLAIN or tuple(out.shape) != tuple(weight.shape):
        raise ValueError(f"cannot unpack {weight.format.name} {weight.shape} into {tuple(out.shape)}")
    width = weight.shape[-1]
    columns = min(width & -width, _MOST_COLUMNS)
    if columns < GROUP[weight.format]:
        raise ValueError(f"rows of {width} have no tiles of whole groups of {GROUP[weight.format]}")
    rows = out.numel() // width
    _unpack[(triton.cdiv(rows, _ROWS), width // columns)](
        weight.words, weight.scales, weight.row_scales, out, rows,
        K=width, COLUMNS=columns, ROWS=_ROWS, PARTS=int(weight.format), ASM=out.is_cuda, num_warps=4, PDL=pdl,
        **launch_options(pdl),
    )  # fmt: skip
