"""Where each lane lies inside a page of the key/value cache.

Storage is page-first: `cache[page][layer][lane]`, so a page of every layer and lane is one contiguous range. One
layer's lanes are K `[kv_heads, page_tokens, head_dim]`, then V of the same shape, then the index key `[page_tokens,
index_dim]`. Everything here counts elements, not bytes. Kernels multiply a page id by `page_stride` in 64 bits: a
cache passes 2**31 elements at 243 pages of MiniMax-M3.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PageLayout:
    """Extents and offsets, in elements, of a page-first cache."""

    layers: int
    kv_heads: int
    head_dim: int = 128
    index_dim: int = 128
    page_tokens: int = 128

    @property
    def kv_lane(self) -> int:
        """Elements of one layer's K (or V) in a page."""
        return self.kv_heads * self.page_tokens * self.head_dim

    @property
    def layer_stride(self) -> int:
        """Elements from one layer to the next inside a page."""
        return 2 * self.kv_lane + self.page_tokens * self.index_dim

    @property
    def page_stride(self) -> int:
        """Elements from one page to the next."""
        return self.layers * self.layer_stride

    def key_offset(self, layer: int) -> int:
        """Start of a layer's K lane in a page."""
        return layer * self.layer_stride

    def value_offset(self, layer: int) -> int:
        """Start of a layer's V lane in a page."""
        return layer * self.layer_stride + self.kv_lane

    def index_offset(self, layer: int) -> int:
        """Start of a layer's index-key lane in a page."""
        return layer * self.layer_stride + 2 * self.kv_lane
