"""MXFP8: 8-bit e4m3 values with one power-of-two scale for 32 consecutive values (OCP Microscaling Formats 1.0).

A scale is stored as e8m0: the byte e means 2^(e - 127), and 255 is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
"""Values that share one scale."""
E4M3_MAX = 448.0
E8M0_BIAS = 127
E8M0_NAN = 255


@dataclass(frozen=True, slots=True)
class Mxfp8Weight:
    """A weight as published."""

    values: Tensor
    """e4m3 [out, in]."""
    scales: Tensor
    """uint8 [out, in / 32], e8m0."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def clone(self) -> Mxfp8Weight:
        """A copy that does not depend on a mapped file."""
        return Mxfp8Weight(self.values.clone(), self.scales.clone())

    def dequantize(self) -> Tensor:
        """fp32 [out, in]; exact but where the product is below fp32's normal range."""
        values = self.values.to(torch.float32)
        values.view(*self.scales.shape, GROUP).mul_(e8m0_to_fp32(self.scales)[..., None])
        return values


def e8m0_to_fp32(scales: Tensor) -> Tensor:
    """fp32 of e8m0 bytes (uint8) of any shape."""
    bits = scales.to(torch.int32) << 23  # the byte is fp32's own exponent field
    bits = torch.where(scales == 0, 1 << 22, bits)  # 2^-127 is a subnormal of fp32
    return torch.where(scales == E8M0_NAN, 0x7FC00000, bits).view(torch.float32)


def quantize_weight(weight: Tensor) -> Mxfp8Weight:
    """Quantise finite weight [out, in], `in` a multiple of 32, each value to the nearest e4m3.

    A block's scale is the smallest power of two that clips nothing. (The OCP text rounds the other way, which clips the
    largest value of some blocks by up to 12 %.)
    """
    blocks = weight.to(torch.float32).reshape(weight.shape[0], -1, GROUP)
    largest = blocks.abs().amax(-1)
    mantissa, exponent = torch.frexp(largest / E4M3_MAX)
    exponent = exponent - (mantissa == 0.5).to(torch.int32)  # a power of two needs no rounding up
    scales = (exponent + E8M0_BIAS).clamp(0, E8M0_NAN - 1)
    scales = torch.where(largest == 0, 0, scales).to(torch.uint8)
    values = (blocks / e8m0_to_fp32(scales)[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    return Mxfp8Weight(values.flatten(-2).to(torch.float8_e4m3fn), scales)
