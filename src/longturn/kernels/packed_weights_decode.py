"""16-bit words of quantised weights to bf16 in registers: what kernels call on tiles of a `PackedWeight`.

Tiles of words are 16-bit matrices to Triton, so they travel as bf16 tiles do (asynchronous copies, `ldmatrix`, straight
into a tensor-core operand), and a word's parts are its operands one after the other. The assembly takes two words at a
time and treats each alone: which two of a tile are a pair is unspecified, so nothing may cross between them.

Without ASM the same steps are done on fp32's upper half, one word at a time: what Triton's interpreter can run, whose
bf16 arithmetic is wrong.
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

# Two words and the bf16 factor of each are the last two operands. E2M1_PLACES: parts 0 to 2 are one shift away from
# bf16's places; part 3 gathers what was left over.
_NVFP4_ASM = tl.constexpr("""{
.reg .b32 a, b;
and.b32 a, $4, 0x81c081c0;
mul.bf16x2 $0, a, $5;
shl.b32 a, $4, 3;
and.b32 a, a, 0x81c081c0;
mul.bf16x2 $1, a, $5;
shl.b32 a, $4, 6;
and.b32 a, a, 0x81c081c0;
mul.bf16x2 $2, a, $5;
shl.b32 a, $4, 1;
and.b32 a, a, 0x80008000;
shr.b32 b, $4, 5;
and.b32 b, b, 0x01000100;
or.b32 a, a, b;
shr.b32 b, $4, 4;
and.b32 b, b, 0x00c000c0;
or.b32 a, a, b;
mul.bf16x2 $3, a, $5;
}""")
_MXFP8_ASM = tl.constexpr("""{
.reg .b32 a, b;
shl.b32 a, $2, 8;
and.b32 a, a, 0x80008000;
shl.b32 b, $2, 4;
and.b32 b, b, 0x07f007f0;
or.b32 a, a, b;
mul.bf16x2 $0, a, $3;
and.b32 a, $2, 0x80008000;
shr.b32 b, $2, 4;
and.b32 b, b, 0x07f007f0;
or.b32 a, a, b;
mul.bf16x2 $1, a, $3;
}""")
# The same with both halves of each product as fp32, for products outside the tensor cores: taking halves apart in the
# compiler costs twice as much.
_NVFP4_WIDE_ASM = tl.constexpr("""{
.reg .b32 a, b;
and.b32 a, $8, 0x81c081c0;
mul.bf16x2 a, a, $9;
shl.b32 $0, a, 16;
and.b32 $1, a, 0xffff0000;
shl.b32 a, $8, 3;
and.b32 a, a, 0x81c081c0;
mul.bf16x2 a, a, $9;
shl.b32 $2, a, 16;
and.b32 $3, a, 0xffff0000;
shl.b32 a, $8, 6;
and.b32 a, a, 0x81c081c0;
mul.bf16x2 a, a, $9;
shl.b32 $4, a, 16;
and.b32 $5, a, 0xffff0000;
shl.b32 a, $8, 1;
and.b32 a, a, 0x80008000;
shr.b32 b, $8, 5;
and.b32 b, b, 0x01000100;
or.b32 a, a, b;
shr.b32 b, $8, 4;
and.b32 b, b, 0x00c000c0;
or.b32 a, a, b;
mul.bf16x2 a, a, $9;
shl.b32 $6, a, 16;
and.b32 $7, a, 0xffff0000;
}""")
_MXFP8_WIDE_ASM = tl.constexpr("""{
.reg .b32 a, b;
shl.b32 a, $4, 8;
and.b32 a, a, 0x80008000;
shl.b32 b, $4, 4;
and.b32 b, b, 0x07f007f0;
or.b32 a, a, b;
mul.bf16x2 a, a, $5;
shl.b32 $0, a, 16;
and.b32 $1, a, 0xffff0000;
and.b32 a, $4, 0x80008000;
shr.b32 b, $4, 4;
and.b32 b, b, 0x07f007f0;
or.b32 a, a, b;
mul.bf16x2 a, a, $5;
shl.b32 $2, a, 16;
and.b32 $3, a, 0xffff0000;
}""")


ASSEMBLY = {
    WeightFormat.NVFP4: (_NVFP4_ASM.value, _NVFP4_WIDE_ASM.value),
    WeightFormat.MXFP8: (_MXFP8_ASM.value, _MXFP8_WIDE_ASM.value),
}
"""Texts that give bf16 and fp32, for tests."""


@triton.jit
def _wide(bits, factor):
    return (bits << 16).to(tl.float32, bitcast=True) * factor


@triton.jit
def _nvfp4_wide(words, factor):
    w = words.to(tl.int32)
    rest = ((w << 1) & 0x8000) | ((w >> 5) & 0x0100) | ((w >> 4) & 0x00C0)
    first, second, third = _wide(w & 0x81C0, factor), _wide((w << 3) & 0x81C0, factor), _wide((w << 6) & 0x81C0, factor)
    return first, second, third, _wide(rest, factor)


@triton.jit
def _mxfp8_wide(words, factor):
    w = words.to(tl.int32)
    low, high = ((w << 8) & 0x8000) | ((w << 4) & 0x07F0), (w & 0x8000) | ((w >> 4) & 0x07F0)
    return _wide(low, factor), _wide(high, factor)


@triton.jit
def _nvfp4_pairs(words, factor, WIDE: tl.constexpr):
    if WIDE:
        wide: tl.constexpr = (tl.float32, tl.float32, tl.float32, tl.float32)
        return tl.inline_asm_elementwise(
            _NVFP4_WIDE_ASM, "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r", [words, factor], wide, is_pure=True, pack=2
        )
    else:
        form: tl.constexpr = (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16)
        return tl.inline_asm_elementwise(_NVFP4_ASM, "=&r,=&r,=&r,=&r,r,r", [words, factor], form, is_pure=True, pack=2)


@triton.jit
def _mxfp8_pairs(words, factor, WIDE: tl.constexpr):
    if WIDE:
        wide: tl.constexpr = (tl.float32, tl.float32)
        return tl.inline_asm_elementwise(
            _MXFP8_WIDE_ASM, "=&r,=&r,=&r,=&r,r,r", [words, factor], wide, is_pure=True, pack=2
        )
    else:
        form: tl.constexpr = (tl.bfloat16, tl.bfloat16)
        return tl.inline_asm_elementwise(_MXFP8_ASM, "=&r,=&r,r,r", [words, factor], form, is_pure=True, pack=2)


@triton.jit
def _factors(words, scales, PER: tl.constexpr, STEP: tl.constexpr, BASE: tl.constexpr, ASM: tl.constexpr):
    """The factor of each word, from the bytes of groups of PER words."""
    if ASM:
        factor = (scales.to(tl.int16) * STEP + BASE).to(tl.bfloat16, bitcast=True)
    else:
        factor = ((scales.to(tl.int32) * STEP + BASE) << 16).to(tl.float32, bitcast=True)
    wide = tl.expand_dims(factor, -1)
    if len(words.shape) == 3:
        wide = tl.broadcast_to(wide, (scales.shape[0], scales.shape[1], scales.shape[2], PER))
    else:
        wide = tl.broadcast_to(wide, (scales.shape[0], scales.shape[1], PER))
    return tl.reshape(wide, words.shape)


@triton.jit
def decode(words, scales, PARTS: tl.constexpr, ASM: tl.constexpr, WIDE: tl.constexpr = False):
    """Weights of a tile without their row factors: a tuple of PARTS tiles in the shape of `words`.

    They are bf16 where ASM and not WIDE, else fp32, but for plain weights, which are what they are.

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
