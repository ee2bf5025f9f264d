"""Root-mean-square normalisation (Zhang and Sennrich, 2019, arXiv:1910.07467)."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension.

    Statistics are fp32 whatever the dtype of `x` [..., n]; the result is rounded to that dtype before it is scaled by
    `weight` [n], as the published Llama and Qwen checkpoints were trained.
    """
    wide = x.to(torch.float32)
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normal.to(x.dtype)
