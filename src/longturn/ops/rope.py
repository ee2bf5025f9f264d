"""Rotary position embedding in torch, in half-rotated ("NeoX") form: dimension i is paired with i + rotary_dim / 2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longturn.ops.rope_frequencies import RopeFrequencies, rope_frequencies


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary frequencies as a tensor."""

    inv_freq: Tensor
    """Radians per position, fp32 [rotary_dim / 2]."""
    scale: float = 1.0
    """Factor on cosine and sine (YaRN's attention factor)."""

    @property
    def rotary_dim(self) -> int:
        return 2 * self.inv_freq.shape[0]


def rope_of(frequencies: RopeFrequencies) -> Rope:
    """Frequencies of a configuration as a tensor on the CPU."""
    return Rope(torch.from_numpy(frequencies.inv_freq), frequencies.scale)


def rope_from_config(config: Mapping[str, Any], head_dim: int) -> Rope:
    """`rope_frequencies` of a Hugging Face configuration as a tensor on the CPU. Raises ModelError as that does."""
    return rope_of(rope_frequencies(config, head_dim))


def rope_cos_sin(positions: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
    """Cosine and sine, each fp32 [T, rotary_dim / 2], for positions [T] on the device of the frequencies."""
    angles = positions.to(torch.float32)[:, None] * rope.inv_freq
    return angles.cos() * rope.scale, angles.sin() * rope.scale


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] dimensions of x [T, heads, head_dim]; the rest passes through.

    The rotation is computed in the dtype of `x`, with cosine and sine rounded to it first.
    """
    half = cos.shape[-1]
    cos, sin = cos.to(x.dtype)[:, None, :], sin.to(x.dtype)[:, None, :]
    first, second = x[..., :half], x[..., half : 2 * half]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :]), dim=-1)
