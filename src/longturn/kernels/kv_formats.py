"""Key, value and index-key lanes of the cache in the types that kernels read and write: plain floats, fp8, NVFP4.

What is stored is what `ops.kv_lane` stores: fp8 is e4m3 without a scale, saturating; NVFP4 is two e2m1 codes a byte,
the even column in the low nibble, with one e4m3 scale for 16 columns. Hopper has no FP4 units, so codes are widened in
registers: an e2m1 code shifted into an fp16's exponent and mantissa is its value times 2**-14, subnormals included, and
its product with a scale has at most 6 significant bits, so it is exact in fp16. Both factors are kept in range by
leaving the product `E2M1_GROW` times too small; who reads the lane multiplies its result by that.
"""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from longturn.kernels.head_norm import norm_rope_heads
from longturn.kernels.pages import KvFormat, PageLayout

PLAIN, FP8, NVFP4 = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
NUMBER = {KvFormat.PLAIN: 0, KvFormat.FP8: 1, KvFormat.NVFP4: 2}
"""What kernels take for a format."""
E2M1_GROW = tl.constexpr(128.0)
"""Inverse of the factor by which `widen_e2m1` leaves values too small."""

FP8_LOW = tl.constexpr(2.0**-4)
"""What the second tile of `fp8_halves` counts."""

_WIDEN = """{
.reg .b32 t, s, m;
prmt.b32 t, $4, 0, 0x4140;
shl.b32 s, t, 12; and.b32 s, s, 0x80008000; shl.b32 m, t, 9; and.b32 m, m, 0x0E000E00; or.b32 s, s, m;
mul.rn.f16x2 $0, s, $5;
shl.b32 s, t, 8; and.b32 s, s, 0x80008000; shl.b32 m, t, 5; and.b32 m, m, 0x0E000E00; or.b32 s, s, m;
mul.rn.f16x2 $2, s, $5;
prmt.b32 t, $4, 0, 0x4342;
shl.b32 s, t, 12; and.b32 s, s, 0x80008000; shl.b32 m, t, 9; and.b32 m, m, 0x0E000E00; or.b32 s, s, m;
mul.rn.f16x2 $1, s, $6;
shl.b32 s, t, 8; and.b32 s, s, 0x80008000; shl.b32 m, t, 5; and.b32 m, m, 0x0E000E00; or.b32 s, s, m;
mul.rn.f16x2 $3, s, $6;
}"""
_WIDEN_ASM = tl.constexpr(_WIDEN)
# Each takes two words and treats them alike: nothing may cross between them, since which two are a pair is the layout's
# choice (two columns of a key, two tokens of a value).
_FP8_ASM = tl.constexpr("""{
.reg .b32 t;
.reg .b16 low, high;
prmt.b32 t, $2, 0, 0x3120;
mov.b32 {low, high}, t;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}""")
_E2M1_ASM = tl.constexpr("""{
.reg .b32 s, m;
shl.b32 s, $4, 12; and.b32 s, s, 0x80008000; shl.b32 m, $4, 9; and.b32 m, m, 0x0E000E00; or.b32 s, s, m;
mul.rn.f16x2 $0, s, $5;
shl.b32 s, $4, 8; and.b32 s, s, 0x80008000; shl.b32 m, $4, 5; and.b32 m, m, 0x0E000E00; or.b32 s, s, m;
mul.rn.f16x2 $1, s, $5;
shl.b32 s, $4, 4; and.b32 s, s, 0x80008000; shl.b32 m, $4, 1; and.b32 m, m, 0x0E000E00; or.b32 s, s, m;
mul.rn.f16x2 $2, s, $5;
and.b32 s, $4, 0x80008000; shr.b32 m, $4, 3; and.b32 m, m, 0x0E000E00; or.b32 s, s, m;
mul.rn.f16x2 $3, s, $5;
}""")


@dataclass(frozen=True)
class LaneViews:
    """One layer's lanes as kernel arguments: the cache under each lane's type, and offsets and the distance between
    pages counted in that type's elements."""

    kv: Tensor
    kv_stride: int
    key: int
    value: int
    scales: Tensor
    scale_stride: int
    key_scale: int
    value_scale: int
    index: Tensor
    index_stride: int
    index_key: int


