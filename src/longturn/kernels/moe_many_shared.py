"""The expert that every token takes, for so many tokens that its products are the vendor's library's to compute.

Its rows need no gathering and no padding, and under a card's power limit what counts is work a joule: the library's
products do half as much again of it as those of `moe_many_experts.py`.
"""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longturn.kernels.dependent import FRESH, launch_options, wait_then_release
from longturn.kernels.moe_choice import swiglu_oai

_LEAST_PRODUCTS = 25_000_000_000
"""Of tokens, width and inner width: below it launches of their own cost more than the library saves."""
_LEAST_LONG_PRODUCTS = 4_000_000_000
"""The same for steps of `_LONG` tokens, whose experts are bound by products and not by reading weights."""
_LONG = 4096


def shared_apart_pays(tokens: int, width: int, inter: int) -> bool:
    """Whether `shared_hidden` is faster than further tiles of the routed experts' launches."""
    return tokens * width * inter >= (_LEAST_LONG_PRODUCTS if tokens >= _LONG else _LEAST_PRODUCTS)


@triton.jit
def activate(
    gate_up, hidden, INTER: tl.constexpr, BLOCK: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden [T, INTER] = the activation of gate_up [T, 2 * INTER], gate first. The grid is (T, INTER / BLOCK)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wait_then_release(PDL)
    at = gate_up + token * (2 * INTER) + column
    gate = tl.load(at, cache_modifier=FRESH).to(tl.float32)
    up = tl.load(at + INTER, cache_modifier=FRESH).to(tl.float32)
    result = swiglu_oai(gate, up, ALPHA, BETA, LIMIT)
    tl.store(hidden + token * INTER + column, result.to(hidden.dtype.element_ty))


def shared_hidden(
    normed: Tensor, w13: Tensor, gate_up: Tensor, hidden: Tensor, *, alpha: float, beta: float, limit: float, pdl: bool
) -> Tensor:
    """The activation of `w13` [2i, n], gate rows first, for normed [T, n]: a view [T, i] of the flat scratch `hidden`.

    gate_up is scratch, flat, at least T * 2i. All are of one type.
    """
    tokens, inter = normed.shape[0], w13.shape[0] // 2
    product = gate_up[: tokens * 2 * inter].view(tokens, 2 * inter)
    out = hidden[: tokens * inter].view(tokens, inter)
    torch.mm(normed, w13.T, out=product)
    block = min(inter & -inter, 1024)
    activate[(tokens, inter // block)](
        product, out, INTER=inter, BLOCK=block, ALPHA=alpha, BETA=beta, LIMIT=limit, PDL=pdl, num_warps=4,
        **launch_options(pdl),
    )  # fmt: skip
    return out
