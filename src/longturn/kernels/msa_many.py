"""MiniMax Sparse Attention of steps with many tokens: prompts, chunks of prompts and decodes mixed.

Seven launches, none of which knows a length on the host: queries and cache, block scores, top blocks (with the count
of each page's choices), lists laid out, lists filled, attention a page at a time, parts combined. The kernels are in
`cache_write.py`, `msa_many_scores.py` and `msa_many_attend.py`; for bf16 caches on Hopper the two heavy ones are in
`msa_many_scores_hopper.py` and `msa_many_attend_hopper.py`. What each takes is in docs/performance.md.

Caches of fewer bits need nothing but their `PageLayout`: `msa_many_tokens` takes the same uint8 cache as `msa_decode`,
and `MsaManyScratch.allocate` a `like` of the type that activations have.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from longturn.errors import ModelError
from longturn.kernels.cache_write import queries_and_cache
from longturn.kernels.dependent import launch_options
from longturn.kernels.kv_formats import E2M1_GROW, NUMBER, lane_views
from longturn.kernels.many_tokens import TILE_TOKENS, ManyTokens
from longturn.kernels.msa_many_attend import attend_lists, combine_parts, fill_lists, lay_out_lists
from longturn.kernels.msa_many_scores import LEAST_BLOCKS, block_scores, top_blocks
from longturn.kernels.msa_plan import MsaNorms, MsaShape
from longturn.kernels.pages import KvFormat

_LOG2E = 1.4426950408889634
_HOPPER = "longturn.kernels.msa_many_hopper"


def _score_tiles(shape: MsaShape) -> tuple[int, int]:
    """Scores that `top_blocks` has for a head: the largest power of two in the context's bound, and one that is enough
    for what is left, which may be 0."""
    full = max(LEAST_BLOCKS, 1 << (shape.max_blocks.bit_length() - 1))
    left = shape.max_blocks - full
    return full, max(LEAST_BLOCKS, triton.next_power_of_2(left)) if left > 0 else 0


def _score_stride(shape: MsaShape) -> int:
    """Scores from one head to the next."""
    return sum(_score_tiles(shape))


@dataclass(frozen=True)
class MsaManyPlan:
    """How the work of a bucket is dealt out."""

    score_programs: int = 264
    score_tokens: int = 32
    """Tokens of a score tile; times key/value heads it is the M side of the product."""
    score_warps: int = 8
    score_stages: int = 3
    score_registers: int | None = 128
    """Most registers of a thread, so that two programs share a multiprocessor."""
    hopper_scores: bool = True
    """Whether `block_scores_hopper` takes what it fits; else the Triton kernel does."""
    hopper_programs: int = 132
    """Of either kernel for Hopper, each of which fills a multiprocessor's shared memory."""
    hopper_stages: int = 4
    """Pages on their way in `block_scores_hopper`."""
    hopper_attend: bool = True
    """Whether `attend_lists_hopper` takes what it fits; else the Triton kernel does."""
    piece: int = 32
    """Choices of a page that one program takes: many lists are as short as 8 in a short step, and a page read again
    for the next piece costs more than an uneven end in a long one."""
    attend_tokens: int = 8
    """Tokens of an attention tile; times query heads a key/value head it is the M side of the product."""
    attend_warps: int = 4
    attend_programs: int = 264
    attend_registers: int | None = None
    """Most registers of a thread, so that enough programs share a multiprocessor."""

    @staticmethod
    def default(shape: MsaShape, tokens: int = 0) -> MsaManyPlan:
        """A plan for steps of `tokens` tokens, 0 for any, on a chip of 132 multiprocessors."""
        group = shape.q_heads // shape.layout.kv_heads
        score_tokens = max(4, min(TILE_TOKENS, 128 // shape.layout.kv_heads))
        piece = 128 if tokens >= 4096 else 32
        return MsaManyPlan(score_tokens=score_tokens, attend_tokens=max(1, 64 // group), piece=piece)

    def shared_bytes(self, shape: MsaShape, element_bytes: int) -> int:
        """At most what the Triton kernels hold in shared memory. Those for Hopper have a fixed size, which fits."""
        layout = shape.layout
        row = layout.head_dim * element_bytes
        page = layout.page_tokens * row
        group = shape.q_heads // layout.kv_heads
        scores = self.score_stages * page + self.score_tokens * layout.kv_heads * row
        return max(scores, 2 * page + max(16, self.attend_tokens * group) * row) + 1024

    def fitting(self, element_bytes: int) -> MsaManyPlan:
        """This plan, or one of smaller tiles for fp32, whose products run outside the tensor cores: registers and
        shared memory must hold twice the bytes. `piece` stays, since scratch depends on it."""
        if element_bytes <= 2:
            return self
        return replace(
            self, score_tokens=min(self.score_tokens, 8), score_stages=2, attend_tokens=min(self.attend_tokens, 4),
            attend_warps=8, attend_registers=None,
        )  # fmt: skip


@dataclass(frozen=True)
class MsaManyScratch:
    """Buffers of one step, shared by all layers and by every smaller bucket: each is flat, and a step of T tokens uses
    its beginning. Their contents never outlive a layer."""

    query: Tensor
    """[T, q_heads, d] of the cache's type if it is plain, else fp16; and room for a spare group of heads, as in `parts`
    and `weights`, see `attend_lists`."""
    index_query: Tensor
    """[T, kv_heads, d] of the index key's type if it is plain, else fp16."""
    scores: Tensor
    """fp32 [T, kv_heads, max_blocks rounded up, see `top_blocks`]."""
    selected: Tensor
    """int32 [T, kv_heads, top_blocks]."""
    ranks: Tensor
    """int32, as `selected`."""
    counts: Tensor
    """int32 [pages, kv_heads]: one page's lists lie side by side, so that programs read its heads at about one time."""
    first_piece: Tensor
    """int32 [pages, kv_heads]."""
    piece_list: Tensor
    """int32, one a piece: at most every list's last one and the whole ones."""
    piece_size: Tensor
    """int32, as `piece_list`."""
    piece_open: Tensor
    """int32, as `piece_list`: whether some choice of the piece does not see the page's last key."""
    total_pieces: Tensor
    """int32 [1]."""
    entries: Tensor
    """int32 [pieces, piece]."""
    parts: Tensor
    """[T, kv_heads, top_blocks, group, d] of the type of `query`."""
    weights: Tensor
    """fp32 [T, kv_heads, top_blocks, group, 2]."""

    @staticmethod
    def allocate(tokens: int, pages: int, shape: MsaShape, plan: MsaManyPlan, like: Tensor) -> MsaManyScratch:
        """Uninitialised buffers for up to `tokens` tokens and a cache of `pages` pages on the device of `like`, whose
        type is that of a plain cache; every plan used with them must have this plan's `piece`.

        Raises:
            ValueError: so many tokens that an entry of a list does not fit 32 bits.
        """
        layout = shape.layout
        choices = tokens * layout.kv_heads * shape.top_blocks
        if (choices + 1) * layout.page_tokens > 2**31:
            raise ValueError(f"{tokens} tokens are too many for one step: entries of lists are 32 bits wide")
        counters = layout.kv_heads * pages
        pieces = choices // plan.piece + min(counters, choices)

        def of(dtype: torch.dtype, size: int) -> Tensor:
            return torch.empty(size, dtype=dtype, device=like.device)

        # Lanes of fewer bits are widened to fp16, which holds all their values, and are multiplied in it.
        kept = like.dtype if layout.kv_format == KvFormat.PLAIN else torch.float16
        index_kept = like.dtype if layout.index_format == KvFormat.PLAIN else torch.float16
        spare = shape.q_heads // layout.kv_heads * layout.head_dim
        return MsaManyScratch(
            query=of(kept, tokens * shape.q_heads * layout.head_dim + spare),
            index_query=of(index_kept, tokens * layout.kv_heads * layout.head_dim),
            scores=of(torch.float32, tokens * layout.kv_heads * _score_stride(shape)),
            selected=of(torch.int32, choices),
            ranks=of(torch.int32, choices),
            counts=of(torch.int32, counters),
            first_piece=of(torch.int32, counters),
            piece_list=of(torch.int32, pieces),
            piece_size=of(torch.int32, pieces),
            piece_open=of(torch.int32, pieces),
            total_pieces=of(torch.int32, 1),
            entries=of(torch.int32, pieces * plan.piece),
            parts=of(kept, tokens * shape.q_heads * shape.top_blocks * layout.head_dim + spare),
            weights=of(torch.float32, 2 * tokens * shape.q_heads * shape.top_blocks + spare),
        )

    def check(self, choices: int, pages: int, shape: MsaShape, plan: MsaManyPlan) -> None:
        """Raises ModelError if the buffers are too small for this many choices: kernels would write past them."""
        counters = shape.layout.kv_heads * pages
        entries = (choices // plan.piece + min(counters, choices)) * plan.piece
        scores = choices // shape.top_blocks * _score_stride(shape)
        group = shape.q_heads // shape.layout.kv_heads * shape.layout.head_dim
        parts = (choices + 1) * group
        need = {"selected": choices, "counts": counters, "entries": entries, "scores": scores, "parts": parts}
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
    allocation, flat or of any contiguous shape: of one element type (bf16 or fp32), or uint8 where the layout has fp8
    or NVFP4 lanes. `shape.max_blocks` bounds the context.
    """
    tokens = projected.shape[0]
    layout = shape.layout
    kv, group = layout.kv_heads, shape.q_heads // layout.kv_heads
    lanes = lane_views(cache, layout, layer)
    pages = lanes.kv.numel() // lanes.kv_stride
    counters = kv * pages
    choices = tokens * kv * shape.top_blocks
    score_stride = _score_stride(shape)
    scratch.check(choices, pages, shape, plan)
    plan = plan.fitting(scratch.query.element_size())
    query = scratch.query[: tokens * shape.q_heads * layout.head_dim].view(tokens, shape.q_heads, layout.head_dim)
    index_query = scratch.index_query[: tokens * kv * layout.head_dim].view(tokens, kv, layout.head_dim)
    more = {"PDL": pdl, **launch_options(pdl)}
    table = (step.page_table, step.page_table.stride(0))
    form, nvfp4 = NUMBER[layout.kv_format], layout.kv_format == KvFormat.NVFP4
    queries_and_cache(
        projected, step, norms, query, index_query, lanes, layout, rotary_dim=shape.rotary_dim, eps=shape.eps, pdl=pdl
    )
    tiles = len(step.tiles)
    into = (scratch.scores, score_stride, scratch.counts, counters, scratch.total_pieces)
    hopper = importlib.import_module(_HOPPER) if plan.hopper_scores or plan.hopper_attend else None
    if hopper and plan.hopper_scores and hopper.scores_fit(lanes.index, layout):
        hopper.launch_scores(
            index_query, step, lanes, into, layout, stages=plan.hopper_stages, programs=plan.hopper_programs, more=more
        )
    else:
        block_scores[(plan.score_programs,)](
            index_query, step.positions, step.rows, *table, step.tiles, tiles,
            lanes.index, lanes.index_stride, lanes.index_key, *into,
            KV_HEADS=kv, D=layout.head_dim, PAGE=layout.page_tokens, SPAN=triton.next_power_of_2(tiles),
            TOKENS=plan.score_tokens, PROGRAMS=plan.score_programs, STAGES=plan.score_stages, CLEAR=256,
            INDEX_FORMAT=NUMBER[layout.index_format], num_warps=plan.score_warps, maxnreg=plan.score_registers, **more,
        )  # fmt: skip
    full, rest = _score_tiles(shape)
    top_blocks[(tokens * kv,)](
        step.positions, step.rows, *table, scratch.scores, score_stride, scratch.selected, scratch.ranks,
        scratch.counts,
        KV_HEADS=kv, PAGE=layout.page_tokens, TOP=shape.top_blocks, INIT=shape.init_blocks, LOCAL=shape.local_blocks,
        FULL=full, REST=rest, num_warps=max(1, full // 2048), **more,
    )  # fmt: skip
    lay_out_lists[(triton.cdiv(counters, 256),)](
        scratch.counts, counters, scratch.first_piece, scratch.piece_list, scratch.piece_size, scratch.piece_open,
        scratch.total_pieces,
        PIECE=plan.piece, SPAN=256, num_warps=4, **more,
    )  # fmt: skip
    fill_lists[(triton.cdiv(choices, 512),)](
        step.positions, step.rows, *table, scratch.selected, scratch.ranks, scratch.first_piece, scratch.piece_open,
        scratch.entries, choices,
        KV_HEADS=kv, PAGE=layout.page_tokens, TOP=shape.top_blocks, PIECE=plan.piece, SPAN=512, num_warps=4, **more,
    )  # fmt: skip
    # The entry of a choice that is nobody's, see `attend_lists`.
    spare = choices * layout.page_tokens + layout.page_tokens - 1
    lists = (scratch.piece_list, scratch.piece_size, scratch.total_pieces, scratch.entries, spare)
    results = (scratch.parts, scratch.weights, layout.head_dim**-0.5 * _LOG2E * (E2M1_GROW.value if nvfp4 else 1.0))
    extents = {"GROUP": group, "PAGE": layout.page_tokens, "TOP": shape.top_blocks, "PIECE": plan.piece}
    extents |= {"KV_HEADS": kv, "PROGRAMS": plan.attend_programs}
    ordered = bool(hopper and plan.hopper_attend and hopper.attend_fits(lanes.kv, layout, group))
    if hopper and ordered:
        extents["PROGRAMS"] = plan.hopper_programs
        hopper.launch_attend(
            query, lanes, lists, scratch.piece_open, results, layout, group=group, extents=extents, more=more
        )
    else:
        attend_lists[(plan.attend_programs,)](
            query, *lists, lanes.kv, lanes.kv_stride, lanes.key, lanes.value,
            lanes.scales, lanes.scale_stride, lanes.key_scale, lanes.value_scale, *results,
            D=layout.head_dim, TOKENS=plan.attend_tokens, FORMAT=form, ASM=cache.is_cuda and nvfp4,
            num_warps=plan.attend_warps, maxnreg=plan.attend_registers, **extents, **more,
        )  # fmt: skip
    heads = min(group, 8)
    combine_parts[(tokens * kv, group // heads)](
        scratch.selected, scratch.parts, scratch.weights, out,
        GROUP=group, HEADS=heads, D=layout.head_dim, TOP=shape.top_blocks, FORMAT=form, ORDERED=ordered,
        num_warps=4, **more,
    )  # fmt: skip
