"""Routing of many tokens: logits, choices, and a list of choices for each expert, all on the device.

router_logits   norm(x) times the router in three products of bf16 (of tf32 for an x in fp32), which together are as
                exact as fp32; parts along the hidden width, so that few tokens fill the chip
choose_experts  top experts, their shares, the normalised token; each choice takes a place in its expert's list
"""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from longturn.kernels.dependent import FRESH, wait_then_release
from longturn.kernels.moe_one import top_of


@triton.jit
def _thirds(weight):
    """fp32 `weight` as three bf16 tiles, smallest first, which add up to it: 24 bits."""
    high = weight.to(tl.bfloat16)
    rest = weight - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return (rest - middle.to(tl.float32)).to(tl.bfloat16), middle, high


@triton.jit(do_not_specialize=["tokens"])
def router_logits(
    x, norm_weight, router_weight, logits, counts, tokens,
    EXPERTS: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, TOKENS: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Part p of the logits before x's root mean square divides them, fp32 [PARTS, T, EXPERTS]. Sets `counts` [EXPERTS]
    to 0 on the side. The grid is (T / TOKENS, PARTS).

    x in bf16 is multiplied as it is by the weights in three parts, whose products are exact: a conversion of x would
    take it through registers, and products of tf32 take twice as long. Blocks are added up outside the tensor cores,
    which cut off what they add: 1.6e-6 of error in place of 3e-7."""
    part = tl.program_id(1)
    wait_then_release(PDL)
    expert = tl.arange(0, EXPERTS)
    if (part == 0) & (tl.program_id(0) == 0):
        tl.store(counts + expert, tl.zeros([EXPERTS], dtype=tl.int32))
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    ok = token < tokens
    column = part * (K // PARTS) + tl.arange(0, BLOCK_K)
    x_at = x + token[:, None].to(tl.int64) * K + column[None, :]
    w_at = router_weight + expert[:, None] * K + column[None, :]
    line = part * tokens + token
    to = logits + line[None, :] * EXPERTS + expert[:, None]
    total = tl.zeros([EXPERTS, TOKENS], dtype=tl.float32)
    for k in tl.range(0, K // PARTS, BLOCK_K, num_stages=STAGES):
        value = tl.trans(tl.load(x_at + k, mask=ok[:, None], other=0.0))
        weight = tl.load(w_at + k) * (tl.load(norm_weight + column + k).to(tl.float32) + 1.0)[None, :]
        if x.dtype.element_ty == tl.bfloat16:
            low, middle, high = _thirds(weight)
            total += tl.dot(high, value, tl.dot(middle, value, tl.dot(low, value)))
        else:
            total = tl.dot(weight, value.to(tl.float32), total, input_precision="tf32x3")
    tl.store(to, total, mask=ok[None, :])


@triton.jit(do_not_specialize=["tokens"])
def choose_experts(
    x, norm_weight, positions, logits, bias, normed, experts, shares, lists, counts, tokens, scaling, eps,
    EXPERTS: tl.constexpr, TOP: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """normed [T, K]; experts, shares [T, TOP], expert -1 for padding; lists [EXPERTS, T] of choices, of which counts
    [EXPERTS] grow from 0.

    Places in an expert's list come from an atomic count and differ between runs; no sum runs along a list, so results
    don't.
    """
    token = tl.program_id(0)
    column = tl.arange(0, BLOCK_K)
    at = token.to(tl.int64) * K + column
    if TOP == 0:
        wait_then_release(PDL)
    # With experts the kernel before is `router_logits`, which writes nothing that is read until the wait below.
    square = tl.zeros([BLOCK_K], dtype=tl.float32)
    for k in tl.static_range(0, K, BLOCK_K):
        value = tl.load(x + at + k, cache_modifier=FRESH).to(tl.float32)
        square += value * value
    scale = tl.rsqrt(tl.sum(square, axis=0) / K + eps)
    for k in tl.static_range(0, K, BLOCK_K):
        if K != BLOCK_K:
            value = tl.load(x + at + k, cache_modifier=FRESH).to(tl.float32)
        result = value * scale * (tl.load(norm_weight + column + k).to(tl.float32) + 1.0)
        tl.store(normed + at + k, result.to(normed.dtype.element_ty))
    if TOP > 0:
        expert = tl.arange(0, EXPERTS)
        slot = tl.arange(0, TOP)
        present = tl.load(positions + token, cache_modifier=FRESH) >= 0
        correction = tl.load(bias + expert)
        wait_then_release(PDL)
        logit = tl.zeros([EXPERTS], dtype=tl.float32)
        for part in tl.static_range(PARTS):
            logit += tl.load(logits + (part * tokens + token) * EXPERTS + expert, cache_modifier=FRESH)
        score = tl.sigmoid(logit * scale)
        choice = score + correction
        choice = tl.where(choice == choice, choice, float("-inf"))  # NaN must never become an index
        chosen = top_of(choice, slot, EXPERTS, TOP)
        share = tl.sum(tl.where(expert[None, :] == chosen[:, None], score[None, :], 0.0), axis=1)
        share = share * (scaling / tl.sum(share, axis=0))
        live = (slot >= 0) & present
        rank = tl.atomic_add(counts + chosen, 1, mask=live, sem="relaxed")
        to = token * TOP + slot
        tl.store(experts + to, tl.where(live, chosen, -1))
        tl.store(shares + to, tl.where(live, share, 0.0))
        tl.store(lists + chosen * tokens + rank, to, mask=live)
