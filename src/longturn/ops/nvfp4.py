"""NVFP4: 4-bit e2m1 values with one e4m3 scale for 16 consecutive values, and for weights one fp32 scale more.

e2m1 has the values 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; two codes share a byte, the even element in the low
nibble. Publishers write the tensor's fp32 scale in two ways: compressed-tensors' `weight_global_scale` *divides* the
block scales, ModelOpt's `weight_scale_2` *multiplies* them. Taking one for the other is off by a factor of millions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 16
"""Values that share one e4m3 scale."""
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitude of codes 0..7; codes 8..15 are their negatives."""
E2M1_MAX = 6.0
E4M3_MAX = 448.0
LEAST_MAGNITUDE = 1e-34
E4M3_TINY = 2.0**-9
"""Smallest positive e4m3 value: a block scale is never rounded to zero, which could not be divided by."""


@dataclass(frozen=True, slots=True)
class Nvfp4Weight:
    """A weight as published."""

    packed: Tensor
    """uint8 [out, in / 2]."""
    scales: Tensor
    """e4m3 [out, in / 16]."""
    global_scale: Tensor
    """fp32, one element."""
    global_divides: bool
    """True for compressed-tensors' `weight_global_scale`, False for ModelOpt's `weight_scale_2`."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.packed.shape[0], 2 * self.packed.shape[1]

    def clone(self) -> Nvfp4Weight:
        """A copy that does not depend on a mapped file."""
        return Nvfp4Weight(self.packed.clone(), self.scales.clone(), self.global_scale.clone(), self.global_divides)

    def block_scales(self) -> Tensor:
        """Factor of each block of 16, fp32 [out, in / 16]."""
        scales = self.scales.to(torch.float32)
        tensor_scale = self.global_scale.to(torch.float32).reshape(())
        return scales / tensor_scale if self.global_divides else scales * tensor_scale

    def dequantize(self) -> Tensor:
        """fp32 [out, in]."""
        return scale_e2m1(self.packed, self.block_scales())


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Values of uint8 codes [..., n / 2], fp32 [..., n]."""
    values = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], device=packed.device)
    byte = torch.arange(256, device=packed.device)
    pairs = torch.stack((values[byte & 15], values[byte >> 4]), dim=-1)
    return pairs.index_select(0, packed.reshape(-1).to(torch.int32)).view(*packed.shape[:-1], 2 * packed.shape[-1])


def pack_e2m1(x: Tensor) -> Tensor:
    """Round x [..., n] to the nearest e2m1 values, ties to the even code, and pack them: uint8 [..., n / 2].

    Magnitudes over 6 become 6. NaN has no code and becomes 6 too: the block's scale is what carries it.
    """

    def below(x: float) -> float:
        return float(torch.nextafter(torch.tensor(x), torch.tensor(0.0)))

    # Midpoints of neighbours. One that lies between an odd code and the even code above it belongs to the upper.
    middles = (0.25, below(0.75), 1.25, below(1.75), 2.5, below(3.5), 5.0)
    magnitude = x.to(torch.float32).abs().contiguous()
    codes = torch.bucketize(magnitude, torch.tensor(middles, device=x.device), out_int32=True).to(torch.uint8)
    codes |= torch.signbit(x).to(torch.uint8) << 3
    return codes[..., 0::2] | codes[..., 1::2] << 4


def scale_e2m1(packed: Tensor, block_scales: Tensor) -> Tensor:
    """fp32 [..., n]: codes [..., n / 2] times the fp32 factor of their block, [..., n / 16]."""
    values = unpack_e2m1(packed)
    values.view(*block_scales.shape, GROUP).mul_(block_scales[..., None])
    return values


def _quantize_blocks(x: Tensor, tensor_scale: float) -> tuple[Tensor, Tensor]:
    """Codes and e4m3 scales of x [..., n], where a block's factor is its e4m3 scale times `tensor_scale`."""
    blocks = x.to(torch.float32).reshape(*x.shape[:-1], -1, GROUP)
    wanted = blocks.abs().amax(-1) / E2M1_MAX / tensor_scale
    scales = wanted.clamp(E4M3_TINY, E4M3_MAX).to(torch.float8_e4m3fn)
    # Codes are rounded under the scale as it is stored, not as it was wanted.
    factors = scales.to(torch.float32) * tensor_scale
    return pack_e2m1((blocks / factors[..., None]).flatten(-2)), scales


def quantize_lane(x: Tensor) -> tuple[Tensor, Tensor]:
    """Cache entries x [..., d] as (uint8 codes [..., d / 2], e4m3 scales [..., d / 16]), without a tensor scale."""
    return _quantize_blocks(x, 1.0)


def dequantize_lane(packed: Tensor, scales: Tensor) -> Tensor:
    """What `quantize_lane` stored: fp32 [..., d]."""
    return scale_e2m1(packed, scales.to(torch.float32))


def quantize_weight(weight: Tensor, *, largest: float | None = None, global_divides: bool = True) -> Nvfp4Weight:
    """Quantise weight [out, in], `in` a multiple of 16.

    Args:
        weight: finite values.
        largest: magnitude that the tensor's scale is made for; the weight's own if None. Weights that kernels fuse
            (an expert's gate and up projections) must share it.
        global_divides: which convention to store.
    """
    if largest is None:
        largest = float(weight.abs().amax())
    # The largest block then has the largest e4m3 scale, and its largest value the largest code.
    # (The multiplier of an all but zero weight would overflow.)
    multiplier = E2M1_MAX * E4M3_MAX / largest if LEAST_MAGNITUDE < largest < math.inf else 1.0
    stored = torch.tensor([multiplier if global_divides else 1.0 / multiplier], dtype=torch.float32)
    packed, scales = _quantize_blocks(weight, 1.0 / float(stored) if global_divides else float(stored))
    return Nvfp4Weight(packed, scales, stored, global_divides)
