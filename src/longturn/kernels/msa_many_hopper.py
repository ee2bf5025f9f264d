"""Launches of the Gluon kernels of sparse attention, and what they take.

Gluon is Triton's experimental language and changes between releases: under a plan without `hopper_scores` and
`hopper_attend` nothing imports this.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from longturn.kernels.kv_formats import LaneViews
from longturn.kernels.many_tokens import TILE_TOKENS, ManyTokens
from longturn.kernels.msa_many_attend_fetch import ROWS
from longturn.kernels.msa_many_attend_hopper import attend_lists_hopper
from longturn.kernels.msa_many_scores_hopper import FEW_ROWS, PART_ROWS, block_scores_hopper
from longturn.kernels.pages import KvFormat, PageLayout

_WIDTH = 128
"""Columns of a head, and tokens of a page: what the kernels are written for."""
_TILE_ROWS = 4 * PART_ROWS
"""Tokens times heads of a tile of `block_scores_hopper`."""


def _fits(cache: Tensor, layout: PageLayout) -> bool:
    widths = {layout.head_dim, layout.index_dim, layout.page_tokens}
    return (
        cache.is_cuda
        and cache.dtype == torch.bfloat16
        and widths == {_WIDTH}
        and torch.cuda.get_device_capability(cache.device)[0] == 9
    )


def scores_fit(index: Tensor, layout: PageLayout) -> bool:
    """Whether `block_scores_hopper` takes index keys of this type and layout."""
    heads = _TILE_ROWS // TILE_TOKENS
    return (
        layout.index_format == KvFormat.PLAIN
        and layout.kv_heads >= heads
        and _TILE_ROWS % layout.kv_heads == 0
        and _fits(index, layout)
    )


def attend_fits(cache: Tensor, layout: PageLayout, group: int) -> bool:
    """Whether `attend_lists_hopper` takes keys and values of this type and layout, and so many query heads each."""
    return layout.kv_format == KvFormat.PLAIN and group <= ROWS and ROWS % group == 0 and _fits(cache, layout)


def _rows_of(values: Tensor, rows: int) -> TensorDescriptor:
    """Contiguous `values` as rows of 128, copied `rows` rows at a time into the layout that products read."""
    whole = values.numel() // _WIDTH * _WIDTH
    form = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(values.view(-1)[:whole].view(-1, _WIDTH), [rows, _WIDTH], form)


def launch_scores(
    index_query: Tensor, step: ManyTokens, lanes: LaneViews, into: tuple[Any, ...], layout: PageLayout,
    *, stages: int, programs: int, more: dict[str, Any],
) -> None:  # fmt: skip
    """`block_scores` of index queries [T, kv_heads, d]; `into` are its last five arguments."""
    tiles = len(step.tiles)
    block_scores_hopper[(programs,)](
        _rows_of(index_query, PART_ROWS), _rows_of(index_query, FEW_ROWS), _rows_of(lanes.index, layout.page_tokens),
        step.positions, step.rows, step.page_table, step.page_table.stride(0), step.tiles, tiles,
        lanes.index_stride // _WIDTH, lanes.index_key // _WIDTH, *into,
        KV_HEADS=layout.kv_heads, PAGE=layout.page_tokens, SPAN=max(32, triton.next_power_of_2(tiles)),
        TOKENS=_TILE_ROWS // layout.kv_heads, PROGRAMS=programs, STAGES=stages, CLEAR=256, num_warps=4,
        **more,
    )  # fmt: skip


def launch_attend(
    query: Tensor, lanes: LaneViews, lists: tuple[Any, ...], piece_open: Tensor, results: tuple[Any, ...],
    layout: PageLayout, *, group: int, extents: dict[str, int], more: dict[str, Any],
) -> None:  # fmt: skip
    """`attend_lists` of queries [T, q_heads, d], with the arguments and constants that it shares with this kernel."""
    attend_lists_hopper[(extents["PROGRAMS"],)](
        query, _rows_of(lanes.kv, layout.page_tokens), *lists[:2], piece_open, *lists[2:4],
        lanes.kv_stride // _WIDTH, lanes.key // _WIDTH, lanes.value // _WIDTH, *results,
        TOKENS=ROWS // group, num_warps=4, **extents, **more,
    )  # fmt: skip
