"""Mixture of experts for 2 to 64 tokens (quantised weights: from 1): five launches, nothing permuted, every chosen
expert's weights read once (moe_few_kernels.py).

    logits          `small_linear`, exact, or `_router`, or `_router_wide`
    choose          top experts and their shares of each token, and the normalised token
    experts_in      a program is (pair of token and choice, tile of rows); the first pair of each expert gathers all
                    tokens that chose it, the others leave at once, so no list of experts is built beforehand
    experts_down    the same for the down projection, one output row a pair
    combine         residual plus shared plus the weighted sum, in a fixed order, so that runs agree to the bit

The shared expert takes part as further programs of the same two launches. On a Hopper card both are one launch for
NVFP4 experts of 2 to 8 tokens beside a shared one in MXFP8 (moe_stream.py). A dense layer's down projection, where it
is quantised and its tokens are few, is a matrix like any other (packed_linear_rows.py) and ends the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from longturn.kernels.dependent import launch_options
from longturn.kernels.moe_few_kernels import (
    _choose,
    _combine,
    _combine_norm,
    _experts_down,
    _experts_in,
    _router,
    _router_wide,
)
from longturn.kernels.moe_stream import stream_experts, stream_slots
from longturn.kernels.norm import add_norm
from longturn.kernels.packed_linear_rows import ring_plan
from longturn.kernels.packed_weights import PackedWeight, WeightFormat, as_packed
from longturn.kernels.small_linear import as_operand, largest_power_of_two, row_block, small_linear

_ROUTER_BLOCK, _ROUTER_TOKENS = 1024, 8
"""Columns and tokens of a tile of `_router_wide`, for rows longer than 2,048."""
_TURN_COLUMNS = 4096
"""Columns of all tiles of a program of the down projection, at most, if it takes several."""


@dataclass(frozen=True)
class MoeScratch:
    """Buffers of one step, shared by all layers; P pairs are tokens times choices."""

    logits: Tensor
    """fp32 [tokens, E]."""
    normed: Tensor
    """[tokens, n] of the weights' type."""
    experts: Tensor
    """int32 [P], -1 for a padded row's."""
    shares: Tensor
    """fp32 [P]."""
    hidden: Tensor
    """Flat, of the weights' type: room for [P + tokens, i], and for [tokens, dense inner width]."""
    parts: Tensor
    """fp32 [P + tokens, n]."""
    counters: Tensor
    """int32 [4], which `choose` sets to 0, for moe_stream.py: programs that have finished the first product, and tiles
    of either product that were asked for."""

    @staticmethod
    def allocate(
        tokens: int, experts: int, top: int, width: int, inter: int, like: Tensor, dense_inter: int = 0
    ) -> MoeScratch:
        """Uninitialised buffers on the device and of the element type of `like`."""
        pairs = tokens * top

        def fp32(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.float32, device=like.device)

        return MoeScratch(
            logits=fp32(tokens, experts),
            normed=like.new_empty(tokens, width),
            experts=torch.empty(pairs, dtype=torch.int32, device=like.device),
            shares=fp32(pairs),
            hidden=like.new_empty(max((pairs + tokens) * inter, tokens * dense_inter)),
            parts=fp32(pairs + tokens, width),
            counters=torch.empty(4, dtype=torch.int32, device=like.device),
        )


@dataclass(frozen=True)
class MoePlan:
    """Rows of a weight tile (of gate and of up each, then of down), its columns, pipeline stages and warps; tokens of a
    tile, of which an expert that more tokens chose takes several, its weights then from L2.

    Fewer than four warps give up warp-group products, which take 64 rows and make four warps wait for each other.
    """

    in_rows: int = 64
    in_block: int = 128
    down_rows: int = 128
    down_block: int = 128
    stages: int = 3
    warps: int = 4
    token_tile: int = 16
    down_stages: int = 0
    """Of the down projection; 0 for as many as `stages`."""
    down_turns: int = 1
    """Tiles of plain routed weights of the down projection that a program takes, one after the other, where their rows
    are short."""
    in_dependent: bool = True
    """Whether the first product is launched dependently, if the others are: at one token it gains nothing from an early
    start, and its successor's programs would take places beside it."""
    stream: bool = False
    """Whether both products are one launch (moe_stream.py) where they can be; its tiles are not this plan's."""

    @staticmethod
    def default(form: WeightFormat, tokens: int, width: int = 0) -> MoePlan:
        """What measured best (docs/performance.md); `width` of the hidden state, 0 for any.

        In two warps decoding and products alternate; four would wait for the products of every part of a word.
        """
        if form is not WeightFormat.PLAIN and tokens <= 16:
            return MoePlan(
                in_rows=32,
                in_block=256,
                down_rows=64,
                down_block=256,
                warps=2,
                token_tile=8,
                in_dependent=tokens > 1,
                stream=tokens > 1,
            )
        if form is not WeightFormat.PLAIN:
            return MoePlan(in_block=256, down_block=256)
        if width > 2048 and 4 < tokens <= 16:
            return MoePlan(stages=4, down_stages=3)
        # Some fifty experts of 16 tokens are as many programs as fit at once, if each takes a quarter of one.
        return MoePlan(down_turns=4 if 8 < tokens <= 16 else 1)