def lane_views(cache: Tensor, layout: PageLayout, layer: int) -> LaneViews:
    """Lanes of `layer` in a contiguous `cache`: of one float type where the layout is plain, uint8 otherwise."""
    at = (layout.key_offset(layer), layout.value_offset(layer), layout.index_offset(layer))
    stride = layout.page_stride
    if not layout.in_bytes:
        return LaneViews(cache, stride, *at[:2], cache, stride, 0, 0, cache, stride, at[2])
    plain = torch.bfloat16 if layout.plain_bytes == 2 else torch.float32
    types = {KvFormat.PLAIN: plain, KvFormat.FP8: torch.float8_e4m3fn, KvFormat.NVFP4: torch.uint8}
    kv, index = types[layout.kv_format], types[layout.index_format]
    return LaneViews(
        cache.view(kv), stride // kv.itemsize, at[0] // kv.itemsize, at[1] // kv.itemsize,
        cache.view(torch.float8_e4m3fn), stride, layout.key_scale_offset(layer), layout.value_scale_offset(layer),
        cache.view(index), stride // index.itemsize, at[2] // index.itemsize,
    )  # fmt: skip


@triton.jit
def e2m1_codes(x):
    """uint8 codes of x, rounded to nearest, ties to the even code; NaN becomes the largest, as in ops.nvfp4."""
    m = tl.abs(x)
    # A tie lies in the middle of an odd and an even code; the comparison decides which of them takes it.
    code = (m > 0.25).to(tl.uint8) + (m >= 0.75).to(tl.uint8) + (m > 1.25).to(tl.uint8) + (m >= 1.75).to(tl.uint8)
    code += (m > 2.5).to(tl.uint8) + (m >= 3.5).to(tl.uint8) + (m > 5.0).to(tl.uint8)
    code = tl.where(x == x, code, 7)
    return code | tl.where(x.to(tl.int32, bitcast=True) < 0, 8, 0).to(tl.uint8)


@triton.jit
def as_e4m3(x):
    """x rounded to the nearest e4m3, ties to even, saturating; NaN stays NaN.

    The rounding is done on the fp32 first, the same that the hardware's conversion does: the interpreter's conversion
    loses the carry of a mantissa that rounds up to a power of two.
    """
    bounded = tl.minimum(tl.maximum(x, -448.0), 448.0)
    bits = bounded.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    subnormal = (bounded + 24576.0) - 24576.0  # 1.5 * 2**14, whose neighbours lie 2**-9 apart
    rounded = tl.where(tl.abs(bounded) < 2.0**-6, subnormal, normal)
    return tl.where(x == x, rounded, x).to(tl.float8e4nv)


