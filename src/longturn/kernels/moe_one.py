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

from longturn.kernels.dependent import FRESH, launch_options, release_then_wait, wait_then_release
from longturn.kernels.moe_choice import expert_choice
from longturn.kernels.moe_choice import swiglu_oai as swiglu_oai  # exported from here too
from longturn.kernels.moe_choice import top_of as top_of
from longturn.kernels.packed_weights import PackedWeight, WeightFormat, as_packed
from longturn.kernels.packed_weights_decode import MXFP8_WORDS, NVFP4_WORDS, decode, load_scales, part_columns
from longturn.kernels.small_linear import largest_power_of_two, matvec, packed_block, row_block


@triton.jit
def _gate_up(
    words, scales, row_scales, expert, row, x, norm_weight, inter, eps,
    K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr, WAIT: tl.constexpr, PDL: tl.constexpr,
    PARTS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The activation of rows `row`.. of one expert (int64), fp32 [ROWS]: gate and up rows in one tile."""
    both = tl.arange(0, 2 * ROWS)
    of = expert * 2 * inter + row + both % ROWS + (both // ROWS) * inter
    y = matvec(
        words, scales, row_scales, of.to(tl.int64), both >= 0, x, norm_weight, eps,
        K, BLOCK_K, True, STAGES, WAIT, PDL, PARTS, ASM,
    )  # fmt: skip
    y = tl.reshape(y, [2, ROWS])
    is_gate = (tl.arange(0, 2) == 0)[:, None]
    gate = tl.sum(tl.where(is_gate, y, 0.0), axis=0)
    up = tl.sum(tl.where(is_gate, 0.0, y), axis=0)
    return swiglu_oai(gate, up, ALPHA, BETA, LIMIT)


@triton.jit
def _router_shared(
    x, norm_weight, router_weight, words, scales, row_scales, logits, hidden, inter, eps,
    K: tl.constexpr, BLOCK_K: tl.constexpr, ROUTER_BLOCK: tl.constexpr, EXPERT_ROWS: tl.constexpr,
    ROUTER_PROGRAMS: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr, PDL: tl.constexpr,
    PARTS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < ROUTER_PROGRAMS:
        expert = program * EXPERT_ROWS + tl.arange(0, EXPERT_ROWS)
        y = matvec(
            router_weight, router_weight, router_weight, expert.to(tl.int64), expert >= 0, x, norm_weight, eps,
            K, ROUTER_BLOCK, True, STAGES, True, PDL, 1, ASM,
        )  # fmt: skip
        tl.store(logits + expert, y)
    else:
        row = (program - ROUTER_PROGRAMS) * ROWS
        result = _gate_up(
            words, scales, row_scales, 0, row, x, norm_weight, inter, eps,
            K, BLOCK_K, ROWS, STAGES, ALPHA, BETA, LIMIT, True, PDL, PARTS, ASM,
        )  # fmt: skip
        tl.store(hidden + row + tl.arange(0, ROWS), result)


@triton.jit
def _routed_in(
    x, norm_weight, logits, bias, words, scales, row_scales, hidden, inter, eps,
    EXPERTS: tl.constexpr, TOP: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
    STAGES: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr, PDL: tl.constexpr,
    PARTS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS
    slot = tl.program_id(1)
    wait_then_release(PDL)
    choice = expert_choice(logits, bias, EXPERTS)[1]
    expert = top_of(choice, slot, EXPERTS, TOP).to(tl.int64)
    result = _gate_up(
        words, scales, row_scales, expert, row, x, norm_weight, inter, eps,
        K, BLOCK_K, ROWS, STAGES, ALPHA, BETA, LIMIT, False, PDL, PARTS, ASM,
    )  # fmt: skip
    tl.store(hidden + slot * inter + row + tl.arange(0, ROWS), result)


@triton.jit
def _scales_of_pairs(scales, pair, at, W: tl.constexpr, PARTS: tl.constexpr, K: tl.constexpr):
    """`load_scales` for rows in two dimensions, int64 [S, R]: bytes [S, R, words of a tile / words of a group]."""
    if PARTS == 1:
        return pair
    elif PARTS == 4:
        group = tl.arange(0, W // NVFP4_WORDS) + at // (4 * NVFP4_WORDS)
        return tl.load(scales + pair[:, :, None] * (K // (4 * NVFP4_WORDS)) + group[None, None, :])
    else:
        group = tl.arange(0, W // MXFP8_WORDS) + at // (2 * MXFP8_WORDS)
        return tl.load(scales + pair[:, :, None] * (K // (2 * MXFP8_WORDS)) + group[None, None, :])


@triton.jit
def _down(
    logits, bias, words, scales, row_scales, shared_words, shared_scales, shared_row_scales,
    hidden, shared_hidden, x, width, scaling_factor,
    EXPERTS: tl.constexpr, TOP: tl.constexpr, INTER: tl.constexpr, BLOCK: tl.constexpr,
    SHARED_INTER: tl.constexpr, SHARED_BLOCK: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    FIRST: tl.constexpr, PDL: tl.constexpr, PARTS: tl.constexpr, SHARED_PARTS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    wide_row = row.to(tl.int64)
    ok = row >= 0
    SHARED_W: tl.constexpr = SHARED_BLOCK // SHARED_PARTS
    shared_word = tl.arange(0, SHARED_W)
    shared_at = shared_words + wide_row[:, None] * (SHARED_INTER // SHARED_PARTS) + shared_word[None, :]
    shared_tile = tl.load(shared_at, eviction_policy="evict_first")
    shared_scale = load_scales(shared_scales, wide_row, 0, ok, SHARED_W, SHARED_PARTS, SHARED_INTER)
    if SHARED_PARTS > 1:
        shared_factor = tl.load(shared_row_scales + row)
    if TOP > 0:
        _, choice = expert_choice(logits, bias, EXPERTS)
        slot = tl.arange(0, TOP)
        expert = top_of(choice, slot, EXPERTS, TOP).to(tl.int64)
        share = tl.sigmoid(tl.load(logits + expert, cache_modifier=FRESH))
        share = share * (scaling_factor / tl.sum(share, axis=0))
        W: tl.constexpr = BLOCK // PARTS
        word = tl.arange(0, W)
        pair = expert[:, None] * width + row[None, :]
        at = words + pair[:, :, None] * (INTER // PARTS) + word[None, None, :]
        tile = tl.load(at, eviction_policy="evict_first")
        scale = _scales_of_pairs(scales, pair, 0, W, PARTS, INTER)
        if PARTS > 1:
            factor = tl.load(row_scales + pair)
    if FIRST:
        release_then_wait(PDL)
    else:
        wait_then_release(PDL)
    shared = tl.zeros([ROWS, SHARED_W], dtype=tl.float32)
    shared_parts = decode(shared_tile, shared_scale, SHARED_PARTS, ASM, True)
    for j in tl.static_range(SHARED_PARTS):
        h = tl.load(shared_hidden + part_columns(shared_word, j, SHARED_PARTS), cache_modifier=FRESH)
        shared += shared_parts[j].to(tl.float32) * h[None, :]
    for k in tl.range(SHARED_BLOCK, SHARED_INTER, SHARED_BLOCK, num_stages=STAGES):
        more = tl.load(shared_at + k // SHARED_PARTS)
        more_scale = load_scales(shared_scales, wide_row, k, ok, SHARED_W, SHARED_PARTS, SHARED_INTER)
        more_parts = decode(more, more_scale, SHARED_PARTS, ASM, True)
        for j in tl.static_range(SHARED_PARTS):
            h = tl.load(shared_hidden + k + part_columns(shared_word, j, SHARED_PARTS), cache_modifier=FRESH)
            shared += more_parts[j].to(tl.float32) * h[None, :]
    y = tl.sum(shared, axis=1)
    if SHARED_PARTS > 1:
        y = y * shared_factor
    if TOP > 0:
        h_at = hidden + slot[:, None] * INTER
        total = tl.zeros([TOP, ROWS, W], dtype=tl.float32)
        parts = decode(tile, scale, PARTS, ASM, True)
        for j in tl.static_range(PARTS):
            h = tl.load(h_at + part_columns(word, j, PARTS)[None, :], cache_modifier=FRESH)
            total += parts[j].to(tl.float32) * (h * share[:, None])[:, None, :]
        for k in tl.range(BLOCK, INTER, BLOCK, num_stages=STAGES):
            more = tl.load(at + k // PARTS)
            parts = decode(more, _scales_of_pairs(scales, pair, k, W, PARTS, INTER), PARTS, ASM, True)
            for j in tl.static_range(PARTS):
                h = tl.load(h_at + (k + part_columns(word, j, PARTS))[None, :], cache_modifier=FRESH)
                total += parts[j].to(tl.float32) * (h * share[:, None])[:, None, :]
        by_slot = tl.sum(total, axis=2)
        if PARTS > 1:
            by_slot = by_slot * factor
        y += tl.sum(by_slot, axis=0)
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
    def default(width: int, form: WeightFormat = WeightFormat.PLAIN) -> MoeOnePlan:
        """What measured best at hidden widths 2,048 and 6,144 (docs/performance.md)."""
        if form is not WeightFormat.PLAIN:
            return MoeOnePlan(in_rows=4, down_warps=4)
        return MoeOnePlan() if width <= 4096 else MoeOnePlan(in_warps=2, down_warps=4)


def pays_at_one_token(w13: Tensor | PackedWeight) -> bool:
    """Whether `moe_one_token` is faster than `moe_few_tokens` for one token: it is for plain weights.

    Outside the tensor cores a code costs about six instructions, inside them three, which outweighs two launches more:
    a step of the 8 true-width layers at one row took 2.12 ms this way and 1.88 ms that way.
    """
    return as_packed(w13).format is WeightFormat.PLAIN


def moe_one_token(
    x: Tensor, norm_weight: Tensor, router_weight: Tensor, bias: Tensor, w13: Tensor | PackedWeight,
    w2: Tensor | PackedWeight, shared_w13: Tensor | PackedWeight, shared_w2: Tensor | PackedWeight, logits: Tensor,
    hidden: Tensor, *, top_experts: int, scaling_factor: float, alpha: float = 1.702, beta: float = 1.0,
    limit: float = 7.0, eps: float = 1e-6, plan: MoeOnePlan | None = None,
    release_first: bool = False, pdl: bool = False,
) -> None:  # fmt: skip
    """x += MoE(norm(x)) for x [1, n] (bf16 or fp32), in place.

    router_weight fp32 [E, n] and bias fp32 [E], E a power of two; w13 [E, 2i, n] (rows gate then up) and w2 [E, n, i],
    of one format; the shared expert's shared_w13 [2s, n] and shared_w2 [n, s], likewise. `top_experts` is a power of
    two; with 0 the layer is a plain MLP of the shared weights and the router's arguments are not read. Scratch: logits
    fp32 [E], hidden fp32 [top * i + s]. `release_first`: the kernel that follows may start loading its weights while
    `routed_in` still runs (it must read nothing else ahead of its wait); worth it only if it has room to.
    """
    n = x.shape[1]
    shared_in, shared_out = as_packed(shared_w13), as_packed(shared_w2)
    # Without routed experts theirs are not read, and may be of any format.
    routed_in, routed_out = (as_packed(w13), as_packed(w2)) if top_experts else (shared_in, shared_out)
    plan = plan or MoeOnePlan.default(n, routed_in.format)
    shared_inter = shared_out.shape[1]
    inter = routed_out.shape[2] if top_experts else 0
    experts = router_weight.shape[0]
    shared_hidden = hidden[top_experts * inter :]
    form = {"ALPHA": alpha, "BETA": beta, "LIMIT": limit}
    more = {"PDL": pdl, "ASM": x.is_cuda, **launch_options(pdl)}
    block = row_block(n)
    router_programs = experts // 4 if top_experts else 0
    _router_shared[(router_programs + shared_inter // plan.in_rows,)](
        x, norm_weight, router_weight, shared_in.words, shared_in.scales, shared_in.row_scales, logits, shared_hidden,
        shared_inter, eps, K=n, BLOCK_K=packed_block(n, shared_in), ROUTER_BLOCK=block, EXPERT_ROWS=4,
        ROUTER_PROGRAMS=router_programs, ROWS=plan.in_rows, STAGES=3, PARTS=int(shared_in.format),
        num_warps=plan.in_warps, **form, **more,
    )  # fmt: skip
    if top_experts:
        _routed_in[(inter // plan.in_rows, top_experts)](
            x, norm_weight, logits, bias, routed_in.words, routed_in.scales, routed_in.row_scales, hidden, inter, eps,
            EXPERTS=experts, TOP=top_experts, K=n, BLOCK_K=packed_block(n, routed_in), ROWS=plan.in_rows, STAGES=3,
            PARTS=int(routed_in.format), num_warps=plan.in_warps, **form, **more,
        )  # fmt: skip
    shared_most = (2048 if not top_experts else 512) * int(shared_out.format)
    _down[(n // plan.down_rows,)](
        logits, bias, routed_out.words, routed_out.scales, routed_out.row_scales,
        shared_out.words, shared_out.scales, shared_out.row_scales, hidden, shared_hidden, x, n, scaling_factor,
        EXPERTS=experts, TOP=top_experts, INTER=max(inter, 1),
        BLOCK=largest_power_of_two(max(inter, 1), 512 * int(routed_out.format)), SHARED_INTER=shared_inter,
        SHARED_BLOCK=largest_power_of_two(shared_inter, shared_most), ROWS=plan.down_rows, STAGES=3,
        PARTS=int(routed_out.format), SHARED_PARTS=int(shared_out.format), FIRST=release_first,
        num_warps=plan.down_warps, **more,
    )  # fmt: skip