def block_of(weight: PackedWeight, width: int, most: int) -> int:
    """Columns of a tile; plain weights, two bytes a value, would fill shared memory with more than 128."""
    return largest_power_of_two(width, min(most, 128) if weight.format is WeightFormat.PLAIN else most)


def moe_few_tokens(
    x: Tensor, positions: Tensor, norm_weight: Tensor, router_weight: Tensor, bias: Tensor,
    w13: Tensor | PackedWeight, w2: Tensor | PackedWeight, shared_w13: Tensor | PackedWeight,
    shared_w2: Tensor | PackedWeight, scratch: MoeScratch, *, top_experts: int, scaling_factor: float,
    alpha: float = 1.702, beta: float = 1.0, limit: float = 7.0, eps: float = 1e-6, plan: MoePlan | None = None,
    next_norm: Tensor | None = None, next_packed: bool = False, pdl: bool = False,
) -> None:  # fmt: skip
    """x += MoE(norm(x)) for x [tokens, n], in place; rows with position -1 are computed without routed experts.

    router_weight fp32 [E, n] and bias fp32 [E], E a power of two; w13 [E, 2i, n] (rows gate then up) and w2 [E, n, i],
    of one format; the shared expert's shared_w13 [2i, n] and shared_w2 [n, i], likewise, have the same inner width.
    With `top_experts` 0 the layer is a plain MLP of the shared weights: router_weight still tells E, w13 and w2 are
    not read. With `next_norm` [n], scratch.normed is norm(x) by it afterwards, for the projection that follows, in the
    type of a quantised one's operands if it is `next_packed`.
    """
    tokens, n = x.shape
    shared_in, shared_out = as_packed(shared_w13), as_packed(shared_w2)
    # Without routed experts theirs are not read, and may be of any format.
    routed_in, routed_out = (as_packed(w13), as_packed(w2)) if top_experts else (shared_in, shared_out)
    plan = plan or MoePlan.default(routed_in.format, tokens, n)
    experts, inter = router_weight.shape[0], shared_out.shape[1]
    pairs = tokens * top_experts
    slots = pairs + triton.cdiv(tokens, plan.token_tile)
    more = {"PDL": pdl, **launch_options(pdl)}
    common = {
        "PAIRS": pairs, "SPAN": triton.next_power_of_2(max(pairs, 1)), "TILE": plan.token_tile, "STAGES": plan.stages,
        "PARTS": int(routed_in.format), "SHARED_PARTS": int(shared_in.format), "ASM": x.is_cuda,
    }  # fmt: skip
    normed, hidden = scratch.normed, scratch.hidden
    next_normed = as_operand(scratch.normed) if next_packed else scratch.normed
    if WeightFormat.PLAIN not in (routed_in.format, shared_in.format):
        normed, hidden = as_operand(normed), as_operand(hidden)
    block = largest_power_of_two(n, 2048)
    if top_experts and tokens > 16 and row_block(n) == n:
        _router[(experts // 4, triton.cdiv(tokens, 4))](
            x, norm_weight, router_weight, scratch.logits, tokens, eps, EXPERTS=experts, K=n, ROWS=4, num_warps=4,
            **more,
        )  # fmt: skip
    elif top_experts and tokens > 1 and n % _ROUTER_BLOCK == 0 and n > 2048:
        _router_wide[(experts, triton.cdiv(tokens, _ROUTER_TOKENS))](
            x, norm_weight, router_weight, scratch.logits, tokens, eps, EXPERTS=experts, K=n, BLOCK=_ROUTER_BLOCK,
            TOKENS=_ROUTER_TOKENS, num_warps=8, **more,
        )  # fmt: skip
    elif top_experts:
        small_linear(x, router_weight, scratch.logits, norm_weight=norm_weight, eps=eps, exact=True, pdl=pdl)
    _choose[(tokens,)](
        scratch.logits, bias, positions, x, norm_weight, normed, scratch.experts, scratch.shares, scratch.counters,
        scaling_factor, eps, EXPERTS=experts, TOP=top_experts, K=n, BLOCK_K=block, WARPS=4, num_warps=4, **more,
    )  # fmt: skip
    stream = stream_slots(normed, pairs, routed_in, shared_in, inter) if plan.stream else 0
    if stream:
        stream_experts(
            normed, scratch.experts, routed_in, routed_out, shared_in, shared_out, hidden, scratch.parts,
            scratch.counters, stream, top=top_experts, alpha=alpha, beta=beta, limit=limit, flags=more,
        )  # fmt: skip
        _combine_all(scratch, x, next_norm, next_normed, top_experts, eps, more)
        return
    _experts_in[(inter // plan.in_rows, slots)](
        normed, scratch.experts, routed_in.words, routed_in.scales, routed_in.row_scales,
        shared_in.words, shared_in.scales, shared_in.row_scales, hidden, tokens, inter,
        TOP=top_experts, K=n, BLOCK_K=block_of(routed_in, n, plan.in_block),
        SHARED_BLOCK_K=block_of(shared_in, n, plan.in_block), ROWS=plan.in_rows,
        ALPHA=alpha, BETA=beta, LIMIT=limit, num_warps=plan.warps, **common,
        **(more if plan.in_dependent else {"PDL": False}),
    )  # fmt: skip
    if not top_experts:
        inner = hidden[: tokens * inter].view(tokens, inter)
        if ring_plan(inner, shared_out) is not None:
            # A matrix of its own: no list of pairs, and the residual added at once.
            small_linear(inner, shared_out, x, residual=x, pdl=pdl)
            if next_norm is not None:
                add_norm(x, next_norm, next_normed, eps=eps, pdl=pdl)
            return
    turns = 1
    if top_experts and {routed_out.format, shared_out.format} == {WeightFormat.PLAIN}:
        turns = min(plan.down_turns, max(1, _TURN_COLUMNS // inter))
        while turns > 1 and n % (plan.down_rows * turns):
            turns -= 1
    _experts_down[(n // (plan.down_rows * turns), slots)](
        hidden, scratch.experts, routed_out.words, routed_out.scales, routed_out.row_scales,
        shared_out.words, shared_out.scales, shared_out.row_scales, scratch.parts, tokens, n,
        INTER=inter, BLOCK=block_of(routed_out, inter, plan.down_block),
        SHARED_BLOCK=block_of(shared_out, inter, plan.down_block), ROWS=plan.down_rows, TURNS=turns,
        num_warps=plan.warps, **{**common, "STAGES": plan.down_stages or plan.stages}, **more,
    )  # fmt: skip
    _combine_all(scratch, x, next_norm, next_normed, top_experts, eps, more)


def _combine_all(
    scratch: MoeScratch, x: Tensor, next_norm: Tensor | None, next_normed: Tensor, top: int, eps: float,
    more: dict[str, Any],
) -> None:  # fmt: skip
    """Add all parts to x, and normalise for the next projection where that is asked for."""
    tokens, n = x.shape
    pairs = tokens * top
    if next_norm is not None:
        _combine_norm[(tokens,)](
            scratch.parts, scratch.experts, scratch.shares, x, next_norm, next_normed, eps,
            TOP=top, PAIRS=pairs, K=n, BLOCK=largest_power_of_two(n, 2048), num_warps=8 if n <= 2048 else 16, **more,
        )  # fmt: skip
        return
    block = largest_power_of_two(n, 512)
    _combine[(tokens, n // block)](
        scratch.parts, scratch.experts, scratch.shares, x, n, TOP=top, PAIRS=pairs, BLOCK=block, num_warps=4, **more
    )
