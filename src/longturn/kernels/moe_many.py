"""Mixture of experts for steps with many tokens: five launches, none of which knows a length on the host.

The kernels are in `moe_many_route.py`, `moe_many_experts.py` and, for quantised weights, `moe_many_packed.py`; a large
shared expert has products of its own (`moe_many_shared.py`). Every output row is computed by one program and every sum
has a fixed order, so runs agree to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from longturn.kernels.dependent import launch_options
from longturn.kernels.moe_many_copied import described, experts_down_copied, experts_in_copied
from longturn.kernels.moe_many_experts import combine_experts, experts_down, experts_in
from longturn.kernels.moe_many_packed import experts_down_packed, experts_in_packed
from longturn.kernels.moe_many_route import choose_experts, router_logits
from longturn.kernels.moe_many_shared import shared_apart_pays, shared_hidden
from longturn.kernels.norm import add_norm
from longturn.kernels.packed_weights import PackedWeight, WeightFormat, as_packed
from longturn.kernels.small_linear import as_operand, largest_power_of_two


@dataclass(frozen=True)
class MoeManyPlan:
    """Tile sizes of a bucket. `tile` is the tokens of an expert tile, and `least` those of a tile that has no more:
    the last of an expert's tiles is half empty on average."""

    tile: int
    least: int = 128
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
    router_block: int = 64
    shared_apart: bool | None = None
    """Whether a plain shared expert (or dense MLP) is computed by `moe_many_shared`; None leaves it to its size."""
    copied: bool = False
    """Whether plain weights come by the copy engine (`moe_many_copied`), where the shared expert is apart."""

    @staticmethod
    def default(tokens: int, experts: int, top_experts: int) -> MoeManyPlan:
        """A plan for a bucket of `tokens` tokens."""
        each = tokens * max(top_experts, 1) / experts if top_experts else tokens
        parts = 16 if tokens <= 640 else 8 if tokens <= 1280 else 4
        if each <= 12:
            return MoeManyPlan(tile=16, in_block=128, down_block=128, router_parts=parts)
        if each <= 48:
            return MoeManyPlan(tile=32, in_block=128, down_block=128, router_parts=parts)
        if each <= 96:
            return MoeManyPlan(tile=64, router_parts=parts)
        wide = MoeManyPlan(tile=128, least=64, in_columns=128, down_columns=256, router_parts=parts)
        return replace(wide, in_stages=4, in_warps=8, down_stages=4, down_warps=8, copied=True)

    @staticmethod
    def packed(tokens: int, experts: int, top_experts: int) -> MoeManyPlan:
        """A plan for a bucket of `tokens` tokens on quantised weights. Each tile decodes its weights again, so tiles
        hold an expert's tokens whole where they can."""
        each = tokens * max(top_experts, 1) / experts if top_experts else tokens
        # MXFP8 weights of a plain MLP would not fit beside tiles of 128.
        tile = 16 if each <= 10 else 32 if each <= 22 else 64 if each <= 80 or not top_experts else 128
        warps = 8 if tile == 128 else 4
        return replace(
            MoeManyPlan.default(tokens, experts, top_experts), tile=tile, least=128,
            copied=False, in_columns=64, in_block=128, in_stages=3, in_warps=warps,
            down_columns=128, down_block=128, down_stages=3, down_warps=warps,
        )  # fmt: skip

    def fitting(self, element_bytes: int, parts: int = 1) -> MoeManyPlan:
        """This plan, or one of smaller tiles for fp32, whose products run outside the tensor cores: registers and
        shared memory must hold twice the bytes. A quantised word holds `parts` values, each a factor of a product of
        its own, and products are 16 columns wide at least."""
        if element_bytes <= 2:
            return self
        block = max(32, 16 * parts)
        return replace(
            self, tile=min(self.tile, 32), least=32,
            in_columns=min(self.in_columns, 64), in_block=min(self.in_block, block), in_stages=2,
            down_columns=min(self.down_columns, 64), down_block=min(self.down_block, block), down_stages=2,
            router_block=min(self.router_block, 32),
        )  # fmt: skip

    def shared_bytes(self, element_bytes: int) -> int:
        """At most what the pipelines of the products hold in shared memory."""
        into = self.in_stages * (self.tile + 2 * self.in_columns) * self.in_block
        out = self.down_stages * (self.tile + self.down_columns) * self.down_block
        return max(into, out) * element_bytes


