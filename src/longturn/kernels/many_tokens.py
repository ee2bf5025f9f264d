"""The tokens of a step that mixes prompts and decodes, as the kernels for many tokens read them from the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

TILE_TOKENS = 64
"""Most tokens of one query tile."""


@dataclass(frozen=True)
class ManyTokens:
    """T tokens of any rows; T is the bucket of a captured graph, padding included.

    A row's tokens lie one after the other and have consecutive positions. All extents are read from these buffers, so
    one graph serves any step of its bucket.
    """

    positions: Tensor
    """int32 [T]: position of each token; -1 marks padding, which comes last."""
    rows: Tensor
    """int32 [T]: the token's row of `page_table`; 0 for padding."""
    page_table: Tensor
    """int32 [R, P]: page of positions 128*i .. 128*i+127 of a row; entries past a row's last page are 0."""
    tiles: Tensor
    """int32 [N, 2]: first token and number of tokens (at most TILE_TOKENS) of each query tile; its tokens belong to one
    row. Count 0 marks padding, which comes last. N is at least T / TILE_TOKENS rounded up plus the rows of a step.
    """
    cos: Tensor
    """fp32 [T, head_dim], see `norm_rope_heads`."""
    sin: Tensor