@triton.jit
def fp8_halves(x):
    """Two e4m3 tiles and a factor a row: x [R, D] is (first + second * FP8_LOW) * factor to 8 significant bits.

    So a product with e4m3 keys needs no conversion of the keys. Numbers below 2**-13 of their row's largest keep fewer
    bits, and those below 2**-21 none. A row with a NaN or an infinity has factor NaN.
    """
    exponent = (tl.max(tl.abs(x), axis=1).to(tl.int32, bitcast=True) >> 23) & 0xFF
    exponent = tl.maximum(exponent, 8)
    scaled = x * ((261 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]  # its largest lies in [128, 256)
    high = as_e4m3(scaled)
    low = as_e4m3((scaled - high.to(tl.float32)) * (1.0 / FP8_LOW))
    factor = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    broken = tl.max((x != x).to(tl.int32), axis=1) != 0
    return high, low, tl.where(broken | (exponent == 255), float("nan"), factor)


@triton.jit
def store_rows(
    values, lane, scale_lane, row, ROWS: tl.constexpr, D: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Store fp32 values [ROWS, D] as rows `row` [ROWS] of a lane that starts at pointer `lane`."""
    if FORMAT == NVFP4:
        blocks = tl.reshape(values, [ROWS, D // 16, 16])
        wanted = tl.div_rn(tl.max(tl.abs(blocks), axis=2), 6.0)
        broken = tl.max((blocks != blocks).to(tl.int32), axis=2) != 0
        scale = as_e4m3(tl.where(broken, float("nan"), tl.maximum(wanted, 2.0**-9)))
        codes = e2m1_codes(tl.div_rn(blocks, tl.broadcast_to(scale.to(tl.float32)[:, :, None], [ROWS, D // 16, 16])))
        even, odd = tl.split(tl.reshape(codes, [ROWS, D // 2, 2]))
        tl.store(lane + row[:, None] * (D // 2) + tl.arange(0, D // 2)[None, :], even | (odd << 4))
        tl.store(scale_lane + row[:, None] * (D // 16) + tl.arange(0, D // 16)[None, :], scale)
    else:
        if FORMAT == FP8:
            values = as_e4m3(values)
        to = lane + row[:, None] * D + tl.arange(0, D)[None, :]
        tl.store(to, values.to(lane.dtype.element_ty))


@triton.jit
def write_token_as(
    projected, row, key_norm, index_key_norm, cos_row, sin_row, key_lane, key_scales, value_lane, value_scales,
    index_lane, slot, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, HALF: tl.constexpr,
    FORMAT: tl.constexpr, INDEX_FORMAT: tl.constexpr,
):  # fmt: skip
    """Normalise, rotate and store one token's K, V and index key in slot `slot` of the page whose lanes start at the
    given pointers."""
    head = tl.arange(0, KV_HEADS)
    one = tl.arange(0, 1)
    width: tl.constexpr = (Q_HEADS + 3 * KV_HEADS + 1) * D
    token = projected + row.to(tl.int64) * width
    k = norm_rope_heads(token + (Q_HEADS + head) * D, head >= 0, key_norm, cos_row, sin_row, eps, D, HALF)
    store_rows(k, key_lane, key_scales, head * PAGE + slot, KV_HEADS, D, FORMAT)
    v = tl.load(token + (Q_HEADS + KV_HEADS + head)[:, None] * D + tl.arange(0, D)[None, :], cache_modifier=".cg")
    store_rows(v.to(tl.float32), value_lane, value_scales, head * PAGE + slot, KV_HEADS, D, FORMAT)
    index = norm_rope_heads(
        token + (Q_HEADS + 3 * KV_HEADS + one) * D, one >= 0, index_key_norm, cos_row, sin_row, eps, D, HALF
    )
    store_rows(index, index_lane, index_lane, one + slot, 1, D, INDEX_FORMAT)


@triton.jit
def widen_e2m1(codes, scale, ROWS: tl.constexpr, D: tl.constexpr, ASM: tl.constexpr):
    """Even and odd columns, fp16 [ROWS, D / 2] each, of codes uint8 [ROWS, D / 2] and their e4m3 scales [ROWS, D / 16],
    divided by `E2M1_GROW`."""
    grown = scale.to(tl.float16) * 128.0
    factor = tl.reshape(tl.broadcast_to(grown[:, :, None], [ROWS, D // 16, 8]), [ROWS, D // 2])
    if ASM:
        even, odd = tl.inline_asm_elementwise(
            _WIDEN_ASM, "=r,=r,=r,=r,r,r,r", [codes, factor], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        wide = codes.to(tl.uint16)
        even = (((wide & 0x08) << 12) | ((wide & 0x07) << 9)).to(tl.float16, bitcast=True) * factor
        odd = (((wide & 0x80) << 8) | ((wide & 0x70) << 5)).to(tl.float16, bitcast=True) * factor
    return even, odd


@triton.jit
def widen_words_fp8(words, ASM: tl.constexpr):
    """Even and odd columns, fp16 in the shape of `words`: int16, two e4m3 each."""
    if ASM:
        form: tl.constexpr = (tl.float16, tl.float16)
        return tl.inline_asm_elementwise(_FP8_ASM, "=&r,=&r,r", [words], form, is_pure=True, pack=2)
    else:
        low, high = (words & 0xFF).to(tl.uint8), ((words >> 8) & 0xFF).to(tl.uint8)
        return low.to(tl.float8e4nv, bitcast=True).to(tl.float16), high.to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def _nibble(wide, AT: tl.constexpr):
    """The value of the code at bit AT of each uint16, times 2**-14."""
    code = wide >> AT
    return (((code & 0x8) << 12) | ((code & 0x7) << 9)).to(tl.float16, bitcast=True)


@triton.jit
def widen_words_e2m1(words, scale, ROWS: tl.constexpr, D: tl.constexpr, ASM: tl.constexpr):
    """Columns 0, 1, 2 and 3 of each four, fp16 [ROWS, D / 4] each and divided by `E2M1_GROW`, of words int16
    [ROWS, D / 4] of four codes and their e4m3 scales [ROWS, D / 16]."""
    grown = scale.to(tl.float16) * 128.0
    factor = tl.reshape(tl.broadcast_to(grown[:, :, None], [ROWS, D // 16, 4]), [ROWS, D // 4])
    if ASM:
        form: tl.constexpr = (tl.float16, tl.float16, tl.float16, tl.float16)
        return tl.inline_asm_elementwise(_E2M1_ASM, "=&r,=&r,=&r,=&r,r,r", [words, factor], form, is_pure=True, pack=2)
    else:
        wide = words.to(tl.uint16, bitcast=True)
        first, second = _nibble(wide, 0) * factor, _nibble(wide, 4) * factor
        return first, second, _nibble(wide, 8) * factor, _nibble(wide, 12) * factor