@dataclass(frozen=True)
class MoeManyScratch:
    """Buffers of one step, shared by all layers and by every smaller bucket: each is flat, and a step of T tokens uses
    its beginning."""

    logits: Tensor
    """fp32 [router parts, T, E]; a small step has more parts than a large one."""
    normed: Tensor
    """[T, n] of the weights' type."""
    experts: Tensor
    """int32 [T, k], -1 for padding."""
    shares: Tensor
    """fp32 [T, k]."""
    lists: Tensor
    """int32 [E, T]: each expert's choices."""
    counts: Tensor
    """int32 [E]: how many those are."""
    hidden: Tensor
    """[tiles * tile, i] of the weights' type, shared tiles included."""
    parts: Tensor
    """Flat, of the weights' type: room for [T + T * k, n], and before that for the shared expert's gate and up."""

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
            normed=of(like.dtype, tokens * width),
            experts=of(torch.int32, choices),
            shares=of(torch.float32, choices),
            lists=of(torch.int32, experts * tokens),
            counts=of(torch.int32, experts),
            hidden=of(like.dtype, max((padded + shared) * inter, shared * dense_inter)),
            parts=of(like.dtype, max((tokens + choices) * width, 2 * tokens * max(inter, dense_inter))),
        )


def reads_packed(tokens: int, experts: int, top_experts: int) -> bool:
    """Whether a bucket of `tokens` tokens should pass quantised experts as they are; else a layer unpacked first costs
    less. With 16 tokens an expert the bytes of unpacking are most of the time, with 256 the decoding is."""
    return tokens * top_experts <= 64 * experts


