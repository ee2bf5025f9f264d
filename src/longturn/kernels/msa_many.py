"""MiniMax Sparse Attention of steps with many tokens: prompts, chunks of prompts and decodes mixed.

Seven launches, none of which knows a length on the host: queries and cache, block scores, top blocks (with the count
of each page's choices), lists laid out, lists filled, attention a page at a time, parts combined. The kernels are in
`cache_write.py`, `msa_many_scores.py` and `msa_many_attend.py`; what each should take is in docs/performance.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from longturn.errors import ModelError
from longturn.kernels.cache_write import queries_and_cache
from longturn.kernels.dependent import launch_options
from longturn.kernels.many_tokens import TILE_TOKENS, ManyTokens
from longturn.kernels.msa_many_attend import attend_lists, combine_parts, fill_lists, lay_out_lists
from longturn.kernels.msa_many_scores import GROUP_BLOCKS, block_scores, top_blocks
from longturn.kernels.msa_plan import MsaNorms, MsaShape

_LOG2E = 1.4426950408889634


def _score_stride(shape: MsaShape) -> int:
    """Scores from one head to the next: a power of two of groups, so that `top_blocks` reads whole ones unmasked."""
    groups: int = triton.next_power_of_2(triton.cdiv(shape.max_blocks, GROUP_BLOCKS))
    return max(2, groups) * GROUP_BLOCKS


@dataclass(frozen=True)
class MsaManyPlan:
    """How the work of a bucket is dealt out."""

    score_programs: int = 264
    score_items: int = 1056
    """Pieces of work that `block_scores` aims at: a query tile and a share of its blocks each."""
    score_tokens: int = 32
    """Tokens of a score tile; times key/value heads it is the M side of the product."""
    score_warps: int = 8
    score_stages: int = 3
    score_registers: int | None = 128
    """Most registers of a thread, so that two programs share a multiprocessor."""
    piece: int = 32
    """Choices of a page that one program takes."""
    attend_tokens: int = 8
    """Tokens of an attention tile; times query heads a key/value head it is the M side of the product."""
    attend_warps: int = 4
    attend_stages: int = 1
    attend_programs: int = 264
    attend_registers: int | None = None
    """Most registers of a thread, so that enough programs share a multiprocessor."""

    @staticmethod
    def default(shape: MsaShape) -> MsaManyPlan:
        """A plan for any number of tokens on a chip of 132 multiprocessors."""
        group = shape.q_heads // shape.layout.kv_heads
        score_tokens = max(4, min(TILE_TOKENS, 128 // shape.layout.kv_heads))
        return MsaManyPlan(score_tokens=score_tokens, attend_tokens=max(1, 64 // group))


@dataclass(frozen=True)
class MsaManyScratch:
    """Buffers of one step, shared by all layers and by every smaller bucket: each is flat, and a step of T tokens uses
    its beginning. Their contents never outlive a layer."""

    query: Tensor
    """[T, q_heads, d] of the cache's type."""
    index_query: Tensor
    """[T, kv_heads, d]."""
    scores: Tensor
    """fp32 [T, kv_heads, max_blocks rounded up to whole groups, see `top_blocks`]."""
    selected: Tensor
    """int32 [T, kv_heads, top_blocks]."""
    ranks: Tensor
    """int32, as `selected`."""
    counts: Tensor
    """int32 [kv_heads, pages]."""
    first_piece: Tensor
    """int32 [kv_heads, pages]."""
    piece_list: Tensor
    """int32, one a piece: at most every list's last one and the whole ones."""
    piece_size: Tensor
    """int32, as `piece_list`."""
    total_pieces: Tensor
    """int32 [1]."""
    entries: Tensor
    """int32 [pieces, piece]."""
    lasts: Tensor
    """int32, as `entries`."""
    parts: Tensor
    """[T, kv_heads, top_blocks, group, d] of the cache's type."""
    weights: Tensor
    """fp32, as `parts` without d."""

    @staticmethod
    def allocate(tokens: int, pages: int, shape: MsaShape, plan: MsaManyPlan, like: Tensor) -> MsaManyScratch:
        """Uninitialised buffers for up to `tokens` tokens and a cache of `pages` pages, the cache's element type and
        device those of `like`; every plan used with them must have this plan's `piece`."""
        layout = shape.layout
        choices = tokens * layout.kv_heads * shape.top_blocks
        counters = layout.kv_heads * pages
        pieces = choices // plan.piece + min(counters, choices)

        def of(dtype: torch.dtype, size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=like.device)

        return MsaManyScratch(
            query=of(like.dtype, tokens * shape.q_heads * layout.head_dim),
            index_query=of(like.dtype, tokens * layout.kv_heads * layout.head_dim),
            scores=of(torch.float32, tokens * layout.kv_heads * _score_stride(shape)),
            selected=of(torch.int32, choices),
            ranks=of(torch.int32, choices),
            counts=of(torch.int32, counters),
            first_piece=of(torch.int32, counters),
            piece_list=of(torch.int32, pieces),
            piece_size=of(torch.int32, pieces),
            total_pieces=of(torch.int32, 1),
            entries=of(torch.int32, pieces * plan.piece),
            lasts=of(torch.int32, pieces * plan.piece),
            parts=of(like.dtype, tokens * shape.q_heads * shape.top_blocks * layout.head_dim),
            weights=of(torch.float32, tokens * shape.q_heads * shape.top_blocks),
        )

    def check(self, choices: int, pages: int, shape: MsaShape, plan: MsaManyPlan) -> None:
        """Raises ModelError if the buffers are too small for this many choices: kernels would write past them."""
        counters = shape.layout.kv_heads * pages
        entries = (choices // plan.piece + min(counters, choices)) * plan.piece
        scores = choices // shape.top_blocks * _score_stride(shape)
        need = {"selected": choices, "counts": counters, "entries": entries, "scores": scores}
        for name, size in need.items():
            if getattr(self, name).numel() < size:
                raise ModelError(f"msa scratch `{name}` holds {getattr(self, name).numel()} elements, needs {size}")


def msa_many_tokens(
    projected: Tensor, step: ManyTokens, norms: MsaNorms, cache: Tensor, layer: int, out: Tensor, shape: MsaShape,
    plan: MsaManyPlan, scratch: MsaManyScratch, *, pdl: bool = False,
) -> None:  # fmt: skip
    """Sparse attention of T tokens into `out` [T, q_heads * head_dim], after all their K, V and index keys are in
    their pages. Padding gives zeros.

    projected [T, shape.projected_width] is the raw q | k | v | index_q | index_k projection; cache is the page-first
    allocation of one element type (bf16 or fp32), flat or of any shape. `shape.max_blocks` bounds the context.
    """
    tokens = projected.shape[0]
    layout = shape.layout
    kv, group = layout.kv_heads, shape.q_heads // layout.kv_heads
    pages = cache.numel() // layout.page_stride
    counters = kv * pages
    choices = tokens * kv * shape.top_blocks
    score_stride = _score_stride(shape)
    scratch.check(choices, pages, shape, plan)
    key_lane, value_lane, index_lane = (
        layout.key_offset(layer), layout.value_offset(layer), layout.index_offset(layer)
    )  # fmt: skip
    query = scratch.query[: tokens * shape.q_heads * layout.head_dim].view(tokens, shape.q_heads, layout.head_dim)
    index_query = scratch.index_query[: tokens * kv * layout.head_dim].view(tokens, kv, layout.head_dim)
    more = {"PDL": pdl, **launch_options(pdl)}
    table = (step.page_table, step.page_table.stride(0))
    queries_and_cache(
        projected, step, norms, query, index_query, cache, layer, layout,
        rotary_dim=shape.rotary_dim, eps=shape.eps, pdl=pdl,
    )  # fmt: skip
    tiles = step.tiles.shape[0]
    block_scores[(plan.score_programs,)](
        index_query, step.positions, step.rows, *table, step.tiles, cache, layout.page_stride, index_lane,
        scratch.scores, score_stride, scratch.counts, counters, scratch.total_pieces,
        KV_HEADS=kv, D=layout.head_dim, PAGE=layout.page_tokens, TILES=tiles, SPAN=triton.next_power_of_2(tiles),
        TILE_TOKENS=TILE_TOKENS, TOKENS=plan.score_tokens, ITEMS=plan.score_items, PROGRAMS=plan.score_programs,
        STAGES=plan.score_stages, CLEAR=256, num_warps=plan.score_warps, maxnreg=plan.score_registers, **more,
    )  # fmt: skip
    groups = score_stride // GROUP_BLOCKS
    top_blocks[(tokens * kv,)](
        step.positions, step.rows, *table, scratch.scores, score_stride, scratch.selected, scratch.ranks,
        scratch.counts, pages,
        KV_HEADS=kv, PAGE=layout.page_tokens, TOP=shape.top_blocks, INIT=shape.init_blocks, LOCAL=shape.local_blocks,
        GROUPS=groups, num_warps=max(1, groups // 64), **more,
    )  # fmt: skip
    lay_out_lists[(triton.cdiv(counters, 256),)](
        scratch.counts, counters, scratch.first_piece, scratch.piece_list, scratch.piece_size, scratch.total_pieces,
        PIECE=plan.piece, SPAN=256, num_warps=4, **more,
    )  # fmt: skip
    fill_lists[(triton.cdiv(choices, 512),)](
        step.positions, step.rows, *table, scratch.selected, scratch.ranks, scratch.first_piece, scratch.entries,
        scratch.lasts, choices, pages,
        KV_HEADS=kv, PAGE=layout.page_tokens, TOP=shape.top_blocks, PIECE=plan.piece, SPAN=512, num_warps=4, **more,
    )  # fmt: skip
    attend_lists[(plan.attend_programs,)](
        query, scratch.piece_list, scratch.piece_size, scratch.total_pieces, scratch.entries, scratch.lasts, pages,
        cache, layout.page_stride, key_lane, value_lane, scratch.parts, scratch.weights,
        layout.head_dim**-0.5 * _LOG2E,
        KV_HEADS=kv, GROUP=group, D=layout.head_dim, PAGE=layout.page_tokens, TOP=shape.top_blocks, PIECE=plan.piece,
        TOKENS=plan.attend_tokens, STAGES=plan.attend_stages, PROGRAMS=plan.attend_programs,
        num_warps=plan.attend_warps, maxnreg=plan.attend_registers, **more,
    )  # fmt: skip
    heads = min(group, 8)
    combine_parts[(tokens * kv, group // heads)](
        scratch.selected, scratch.parts, scratch.weights, out,
        GROUP=group, HEADS=heads, D=layout.head_dim, TOP=shape.top_blocks, num_warps=4, **more,
    )  # fmt: skip
