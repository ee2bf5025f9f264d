"""Pieces of the experts' kernels for one and for few tokens: the activation, and which experts a token takes."""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from longturn.kernels.dependent import FRESH


@triton.jit
def swiglu_oai(gate, up, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr):
    """(clamp(up) + beta) * gate * sigmoid(alpha * gate), gate clamped from above only, in fp32."""
    gate = tl.minimum(gate, LIMIT)
    up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    return (up + BETA) * gate / (1.0 + tl.exp(-ALPHA * gate))


@triton.jit
def expert_choice(logits, bias, EXPERTS: tl.constexpr):
    """Sigmoid scores and what experts are chosen by, fp32 [EXPERTS]. NaN ranks last: it must never become a wild
    index."""
    i = tl.arange(0, EXPERTS)
    score = tl.sigmoid(tl.load(logits + i, cache_modifier=FRESH))
    choice = score + tl.load(bias + i)
    return score, tl.where(choice == choice, choice, float("-inf"))


@triton.jit
def top_of(choice, slot, EXPERTS: tl.constexpr, TOP: tl.constexpr):
    """Experts int32 in the shape of `slot`: of ranks slot by choice; among equals the earlier wins.

    One 64-bit maximum a rank, over the choice in an integer order with the expert's number below it.
    """
    bits = choice.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = ordered.to(tl.int64) * EXPERTS + (EXPERTS - 1 - tl.arange(0, EXPERTS))
    found = slot * 0
    for k in tl.static_range(TOP):
        best = tl.max(key, axis=0)
        found = tl.where(slot == k, (EXPERTS - 1 - (best & (EXPERTS - 1))).to(tl.int32), found)
        key = tl.where(key == best, -0x7FFFFFFFFFFFFFFF, key)
    return found


@triton.jit
def top_in_warps(logits, bias, EXPERTS: tl.constexpr, TOP: tl.constexpr, WARPS: tl.constexpr):
    """Experts int32 [TOP] by rank, as `top_of` finds them in `expert_choice`; every warp of WARPS looks for itself.

    A row of the tensors is a warp's, so that a maximum is one instruction of the warp; across 16 warps each of them
    would take three barriers of the program.
    """
    i = tl.arange(0, EXPERTS)[None, :] + tl.zeros([WARPS, 1], dtype=tl.int32)
    choice = tl.sigmoid(tl.load(logits + i, cache_modifier=FRESH)) + tl.load(bias + i)
    choice = tl.where(choice == choice, choice, float("-inf"))
    bits = choice.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    slot = tl.arange(0, TOP)[None, :]
    found = tl.zeros([WARPS, TOP], dtype=tl.int32)
    for k in tl.static_range(TOP):
        best = tl.max(ordered, axis=1)
        first = tl.min(tl.where(ordered == best[:, None], i, EXPERTS - 1), axis=1)
        found = tl.where(slot == k, first[:, None], found)
        ordered = tl.where(i == first[:, None], -0x80000000, ordered)
    return tl.max(found, axis=0)