def moe_many_tokens(
    x: Tensor, positions: Tensor, norm_weight: Tensor, router_weight: Tensor, bias: Tensor,
    w13: Tensor | PackedWeight, w2: Tensor | PackedWeight, shared_w13: Tensor | PackedWeight,
    shared_w2: Tensor | PackedWeight, scratch: MoeManyScratch, *, top_experts: int, scaling_factor: float,
    alpha: float = 1.702, beta: float = 1.0, limit: float = 7.0, eps: float = 1e-6, plan: MoeManyPlan | None = None,
    next_norm: Tensor | None = None, pdl: bool = False,
) -> None:  # fmt: skip
    """x += MoE(norm(x)) for x [T, n], in place; padding (position -1) is computed without routed experts.

    router_weight fp32 [E, n] and bias fp32 [E], E a power of two; w13 [E, 2i, n] (rows gate then up) and w2 [E, n, i];
    the shared expert's shared_w13 [2i, n] and shared_w2 [n, i] have the same inner width; `top_experts` is a power of
    two. With `next_norm`, the beginning of `scratch.normed` becomes norm(x) [T, n] by it, for what comes next.
    w13 and w2 are of one format, and so are the shared ones; see `reads_packed`. With `top_experts` 0 the layer is
    a plain MLP of the shared weights, w13 and w2 are not read and may be the shared ones.
    """
    tokens, n = x.shape
    experts, inter = router_weight.shape[0], shared_w2.shape[1]
    shared_in, shared_out = as_packed(shared_w13), as_packed(shared_w2)
    # Without routed experts theirs are not read, and may be of any format.
    routed_in, routed_out = (as_packed(w13), as_packed(w2)) if top_experts else (shared_in, shared_out)
    formats = {routed_in.format, shared_in.format}
    plain = formats == {WeightFormat.PLAIN}
    make = MoeManyPlan.default if plain else MoeManyPlan.packed
    most_parts = max(int(routed_in.format), int(shared_in.format))
    plan = (plan or make(tokens, experts, top_experts)).fitting(x.element_size(), most_parts)
    normed, hidden = scratch.normed, scratch.hidden
    next_normed = normed[: tokens * n].view(tokens, n)
    if WeightFormat.PLAIN not in formats:
        normed, hidden = as_operand(normed), as_operand(hidden)
    more = {"PDL": pdl, **launch_options(pdl)}
    parts = min(plan.router_parts, scratch.logits.numel() // (tokens * experts))
    while parts > 1 and n % (parts * plan.router_block):
        parts -= 1
    choices = tokens * top_experts
    apart = plan.shared_apart
    if apart is None:
        apart = shared_apart_pays(tokens, n, inter)
    apart = apart and shared_in.format is WeightFormat.PLAIN
    shared_tiles = 0 if apart else triton.cdiv(tokens, plan.tile)
    # At most: every expert's last tile is not full, or every choice has a tile of its own.
    tiles = shared_tiles + min(choices // plan.tile + experts, choices)
    if top_experts:
        router_logits[(triton.cdiv(tokens, plan.router_tokens), parts)](
            x, norm_weight, router_weight, scratch.logits, scratch.counts, tokens,
            EXPERTS=experts, K=n, BLOCK_K=largest_power_of_two(n // parts, plan.router_block), PARTS=parts,
            TOKENS=plan.router_tokens, STAGES=3, num_warps=4, **more,
        )  # fmt: skip
    # A warp alone needs no barriers; a wide row would have too few loads on their way.
    choose_experts[(tokens,)](
        x, norm_weight, positions, scratch.logits, bias, normed, scratch.experts, scratch.shares, scratch.lists,
        scratch.counts, tokens, scaling_factor, eps,
        EXPERTS=experts, TOP=top_experts, K=n, BLOCK_K=largest_power_of_two(n, 2048), PARTS=parts,
        num_warps=1 if n <= 2048 else 4, **more,
    )  # fmt: skip
    if apart:
        # Its hidden rows and its gate and up lie where the routed experts' will, and are done with by then.
        own = shared_hidden(
            normed[: tokens * n].view(tokens, n), shared_in.words, scratch.parts, hidden,
            alpha=alpha, beta=beta, limit=limit, pdl=pdl,
        )  # fmt: skip
        if not top_experts:
            x.addmm_(own, shared_out.words.T)
            if next_norm is not None:
                add_norm(x, next_norm, next_normed, eps=eps, pdl=pdl)
            return
        torch.mm(own, shared_out.words.T, out=scratch.parts[: tokens * n].view(tokens, n))
    lists = (scratch.lists, scratch.counts, tokens)
    columns, out_columns = largest_power_of_two(inter, plan.in_columns), largest_power_of_two(n, plan.down_columns)
    activation = {"ALPHA": alpha, "BETA": beta, "LIMIT": limit}
    into = {"EXPERTS": experts, "K": n, "INTER": inter, "TILE": plan.tile, "COLUMNS": columns, "STAGES": plan.in_stages}
    out = {
        "EXPERTS": experts,
        "N": n,
        "INTER": inter,
        "TILE": plan.tile,
        "COLUMNS": out_columns,
        "STAGES": plan.down_stages,
    }
    in_block, down_block = largest_power_of_two(n, plan.in_block), largest_power_of_two(inter, plan.down_block)
    if plain:
        least = min(plan.least, plan.tile)
        if apart and plan.copied:
            rows = hidden[: hidden.numel() // inter * inter].view(-1, inter)
            experts_in_copied[(inter // columns, tiles)](
                normed, described(routed_in.words.view(-1, n), columns, in_block), hidden, *lists,
                TOP=top_experts, BLOCK_K=in_block, LEAST=least, num_warps=plan.in_warps, **activation, **into, **more,
            )  # fmt: skip
            experts_down_copied[(n // out_columns, tiles)](
                described(rows, plan.tile, down_block), described(rows, least, down_block),
                described(routed_out.words.view(-1, inter), out_columns, down_block), scratch.parts, *lists,
                BLOCK_K=down_block, LEAST=least, num_warps=plan.down_warps, **out, **more,
            )  # fmt: skip
        else:
            experts_in[(inter // columns, tiles)](
                normed, routed_in.words, shared_in.words, hidden, *lists, shared_tiles,
                TOP=top_experts, BLOCK_K=in_block, LEAST=least, num_warps=plan.in_warps, **activation, **into, **more,
            )  # fmt: skip
            experts_down[(n // out_columns, tiles)](
                hidden, routed_out.words, shared_out.words, scratch.parts, *lists, shared_tiles,
                BLOCK_K=down_block, LEAST=least, num_warps=plan.down_warps, **out, **more,
            )  # fmt: skip
    else:
        form = {"PARTS": int(routed_in.format), "SHARED_PARTS": int(shared_in.format), "ASM": x.is_cuda}
        experts_in_packed[(inter // columns, tiles)](
            normed, *_of(routed_in), *_of(shared_in), hidden, *lists, shared_tiles,
            TOP=top_experts, BLOCK_K=in_block, SHARED_BLOCK_K=in_block, num_warps=plan.in_warps,
            **form, **activation, **into, **more,
        )  # fmt: skip
        experts_down_packed[(n // out_columns, tiles)](
            hidden, *_of(routed_out), *_of(shared_out), scratch.parts, *lists, shared_tiles,
            BLOCK_K=down_block, SHARED_BLOCK_K=down_block, num_warps=plan.down_warps, **form, **out, **more,
        )  # fmt: skip
    norm = next_norm is not None
    block = largest_power_of_two(n, 2048 if norm else 1024)
    combine_experts[(tokens, 1 if norm else n // block)](
        scratch.parts, scratch.experts, scratch.shares, x, next_norm if norm else norm_weight, next_normed, tokens, eps,
        TOP=top_experts, N=n, BLOCK=block, NORM=norm, num_warps=4, **more,
    )  # fmt: skip


def _of(weight: PackedWeight) -> tuple[Tensor, Tensor, Tensor]:
    return weight.words, weight.scales, weight.row_scales
