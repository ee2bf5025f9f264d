"""Mixture of experts for steps with many tokens: six launches, none of which knows a length on the host.

The kernels are in `moe_many_route.py` and `moe_many_experts.py`. Every output row is computed by one program and every
sum has a fixed order, so runs agree to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from longturn.kernels.dependent import launch_options
from longturn.kernels.moe_many_experts import combine_experts, experts_down, experts_in
from longturn.kernels.moe_many_route import choose_experts, router_logits, sort_choices
from longturn.kernels.small_linear import largest_power_of_two


@dataclass(frozen=True)
class MoeManyPlan:
    """Tile sizes of a bucket. `tile` is the tokens of an expert tile."""

    tile: int
    in_columns: int = 64
    in_block: int = 64
    in_stages: int = 3
    in_warps: int = 4
    down_columns: int = 128
    down_block: int = 64
    down_stages: int = 3
    down_warps: int = 4
    router_tokens: int = 64
    router_parts: int = 4
    router_block: int = 32

    @staticmethod
    def default(tokens: int, experts: int, top_experts: int) -> MoeManyPlan:
        """A plan for a bucket of `tokens` tokens."""
        each = tokens * max(top_experts, 1) / experts if top_experts else tokens
        parts = 16 if tokens <= 256 else 8 if tokens <= 1024 else 4
        if each <= 12:
            return MoeManyPlan(tile=16, in_block=128, down_block=128, router_parts=parts)
        if each <= 48:
            return MoeManyPlan(tile=32, in_block=128, down_block=128, router_parts=parts)
        if each <= 96:
            return MoeManyPlan(tile=64, router_parts=parts)
        wide = MoeManyPlan(tile=128, in_columns=128, down_columns=256, router_parts=parts)
        return replace(wide, in_stages=4, in_warps=8, down_stages=4, down_warps=8)


@dataclass(frozen=True)
class MoeManyScratch:
    """Buffers of one step, shared by all layers and by every smaller bucket: each is flat, and a step of T tokens uses
    its beginning."""

    logits: Tensor
    """fp32 [router parts, T, E]; a small step has more parts than a large one."""
    squares: Tensor
    """fp32 [router parts, T]."""
    normed: Tensor
    """[T, n] of the weights' type."""
    experts: Tensor
    """int32 [T, k], -1 for padding."""
    shares: Tensor
    """fp32 [T, k]."""
    ranks: Tensor
    """int32 [T, k]."""
    counts: Tensor
    """int32 [E]."""
    first_tile: Tensor
    """int32 [E]."""
    tile_expert: Tensor
    """int32 [tiles]."""
    total_tiles: Tensor
    """int32 [1]; stays 0 where a layer has no routed experts."""
    sorted_choices: Tensor
    """int32 [tiles, tile]."""
    hidden: Tensor
    """[tiles * tile, i] of the weights' type, shared tiles included."""
    parts: Tensor
    """[T + T * k, n] of the weights' type."""
    no_tiles: Tensor
    """int32 [1], always 0: what a dense layer reads for `total_tiles`."""

    @staticmethod
    def allocate(
        tokens: int, experts: int, top_experts: int, width: int, inter: int, like: Tensor, dense_inter: int = 0
    ) -> MoeManyScratch:
        """Uninitialised buffers for up to `tokens` tokens under any plan, on the device and of the type of `like`."""
        choices = tokens * top_experts
        # Padding to whole tiles costs each expert at most a tile of 128, and a small bucket has small tiles.
        padded = choices + min(experts, choices) * 128
        shared = tokens + 128
        sums = max(4 * tokens, min(16 * tokens, 8192))

        def of(dtype: torch.dtype, size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=like.device)

        return MoeManyScratch(
            logits=of(torch.float32, sums * experts),
            squares=of(torch.float32, sums),
            normed=of(like.dtype, tokens * width),
            experts=of(torch.int32, choices),
            shares=of(torch.float32, choices),
            ranks=of(torch.int32, choices),
            counts=of(torch.int32, experts),
            first_tile=of(torch.int32, experts),
            tile_expert=of(torch.int32, padded // 16 + 1),
            total_tiles=of(torch.int32, 1),
            sorted_choices=of(torch.int32, padded),
            hidden=of(like.dtype, max((padded + shared) * inter, shared * dense_inter)),
            parts=of(like.dtype, (tokens + choices) * width),
            no_tiles=torch.zeros(1, dtype=torch.int32, device=like.device),
        )


def moe_many_tokens(
    x: Tensor, positions: Tensor, norm_weight: Tensor, router_weight: Tensor, bias: Tensor, w13: Tensor, w2: Tensor,
    shared_w13: Tensor, shared_w2: Tensor, scratch: MoeManyScratch, *, top_experts: int, scaling_factor: float,
    alpha: float = 1.702, beta: float = 1.0, limit: float = 7.0, eps: float = 1e-6, plan: MoeManyPlan | None = None,
    pdl: bool = False,
) -> None:  # fmt: skip
    """x += MoE(norm(x)) for x [T, n], in place; padding (position -1) is computed without routed experts.

    router_weight fp32 [E, n] and bias fp32 [E], E a power of two; w13 [E, 2i, n] (rows gate then up) and w2 [E, n, i];
    the shared expert's shared_w13 [2i, n] and shared_w2 [n, i] have the same inner width; `top_experts` is a power of
    two. With `top_experts` 0 the layer is a plain MLP of the shared weights, w13 and w2 are not read and may be the
    shared ones.
    """
    tokens, n = x.shape
    experts, inter = router_weight.shape[0], shared_w2.shape[1]
    plan = plan or MoeManyPlan.default(tokens, experts, top_experts)
    more = {"PDL": pdl, **launch_options(pdl)}
    parts = min(plan.router_parts, scratch.squares.numel() // tokens)
    while parts > 1 and n % (parts * plan.router_block):
        parts -= 1
    choices = tokens * top_experts
    shared_tiles = triton.cdiv(tokens, plan.tile)
    # At most: every expert's last tile is not full, or every choice has a tile of its own.
    tiles = shared_tiles + min(choices // plan.tile + experts, choices)
    total_tiles = scratch.total_tiles if top_experts else scratch.no_tiles
    if top_experts:
        router_logits[(triton.cdiv(tokens, plan.router_tokens), parts)](
            x, norm_weight, router_weight, scratch.logits, scratch.squares, scratch.counts, tokens,
            EXPERTS=experts, K=n, BLOCK_K=largest_power_of_two(n // parts, plan.router_block), PARTS=parts,
            TOKENS=plan.router_tokens, STAGES=3, num_warps=4, **more,
        )  # fmt: skip
    choose_experts[(tokens,)](
        x, norm_weight, positions, scratch.logits, scratch.squares, bias, scratch.normed, scratch.experts,
        scratch.shares, scratch.ranks, scratch.counts, tokens, scaling_factor, eps,
        EXPERTS=experts, TOP=top_experts, K=n, BLOCK_K=largest_power_of_two(n, 2048), PARTS=parts, num_warps=4, **more,
    )  # fmt: skip
    if top_experts:
        sort_choices[(triton.cdiv(choices, 512),)](
            scratch.experts, scratch.ranks, scratch.counts, scratch.sorted_choices, scratch.tile_expert,
            scratch.first_tile, scratch.total_tiles, choices,
            EXPERTS=experts, TILE=plan.tile, SPAN=512, num_warps=4, **more,
        )  # fmt: skip
    lists = (
        scratch.sorted_choices, scratch.tile_expert, scratch.first_tile, scratch.counts, total_tiles, tokens,
        shared_tiles,
    )  # fmt: skip
    columns = largest_power_of_two(inter, plan.in_columns)
    experts_in[(inter // columns, tiles)](
        scratch.normed, w13, shared_w13, scratch.hidden, *lists,
        TOP=top_experts, K=n, INTER=inter, TILE=plan.tile, COLUMNS=columns,
        BLOCK_K=largest_power_of_two(n, plan.in_block), STAGES=plan.in_stages, ALPHA=alpha, BETA=beta, LIMIT=limit,
        num_warps=plan.in_warps, **more,
    )  # fmt: skip
    columns = largest_power_of_two(n, plan.down_columns)
    experts_down[(n // columns, tiles)](
        scratch.hidden, w2, shared_w2, scratch.parts, *lists,
        N=n, INTER=inter, TILE=plan.tile, COLUMNS=columns,
        BLOCK_K=largest_power_of_two(inter, plan.down_block), STAGES=plan.down_stages, num_warps=plan.down_warps,
        **more,
    )  # fmt: skip
    block = largest_power_of_two(n, 1024)
    combine_experts[(tokens, n // block)](
        scratch.parts, scratch.experts, scratch.shares, x, tokens, TOP=top_experts, N=n, BLOCK=block, num_warps=4,
        **more,
    )  # fmt: skip
