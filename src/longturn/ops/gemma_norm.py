"""Gemma's form of root-mean-square normalisation, which MiniMax-M3 uses everywhere."""

from __future__ import annotations

import torch
from torch import Tensor


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (1 + weight) over the last dimension, in fp32, returned in the dtype of `x`.

    `weight` [n] is stored around zero; 1 is added in fp32, since 1 + w rounded to bf16 loses the low bits of w.
    """
    wide = x.to(torch.float32)
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normal * (1.0 + weight.to(torch.float32))).to(x.dtype)
