"""What the sparse-attention decode kernels are specialised for, how their work is dealt out, and the buffers they
need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longturn.errors import ModelError
from longturn.kernels.pages import KvFormat, PageLayout

FUSED_BLOCKS = 128
"""Up to this many blocks of context, `attend` ranks them itself instead of reading what a `select` launch found."""


@dataclass(frozen=True)
class MsaShape:
    """What the decode kernels are specialised for. `max_blocks` bounds the context, in blocks, of a captured graph."""

    q_heads: int
    layout: PageLayout
    rotary_dim: int
    max_blocks: int
    top_blocks: int = 16
    init_blocks: int = 0
    local_blocks: int = 1
    eps: float = 1e-6

    def __post_init__(self) -> None:
        # The own block holds tokens that `scores` does not see, so a model that does not force it needs other kernels.
        if self.local_blocks < 1:
            raise ModelError(f"sparse_local_block is {self.local_blocks}; the decode kernels need at least 1")

    @property
    def projected_width(self) -> int:
        """Columns of the fused q | k | v | index_q | index_k projection."""
        return (self.q_heads + 3 * self.layout.kv_heads + 1) * self.layout.head_dim


@dataclass(frozen=True)
class MsaPlan:
    """How the work is dealt out: programs a row for scores, splits a key/value head and tokens a tile for attend."""

    chunks: int
    splits: int
    tile: int
    warps: int = 4
    score_warps: int = 4
    score_stages: int = 2
    select_blocks: int = 128
    """Blocks a warp of `select`."""
    stages: int = 3
    fused_blocks: int = FUSED_BLOCKS
    ahead: bool = True
    """Where a program has one block to score, its keys are loaded before the wait."""

    @staticmethod
    def default(rows: int, max_blocks: int, kv_format: KvFormat = KvFormat.PLAIN) -> MsaPlan:
        """A plan for `rows` rows on a chip of 132 multiprocessors, measured in docs/performance.md."""
        if kv_format != KvFormat.PLAIN:
            # Measured with fp8 index keys, of which twice as many programs fit a multiprocessor.
            splits = 16 if rows <= 4 else 8 if rows <= 16 else 2
            chunks = max(1, min(max_blocks, 792 // rows - 1))
            # Ranking inside `attend` took 3 us a layer more than a launch of its own, at one row of 33 blocks.
            return MsaPlan(chunks=chunks, splits=splits, tile=128, fused_blocks=16)
        # Where rows and heads alone fill the chip, one program each saves the merging.
        splits = 16 if rows <= 2 else 8 if rows <= 4 else 4 if rows <= 16 else 1 if 24 < rows <= 32 else 2
        return MsaPlan(
            chunks=max(1, min(max_blocks, 396 // rows - 1)),
            splits=splits,
            # Where a program has several tiles, tiles of 64 tokens let three programs run on a multiprocessor.
            tile=64 if 1 < splits < 16 else 128,
            warps=8 if rows == 1 else 4,
            # Ranking takes registers for the square of the blocks, in every program of which many rows have many.
            fused_blocks=FUSED_BLOCKS if rows <= 4 else FUSED_BLOCKS // 2,
        )


@dataclass(frozen=True)
class MsaScratch:
    """Buffers of one step, shared by all layers."""

    scores: Tensor
    """fp32 [rows, kv_heads, max_blocks]."""
    selected: Tensor
    """int32 [rows, kv_heads, top_blocks]."""
    pages: Tensor
    """int32, as `selected`: the pages of those blocks."""
    partial: Tensor
    """fp32 [rows, splits, q_heads, head_dim], and its maximum and sum without the last dimension."""
    partial_max: Tensor
    partial_sum: Tensor

    @staticmethod
    def allocate(rows: int, shape: MsaShape, plan: MsaPlan, device: torch.device) -> MsaScratch:
        """Uninitialised buffers for `rows` rows."""
        kv, heads = shape.layout.kv_heads, (rows, plan.splits, shape.q_heads)
        return MsaScratch(
            torch.empty(rows, kv, shape.max_blocks, dtype=torch.float32, device=device),
            torch.empty(rows, kv, shape.top_blocks, dtype=torch.int32, device=device),
            torch.empty(rows, kv, shape.top_blocks, dtype=torch.int32, device=device),
            torch.empty(*heads, shape.layout.head_dim, dtype=torch.float32, device=device),
            torch.empty(heads, dtype=torch.float32, device=device),
            torch.empty(heads, dtype=torch.float32, device=device),
        )


@dataclass(frozen=True)
class MsaNorms:
    """Raw Gemma weights [head_dim] of one layer's query, key, index query and index key."""

    query: Tensor
    key: Tensor
    index_query: Tensor
    index_key: Tensor


@dataclass(frozen=True)
class DecodeRows:
    """The rows of a decode step on the device, one new token each."""

    positions: Tensor
    """int32 [rows]: position of the new token; -1 marks a padded row."""
    page_table: Tensor
    """int32 [rows, P]: page of positions 128*i .. 128*i+127."""
    cos: Tensor
    """fp32 [rows, head_dim], see `norm_rope_heads`."""
    sin: Tensor
