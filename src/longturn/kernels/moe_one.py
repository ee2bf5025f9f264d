"""Mixture of experts for one token: three launches, nothing permuted, every weight read once.

    router_shared   norm, the router's logits, and the shared expert's gate and up (which needs no routing)
    routed_in       each program finds the chosen experts from the logits itself, then does its rows of gate and up
    down            rows of every chosen expert's down projection, the shared one, the weighted sum and the residual

`routed_in` has no select kernel before it: four maxima over 128 logits cost less than a launch. `down` does the same
before its wait, since the logits are two launches old by then, and so has its weights in flight while `routed_in` runs.
"""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from longturn.kernels.dependent import FRESH, launch_options, wait_then_release
from longturn.kernels.small_linear import largest_power_of_two, matvec, row_block


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
def _gate_up(
    base, row, x, norm_weight, inter, eps,
    K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr, WAIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The activation of rows `row`.. of one expert, fp32 [ROWS]: gate and up rows in one tile."""
    both = tl.arange(0, 2 * ROWS)
    of = row + both % ROWS + (both // ROWS) * inter
    at = base + of[:, None].to(tl.int64) * K + tl.arange(0, BLOCK_K)[None, :]
    y = matvec(at, (both >= 0)[:, None], x, norm_weight, eps, K, BLOCK_K, True, STAGES, WAIT, PDL)
    y = tl.reshape(y, [2, ROWS])
    is_gate = (tl.arange(0, 2) == 0)[:, None]
    gate = tl.sum(tl.where(is_gate, y, 0.0), axis=0)
    up = tl.sum(tl.where(is_gate, 0.0, y), axis=0)
    return swiglu_oai(gate, up, ALPHA, BETA, LIMIT)


@triton.jit
def _router_shared(
    x, norm_weight, router_weight, w13, logits, hidden, inter, eps,
    K: tl.constexpr, BLOCK_K: tl.constexpr, EXPERT_ROWS: tl.constexpr, ROUTER_PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < ROUTER_PROGRAMS:
        expert = program * EXPERT_ROWS + tl.arange(0, EXPERT_ROWS)
        at = router_weight + expert[:, None] * K + tl.arange(0, BLOCK_K)[None, :]
        y = matvec(at, (expert >= 0)[:, None], x, norm_weight, eps, K, BLOCK_K, True, STAGES, True, PDL)
        tl.store(logits + expert, y)
    else:
        row = (program - ROUTER_PROGRAMS) * ROWS
        result = _gate_up(w13, row, x, norm_weight, inter, eps, K, BLOCK_K, ROWS, STAGES, ALPHA, BETA, LIMIT, True, PDL)
        tl.store(hidden + row + tl.arange(0, ROWS), result)


@triton.jit
def _routed_in(
    x, norm_weight, logits, bias, w13, hidden, inter, eps,
    EXPERTS: tl.constexpr, TOP: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS
    slot = tl.program_id(1)
    wait_then_release(PDL)
    choice = expert_choice(logits, bias, EXPERTS)[1]
    expert = top_of(choice, slot, EXPERTS, TOP).to(tl.int64)
    base = w13 + expert * 2 * inter * K
    result = _gate_up(base, row, x, norm_weight, inter, eps, K, BLOCK_K, ROWS, STAGES, ALPHA, BETA, LIMIT, False, PDL)
    tl.store(hidden + slot * inter + row + tl.arange(0, ROWS), result)


@triton.jit
def _down(
    logits, bias, w2, shared_w2, hidden, shared_hidden, x, width, scaling_factor,
    EXPERTS: tl.constexpr, TOP: tl.constexpr, INTER: tl.constexpr, BLOCK: tl.constexpr,
    SHARED_INTER: tl.constexpr, SHARED_BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    shared_column = tl.arange(0, SHARED_BLOCK)
    shared_at = shared_w2 + row[:, None].to(tl.int64) * SHARED_INTER + shared_column[None, :]
    shared_tile = tl.load(shared_at, eviction_policy="evict_first")
    if TOP > 0:
        _, choice = expert_choice(logits, bias, EXPERTS)
        slot = tl.arange(0, TOP)
        expert = top_of(choice, slot, EXPERTS, TOP).to(tl.int64)
        share = tl.sigmoid(tl.load(logits + expert, cache_modifier=FRESH))
        share = share * (scaling_factor / tl.sum(share, axis=0))
        column = tl.arange(0, BLOCK)
        at = w2 + (expert[:, None, None] * width + row[None, :, None]) * INTER + column[None, None, :]
        tile = tl.load(at, eviction_policy="evict_first")
    wait_then_release(PDL)
    shared = shared_tile.to(tl.float32) * tl.load(shared_hidden + shared_column, cache_modifier=FRESH)[None, :]
    for k in tl.range(SHARED_BLOCK, SHARED_INTER, SHARED_BLOCK, num_stages=STAGES):
        more = tl.load(shared_at + k).to(tl.float32)
        shared += more * tl.load(shared_hidden + k + shared_column, cache_modifier=FRESH)[None, :]
    y = tl.sum(shared, axis=1)
    if TOP > 0:
        h_at = hidden + slot[:, None] * INTER + column[None, :]
        total = tile.to(tl.float32) * (tl.load(h_at, cache_modifier=FRESH) * share[:, None])[:, None, :]
        for k in tl.range(BLOCK, INTER, BLOCK, num_stages=STAGES):
            more = tl.load(at + k).to(tl.float32)
            total += more * (tl.load(h_at + k, cache_modifier=FRESH) * share[:, None])[:, None, :]
        y += tl.sum(tl.sum(total, axis=2), axis=0)
    y += tl.load(x + row, cache_modifier=FRESH).to(tl.float32)
    tl.store(x + row, y.to(x.dtype.element_ty))


@dataclass(frozen=True)
class MoeOnePlan:
    """Rows of a program and its warps: gate and up (each), then down."""

    in_rows: int = 2
    in_warps: int = 4
    down_rows: int = 8
    down_warps: int = 8

    @staticmethod
    def default(width: int) -> MoeOnePlan:
        """What measured best at hidden widths 2,048 and 6,144 (docs/performance.md)."""
        return MoeOnePlan() if width <= 4096 else MoeOnePlan(in_warps=2, down_warps=4)


def moe_one_token(
    x: Tensor, norm_weight: Tensor, router_weight: Tensor, bias: Tensor, w13: Tensor, w2: Tensor,
    shared_w13: Tensor, shared_w2: Tensor, logits: Tensor, hidden: Tensor, *, top_experts: int,
    scaling_factor: float, alpha: float = 1.702, beta: float = 1.0, limit: float = 7.0, eps: float = 1e-6,
    plan: MoeOnePlan | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """x += MoE(norm(x)) for x [1, n] (bf16 or fp32), in place.

    router_weight fp32 [E, n] and bias fp32 [E], E a power of two; w13 [E, 2i, n] (rows gate then up) and w2 [E, n, i];
    the shared expert's shared_w13 [2s, n] and shared_w2 [n, s]. `top_experts` is a power of two; with 0 the layer is a
    plain MLP of the shared weights and the router's arguments are not read. Scratch: logits fp32 [E], hidden fp32 [top
    * i + s].
    """
    n = x.shape[1]
    plan = plan or MoeOnePlan.default(n)
    shared_inter = shared_w2.shape[1]
    inter = w2.shape[2] if top_experts else 0
    experts = router_weight.shape[0]
    shared_hidden = hidden[top_experts * inter :]
    form = {"ALPHA": alpha, "BETA": beta, "LIMIT": limit}
    more = {"PDL": pdl, **launch_options(pdl)}
    block = row_block(n)
    router_programs = experts // 4 if top_experts else 0
    _router_shared[(router_programs + shared_inter // plan.in_rows,)](
        x, norm_weight, router_weight, shared_w13, logits, shared_hidden, shared_inter, eps,
        K=n, BLOCK_K=block, EXPERT_ROWS=4, ROUTER_PROGRAMS=router_programs,
        ROWS=plan.in_rows, STAGES=3, num_warps=plan.in_warps, **form, **more,
    )  # fmt: skip
    if top_experts:
        _routed_in[(inter // plan.in_rows, top_experts)](
            x, norm_weight, logits, bias, w13, hidden, inter, eps,
            EXPERTS=experts, TOP=top_experts, K=n, BLOCK_K=block, ROWS=plan.in_rows, STAGES=3,
            num_warps=plan.in_warps, **form, **more,
        )  # fmt: skip
    _down[(n // plan.down_rows,)](
        logits, bias, w2, shared_w2, hidden, shared_hidden, x, n, scaling_factor,
        EXPERTS=experts, TOP=top_experts, INTER=max(inter, 1), BLOCK=largest_power_of_two(max(inter, 1), 512),
        SHARED_INTER=shared_inter, SHARED_BLOCK=largest_power_of_two(shared_inter, 2048 if not top_experts else 512),
        ROWS=plan.down_rows, STAGES=3, num_warps=plan.down_warps, **more,
    )  # fmt: skip
