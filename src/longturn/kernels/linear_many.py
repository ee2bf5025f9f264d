"""Projections of many tokens: Gemma's normalisation by a launch of its own, products by the vendor's library, which is
hard to beat at hundreds of rows and runs inside a graph like any kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from longturn.kernels.norm import add_norm


def project_many(
    x: Tensor, norm_weight: Tensor | None, weight: Tensor, normed: Tensor, out: Tensor, *, eps: float = 1e-6,
    pdl: bool = False,
) -> None:  # fmt: skip
    """out [T, N] = norm(x [T, K]) @ weight [N, K].T, all of one type; `normed` is scratch, flat, at least T * K, or
    without a `norm_weight` holds norm(x) already."""
    tokens, width = x.shape
    normed = normed[: tokens * width].view(tokens, width)
    if norm_weight is not None:
        add_norm(x, norm_weight, normed, eps=eps, pdl=pdl)
    torch.mm(normed, weight.T, out=out)


def add_project_many(x: Tensor, value: Tensor, weight: Tensor) -> None:
    """x [T, N] += value [T, K] @ weight [N, K].T in place."""
    x.addmm_(value, weight.T)
