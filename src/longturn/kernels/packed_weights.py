"""Quantised weights as the decode kernels read them: 16-bit words, one byte of scale a group, one fp32 factor a row.

Hopper has no unit that reads 4-bit values, so kernels turn codes into fp16 in registers. What is stored here is the
published weight's information, rearranged once at load so that this takes few instructions and moves nothing between
threads:

    format  values in a word  what a word holds                                      group
    PLAIN   1                 the weight itself (bf16, or fp32 in tests)
    MXFP8   2                 part j is byte j                                       32
    NVFP4   4                 part j is the bits of `E2M1_PLACES[j]`, mixed          16

Part j of word c is column `GROUP * (c // w) + w * j + c % w`, with w words a group: a group's words hold its values
part by part, so a tile of words times a tile of x becomes one product a part, each over consecutive columns of x.

The 16-bit type of the kernels' operands is fp16: e4m3 becomes fp16 by one instruction for two values, and fp16 holds
the activations that quantised weights meet (normalised ones, and SwiGLU's clamped ones) with three bits more than bf16.

An e2m1 code's bits are put where fp16 has its sign, the low bits of its exponent and the top bit of its fraction. Read
as fp16 that is the value times 2^-14, subnormal codes included, since fp16's subnormals step in the same way. The
group's factor brings it back: the product has at most six significant bits and is at least 2^-19, so it is exact.
The sign and the magnitude of parts 2 and 3 need shifts of different lengths. Both shifted words are xored and masked in
one instruction; bits of the other two parts that come along are cancelled beforehand (`E2M1_MIXED`).

A group's byte is the fp16 factor's own bits: `byte * multiplier + addend` (`SCALE_BITS`). e4m3 needs five exponent bits
to have no subnormals: scales of 2^-9 to 448 become exponent and fraction (5 and 3 bits) of the scale times 2^5, and a
group whose scale is zero gets zero codes. e8m0 becomes an exponent of fp16, moved so that the row's largest is 2^7;
scales 2^-21 of that and smaller do not fit, and their codes are shifted instead, which rounds them to 2^-23.

The row factor holds the tensor's global scale (as a multiplier) and the powers of two above; kernels apply it to the
finished fp32 sum. NaN in a row's codes or scales makes its factor NaN: kernels then give NaN for the row.

The sources of the bit layouts are the OCP Microscaling Formats 1.0 text (e2m1, e4m3, e8m0) and ops/nvfp4.py and
ops/mxfp8.py, which are the oracles of the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor


class WeightFormat(IntEnum):
    """The number is how many values a 16-bit word holds; kernels take it as their constant PARTS."""

    PLAIN = 1
    MXFP8 = 2
    NVFP4 = 4


GROUP = {WeightFormat.PLAIN: 1, WeightFormat.MXFP8: 32, WeightFormat.NVFP4: 16}
"""Consecutive values of a row that share one scale."""
E2M1_PLACES = ((15, 11, 10, 9), (12, 8, 7, 6), (14, 5, 4, 3), (13, 2, 1, 0))
"""For each part, the bits of a word that hold a code's sign and its three magnitude bits, highest first. Parts 0 and 1
have the spacing of fp16's bits 15 and 11 to 9, so that one shift and one mask place them; all shifts go left."""
E2M1_MIXED = ((9, 14), (10, 5), (9, 4), (8, 3), (6, 13), (9, 2), (8, 1), (7, 0))
"""Pairs of bits: the first, of part 0 or 1, is xored into the second, of part 2 or 3. Doing it again undoes it."""
NVFP4_ROW = 2.0**9
"""What fp16 products of NVFP4 are too small by: codes by 2^-14, scales too large by 2^5."""
MXFP8_TOP = 22
"""Byte of a row's largest scale: 2^7, with which 448 still fits fp16."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """Matrices [..., rows, width] in one format; leading dimensions are experts."""

    format: WeightFormat
    words: Tensor
    """int16 [..., rows, width / values of a word]; PLAIN: the weight itself."""
    scales: Tensor
    """uint8 [..., rows, width / group]; PLAIN: empty."""
    row_scales: Tensor
    """fp32 [..., rows]; PLAIN: empty."""

    @staticmethod
    def plain(weight: Tensor) -> PackedWeight:
        """A weight as it is, contiguous."""
        return PackedWeight(
            WeightFormat.PLAIN, weight, weight.new_empty(0, dtype=torch.uint8), weight.new_empty(0, dtype=torch.float32)
        )

    @staticmethod
    def allocate(form: WeightFormat, *shape: int, device: torch.device | str) -> PackedWeight:
        """Uninitialised room for matrices of `shape` [..., rows, width] in a quantised format, to fill by `copy_`."""
        *lead, width = shape
        if form is WeightFormat.PLAIN or width % GROUP[form]:
            raise ValueError(f"no packed form of {form.name} for rows of {width}")
        return PackedWeight(
            form,
            torch.empty(*lead, width // form, dtype=torch.int16, device=device),
            torch.empty(*lead, width // GROUP[form], dtype=torch.uint8, device=device),
            torch.empty(*lead, dtype=torch.float32, device=device),
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values: [..., rows, width]."""
        return (*self.words.shape[:-1], self.words.shape[-1] * self.format)

    @property
    def nbytes(self) -> int:
        """Bytes of words, scales and row factors."""
        return self.words.nbytes + self.scales.nbytes + self.row_scales.nbytes

    def __getitem__(self, index: int | slice) -> PackedWeight:
        """A view of part of the first dimension: an expert, or rows."""
        if self.format is WeightFormat.PLAIN:
            return PackedWeight.plain(self.words[index])
        return PackedWeight(self.format, self.words[index], self.scales[index], self.row_scales[index])

    def copy_(self, other: PackedWeight) -> None:
        """Fill with `other`, of the same format and shape."""
        if (self.format, self.shape) != (other.format, other.shape):
            raise ValueError(f"cannot copy {other.format.name} {other.shape} to {self.format.name} {self.shape}")
        self.words.copy_(other.words)
        self.scales.copy_(other.scales)
        self.row_scales.copy_(other.row_scales)

    def to(self, device: torch.device | str) -> PackedWeight:
        return PackedWeight(self.format, self.words.to(device), self.scales.to(device), self.row_scales.to(device))

    def dequantised(self) -> Tensor:
        """The values in fp32 [..., rows, width]: codes times scales exactly, rounded once by the row's factor."""
        if self.format is WeightFormat.PLAIN:
            return self.words.to(torch.float32)
        parts, group = int(self.format), GROUP[self.format]
        word = self.words.to(torch.int32) & 0xFFFF
        if self.format is WeightFormat.NVFP4:
            word = _mixed(word)
            places = [zip(part, E2M1_PLACES[0], strict=True) for part in E2M1_PLACES]
            bits = [torch.stack([((word >> at) & 1) << to for at, to in part]).sum(0) for part in places]
            values = torch.stack([_int16(b).view(torch.float16) for b in bits], dim=-1).double()
        else:
            byte = [(word & 0xFF).to(torch.uint8), (word >> 8).to(torch.uint8)]
            values = torch.stack([b.view(torch.float8_e4m3fn).to(torch.float32) for b in byte], dim=-1).double()
        *lead, words, _ = values.shape
        per = group // parts
        values = values.view(*lead, words // per, per, parts).transpose(-1, -2).reshape(*lead, words // per, group)
        multiplier, addend = SCALE_BITS[self.format]
        factor = _int16(self.scales.to(torch.int32) * multiplier + addend).view(torch.float16)
        exact = values * factor.double()[..., None]
        return (exact.flatten(-2) * self.row_scales.double()[..., None]).to(torch.float32)


SCALE_BITS = {
    WeightFormat.PLAIN: (0, 0),
    WeightFormat.MXFP8: (1 << 10, 0),
    WeightFormat.NVFP4: (1 << 7, 11 << 10),
}
"""A group's fp16 factor has the bits `byte * [0] + [1]`. For NVFP4 exponent 0 means 2^-9 * 2^5."""


def as_packed(weight: Tensor | PackedWeight) -> PackedWeight:
    """A plain tensor as a record."""
    return weight if isinstance(weight, PackedWeight) else PackedWeight.plain(weight)


def join_rows(weights: Sequence[PackedWeight]) -> PackedWeight:
    """One matrix of several under each other (a copy), all of one format and width; each keeps its global scale."""
    forms = {w.format for w in weights}
    if len(forms) != 1:
        raise ValueError(f"weights of different formats cannot be joined: {', '.join(sorted(f.name for f in forms))}")
    words = torch.cat([w.words for w in weights], dim=-2)
    form = forms.pop()
    if form is WeightFormat.PLAIN:
        return PackedWeight.plain(words)
    scales, rows = [w.scales for w in weights], [w.row_scales for w in weights]
    return PackedWeight(form, words, torch.cat(scales, dim=-2), torch.cat(rows, dim=-1))


def _words_of(codes: Tensor, form: WeightFormat) -> Tensor:
    """int32 codes [..., width] as [..., words, parts] in the order of the module's text."""
    group, parts = GROUP[form], int(form)
    *lead, width = codes.shape
    by_part = codes.reshape(*lead, width // group, parts, group // parts)
    return by_part.transpose(-1, -2).reshape(*lead, width // parts, parts)


def _int16(word: Tensor) -> Tensor:
    return torch.where(word >= 1 << 15, word - (1 << 16), word).to(torch.int16)


def _mixed(word: Tensor) -> Tensor:
    """int32 words of 16 bits with the bits of `E2M1_MIXED` xored in."""
    out = word.clone()
    for source, target in E2M1_MIXED:
        out ^= ((word >> source) & 1) << target
    return out


def pack_nvfp4(packed: Tensor, scales: Tensor, factor: Tensor | float) -> PackedWeight:
    """Published NVFP4 as kernels read it.

    Args:
        packed: uint8 [..., rows, width / 2], the even element in the low nibble.
        scales: e4m3 [..., rows, width / 16].
        factor: what block scales are multiplied by: fp32 that broadcasts to [..., rows] (compressed-tensors publishes
            its inverse).
    """
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2).to(torch.int32)
    value = scales.to(torch.float32)
    broken = value.isnan()
    empty = (value == 0) | broken
    codes = torch.where(empty.repeat_interleave(GROUP[WeightFormat.NVFP4], dim=-1), codes & 8, codes)
    negative = torch.signbit(value).repeat_interleave(GROUP[WeightFormat.NVFP4], dim=-1)
    codes = torch.where(negative, codes ^ 8, codes)
    # 2^-9 is e4m3's smallest value; with mantissa in [1, 2) the exponent above it takes five bits.
    mantissa, exponent = torch.frexp(torch.where(empty, 2.0**-9, value).abs())
    byte = ((exponent - 1 + 9) << 3) | ((mantissa * 16).to(torch.int32) - 8)
    by_part = _words_of(codes, WeightFormat.NVFP4)
    word = torch.zeros_like(by_part[..., 0])
    for part, places in enumerate(E2M1_PLACES):
        for bit, place in zip((3, 2, 1, 0), places, strict=True):
            word |= ((by_part[..., part] >> bit) & 1) << place
    rows = torch.as_tensor(factor, dtype=torch.float32, device=packed.device).expand(packed.shape[:-1]) * NVFP4_ROW
    rows = torch.where(broken.any(dim=-1), torch.nan, rows)
    return PackedWeight(WeightFormat.NVFP4, _int16(_mixed(word)), byte.to(torch.uint8), rows.contiguous())


def pack_mxfp8(values: Tensor, scales: Tensor) -> PackedWeight:
    """Published MXFP8 as kernels read it: values e4m3 [..., rows, width], scales uint8 e8m0 [..., rows, width / 32].

    Exact but for groups whose scale is less than 2^-21 of their row's largest: those are rounded to 2^-30 of it.
    """
    code = values.view(torch.uint8).to(torch.int32)
    exponent = scales.to(torch.int32)
    largest = exponent.amax(dim=-1)
    broken = ((code & 0x7F) == 0x7F).any(dim=-1) | (exponent == 255).any(dim=-1)
    byte = exponent - largest[..., None] + MXFP8_TOP
    if (byte < 1).any():
        group = GROUP[WeightFormat.MXFP8]
        lost = (byte - 1).clamp(-40, 0).repeat_interleave(group, dim=-1)
        shifted = torch.ldexp(values.view(torch.float8_e4m3fn).to(torch.float32), lost).to(torch.float8_e4m3fn)
        code = torch.where(lost < 0, shifted.view(torch.uint8).to(torch.int32), code)
    by_part = _words_of(code, WeightFormat.MXFP8)
    # The row's largest scale stands as 2^7: what is left is that scale and 2^-7.
    rows = torch.ldexp(torch.ones_like(largest, dtype=torch.float32), largest - 127) * 2.0**-7
    rows = torch.where(broken, torch.nan, rows)
    packed = _int16(by_part[..., 0] | by_part[..., 1] << 8)
    return PackedWeight(WeightFormat.MXFP8, packed, byte.clamp(min=1).to(torch.uint8), rows)


def random_packed(form: WeightFormat, *shape: int, scale: float, device: torch.device | str) -> PackedWeight:
    """Random codes and scales of matrices [..., rows, width] whose values have about the standard deviation `scale`,
    for benchmarks; PLAIN is bf16."""
    if form is WeightFormat.PLAIN:
        return PackedWeight.plain(torch.empty(*shape, dtype=torch.bfloat16, device=device).normal_(0.0, scale))
    weight = PackedWeight.allocate(form, *shape, device=device)
    if form is WeightFormat.NVFP4:
        weight.words.random_(-(1 << 15), 1 << 15)
        weight.scales.random_(9 << 3, 11 << 3)  # factors from 1 to 3.75
        spread = 7.1  # of uniform codes (2.9) times these factors (2.4)
        weight.row_scales.fill_(scale / spread * NVFP4_ROW)
        return weight
    # Bytes below 0x7F keep clear of NaN; exponents of 2^-3 to 2^0 keep the spread near that of real rows.
    flat = weight.words.view(torch.uint8)
    flat.random_(0, 0x40)
    flat |= torch.randint_like(flat, 2) << 7
    weight.scales.random_(MXFP8_TOP - 2, MXFP8_TOP + 1)
    weight.row_scales.fill_(scale / 0.4 * 2.0**-7)
    return weight
