"""16-bit words of quantised weights to fp16 in registers: what kernels call on tiles of a `PackedWeight`.

Tiles of words are 16-bit matrices to Triton, so they travel as bf16 tiles do (asynchronous copies, `ldmatrix`, straight
into a tensor-core operand), and a word's parts are its operands one after the other. The assembly takes two words at a
time and treats each alone: which two of a tile are a pair is unspecified, so nothing may cross between them.

Without ASM the same steps are done one word at a time, and the result widened to fp32: what Triton's interpreter can
run, and its tests compare exactly.
"""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from longturn.kernels.packed_weights import GROUP, SCALE_BITS, WeightFormat

NVFP4_WORDS, MXFP8_WORDS = tl.constexpr(GROUP[WeightFormat.NVFP4] // 4), tl.constexpr(GROUP[WeightFormat.MXFP8] // 2)
"""Words of a group, which share a scale."""
NVFP4_STEP, NVFP4_BASE = map(tl.constexpr, SCALE_BITS[WeightFormat.NVFP4])
MXFP8_STEP, MXFP8_BASE = map(tl.constexpr, SCALE_BITS[WeightFormat.MXFP8])

# Two words and the fp16 factor of each are the last two operands. E2M1_PLACES: parts 0 and 1 are one shift away from
# fp16's places, parts 2 and 3 need one for the sign and one for the rest. lop3's 0x28 is (a ^ b) & c. No shift is so
# long that a bit of the lower word gets under the upper one's mask.
_NVFP4_ASM = tl.constexpr("""{
.reg .b32 a, b;
and.b32 a, $4, 0x8e008e00;
mul.rn.f16x2 $0, a, $5;
shl.b32 a, $4, 3;
and.b32 a, a, 0x8e008e00;
mul.rn.f16x2 $1, a, $5;
shl.b32 a, $4, 1;
shl.b32 b, $4, 6;
lop3.b32 a, a, b, 0x8e008e00, 0x28;
mul.rn.f16x2 $2, a, $5;
shl.b32 a, $4, 2;
shl.b32 b, $4, 9;
lop3.b32 a, a, b, 0x8e008e00, 0x28;
mul.rn.f16x2 $3, a, $5;
}""")
_MXFP8_ASM = tl.constexpr("""{
.reg .b32 a, b;
.reg .b16 l, h;
prmt.b32 a, $2, 0, 0x3120;
mov.b32 {l, h}, a;
cvt.rn.f16x2.e4m3x2 a, l;
cvt.rn.f16x2.e4m3x2 b, h;
mul.rn.f16x2 $0, a, $3;
mul.rn.f16x2 $1, b, $3;
}""")
# The same with both halves of each product as fp32, for products outside the tensor cores.
_NVFP4_WIDE_ASM = tl.constexpr("""{
.reg .b32 a, b;
.reg .b16 l, h;
and.b32 a, $8, 0x8e008e00;
mul.rn.f16x2 a, a, $9;
mov.b32 {l, h}, a;
cvt.f32.f16 $0, l;
cvt.f32.f16 $1, h;
shl.b32 a, $8, 3;
and.b32 a, a, 0x8e008e00;
mul.rn.f16x2 a, a, $9;
mov.b32 {l, h}, a;
cvt.f32.f16 $2, l;
cvt.f32.f16 $3, h;
shl.b32 a, $8, 1;
shl.b32 b, $8, 6;
lop3.b32 a, a, b, 0x8e008e00, 0x28;
mul.rn.f16x2 a, a, $9;
mov.b32 {l, h}, a;
cvt.f32.f16 $4, l;
cvt.f32.f16 $5, h;
shl.b32 a, $8, 2;
shl.b32 b, $8, 9;
lop3.b32 a, a, b, 0x8e008e00, 0x28;
mul.rn.f16x2 a, a, $9;
mov.b32 {l, h}, a;
cvt.f32.f16 $6, l;
cvt.f32.f16 $7, h;
}""")
_MXFP8_WIDE_ASM = tl.constexpr("""{
.reg .b32 a, b;
.reg .b16 l, h;
prmt.b32 a, $4, 0, 0x3120;
mov.b32 {l, h}, a;
cvt.rn.f16x2.e4m3x2 a, l;
cvt.rn.f16x2.e4m3x2 b, h;
mul.rn.f16x2 a, a, $5;
mov.b32 {l, h}, a;
cvt.f32.f16 $0, l;
cvt.f32.f16 $1, h;
mul.rn.f16x2 b, b, $5;
mov.b32 {l, h}, b;
cvt.f32.f16 $2, l;
cvt.f32.f16 $3, h;
}""")


ASSEMBLY = {
    WeightFormat.NVFP4: (_NVFP4_ASM.value, _NVFP4_WIDE_ASM.value),
    WeightFormat.MXFP8: (_MXFP8_ASM.value, _MXFP8_WIDE_ASM.value),
}
"""Texts that give fp16 and fp32, for tests."""


@triton.jit
def _wide(bits, factor):
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * factor


@triton.jit
def _nvfp4_wide(words, factor):
    w = words.to(tl.int32)
    third = ((w << 1) ^ (w << 6)) & 0x8E00
    fourth = ((w << 2) ^ (w << 9)) & 0x8E00
    first, second = _wide(w & 0x8E00, factor), _wide((w << 3) & 0x8E00, factor)
    return first, second, _wide(third, factor), _wide(fourth, factor)


@triton.jit
def _mxfp8_wide(words, factor):
    low, high = (words & 0xFF).to(tl.uint8), ((words >> 8) & 0xFF).to(tl.uint8)
    first = low.to(tl.float8e4nv, bitcast=True).to(tl.float32) * factor
    return first, high.to(tl.float8e4nv, bitcast=True).to(tl.float32) * factor


@triton.jit
def _nvfp4_pairs(words, factor, WIDE: tl.constexpr):
    if WIDE:
        wide: tl.constexpr = (tl.float32, tl.float32, tl.float32, tl.float32)
        return tl.inline_asm_elementwise(
            _NVFP4_WIDE_ASM, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [words, factor], wide, is_pure=True, pack=2
        )
    else:
        form: tl.constexpr = (tl.float16, tl.float16, tl.float16, tl.float16)
        return tl.inline_asm_elementwise(_NVFP4_ASM, "=&r,=&r,=&r,=&r,r,r", [words, factor], form, is_pure=True, pack=2)


@triton.jit
def _mxfp8_pairs(words, factor, WIDE: tl.constexpr):
    if WIDE:
        wide: tl.constexpr = (tl.float32, tl.float32)
        return tl.inline_asm_elementwise(
            _MXFP8_WIDE_ASM, "=&r,=&r,=&r,=&r,r,r", [words, factor], wide, is_pure=True, pack=2
        )
    else:
        form: tl.constexpr = (tl.float16, tl.float16)
        return tl.inline_asm_elementwise(_MXFP8_ASM, "=&r,=&r,r,r", [words, factor], form, is_pure=True, pack=2)


@triton.jit
def _factors(words, scales, PER: tl.constexpr, STEP: tl.constexpr, BASE: tl.constexpr, ASM: tl.constexpr):
    """The factor of each word, from the bytes of groups of PER words."""
    factor = (scales.to(tl.int16) * STEP + BASE).to(tl.float16, bitcast=True)
    if not ASM:
        factor = factor.to(tl.float32)
    wide = tl.expand_dims(factor, -1)
    if len(words.shape) == 3:
        wide = tl.broadcast_to(wide, (scales.shape[0], scales.shape[1], scales.shape[2], PER))
    else:
        wide = tl.broadcast_to(wide, (scales.shape[0], scales.shape[1], PER))
    return tl.reshape(wide, words.shape)


@triton.jit
def decode(words, scales, PARTS: tl.constexpr, ASM: tl.constexpr, WIDE: tl.constexpr = False):
    """Weights of a tile without their row factors: a tuple of PARTS tiles in the shape of `words`.

    They are fp16 where ASM and not WIDE, else fp32, but for plain weights, which are what they are.

    words int16 [..., W] and scales uint8 [..., W / words of a group], two or three dimensions; with PARTS 1 the words
    are the weights and scales are not read.
    """
    # Each path needs its own branch to the end: the compiler compares the types of all returns that it reaches.
    if PARTS == 1:
        return (words,)
    elif PARTS == 4:
        factor = _factors(words, scales, NVFP4_WORDS, NVFP4_STEP, NVFP4_BASE, ASM)
        if ASM:
            return _nvfp4_pairs(words, factor, WIDE)
        else:
            return _nvfp4_wide(words, factor)
    else:
        factor = _factors(words, scales, MXFP8_WORDS, MXFP8_STEP, MXFP8_BASE, ASM)
        if ASM:
            return _mxfp8_pairs(words, factor, WIDE)
        else:
            return _mxfp8_wide(words, factor)


@triton.jit
def load_scales(scales, row, at, row_ok, W: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr):
    """Scale bytes [R, W / words of a group] of rows `row` int64 [R] from column `at` of x on; PARTS 1 has none."""
    if PARTS == 1:
        return row
    elif PARTS == 4:
        group = tl.arange(0, W // NVFP4_WORDS)
        by_row = scales + row[:, None] * (K // (4 * NVFP4_WORDS))
        return tl.load(by_row + (group + at // (4 * NVFP4_WORDS))[None, :], mask=row_ok[:, None], other=0)
    else:
        group = tl.arange(0, W // MXFP8_WORDS)
        by_row = scales + row[:, None] * (K // (2 * MXFP8_WORDS))
        return tl.load(by_row + (group + at // (2 * MXFP8_WORDS))[None, :], mask=row_ok[:, None], other=0)


@triton.jit
def part_columns(word, part, PARTS: tl.constexpr):
    """Column of x that meets part `part` of each word, in the shape of `word`."""
    if PARTS == 1:
        return word
    elif PARTS == 4:
        return (word // NVFP4_WORDS) * (NVFP4_WORDS * 4) + part * NVFP4_WORDS + word % NVFP4_WORDS
    else:
        return (word // MXFP8_WORDS) * (MXFP8_WORDS * 2) + part * MXFP8_WORDS + word % MXFP8_WORDS
