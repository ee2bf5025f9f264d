"""Where each lane lies inside a page of the key/value cache.

Storage is page-first: `cache[page][layer][lane]`, so a page of every layer and lane is one contiguous range. One
layer's lanes are K `[kv_heads, page_tokens, head_dim]`, then V of the same shape, then the index key `[page_tokens,
index_dim]`. Where K and V are NVFP4, the scales of each follow it, `[kv_heads, page_tokens, head_dim / 16]`. Offsets
count elements while all lanes are of one float type, and bytes otherwise. Kernels multiply a page id by `page_stride`
in 64 bits: a cache passes 2**31 elements at 243 pages of MiniMax-M3.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class KvFormat(StrEnum):
    """How a lane's numbers are stored."""

    PLAIN = "plain"
    """bf16, or fp32 in tests."""
    FP8 = "fp8"
    """e4m3 without a scale."""
    NVFP4 = "nvfp4"
    """e2m1 with an e4m3 scale for 16 numbers; not for index keys."""


@dataclass(frozen=True)
class PageLayout:
    """Extents and offsets of a page-first cache: in elements if all its lanes are plain, otherwise in bytes."""

    layers: int
    kv_heads: int
    head_dim: int = 128
    index_dim: int = 128
    page_tokens: int = 128
    kv_format: KvFormat = KvFormat.PLAIN
    index_format: KvFormat = KvFormat.PLAIN
    plain_bytes: int = 2
    """Size of a plain number, where offsets are in bytes."""

    @property
    def in_bytes(self) -> bool:
        """Whether offsets count bytes, and the cache is uint8."""
        return self.kv_format != KvFormat.PLAIN or self.index_format != KvFormat.PLAIN

    @property
    def kv_lane(self) -> int:
        """Extent of one layer's K (or V) in a page, without scales."""
        return self._extent(self.kv_heads * self.page_tokens * self.head_dim, self.kv_format)

    @property
    def scale_lane(self) -> int:
        """Extent of the scales of one layer's K (or V) in a page."""
        numbers = self.kv_heads * self.page_tokens * self.head_dim
        return numbers // 16 if self.kv_format == KvFormat.NVFP4 else 0

    @property
    def layer_stride(self) -> int:
        """From one layer to the next inside a page."""
        return 2 * (self.kv_lane + self.scale_lane) + self._extent(self.page_tokens * self.index_dim, self.index_format)

    @property
    def page_stride(self) -> int:
        """From one page to the next."""
        return self.layers * self.layer_stride

    def key_offset(self, layer: int) -> int:
        """Start of a layer's K lane in a page."""
        return layer * self.layer_stride

    def value_offset(self, layer: int) -> int:
        """Start of a layer's V lane in a page."""
        return layer * self.layer_stride + self.kv_lane + self.scale_lane

    def index_offset(self, layer: int) -> int:
        """Start of a layer's index-key lane in a page."""
        return layer * self.layer_stride + 2 * (self.kv_lane + self.scale_lane)

    def key_scale_offset(self, layer: int) -> int:
        """Start of the scales of a layer's K in a page; of NVFP4 only."""
        return self.key_offset(layer) + self.kv_lane

    def value_scale_offset(self, layer: int) -> int:
        """Start of the scales of a layer's V in a page; of NVFP4 only."""
        return self.value_offset(layer) + self.kv_lane

    def _extent(self, numbers: int, form: KvFormat) -> int:
        if form == KvFormat.NVFP4:
            return numbers // 2
        return numbers * self.plain_bytes if form == KvFormat.PLAIN and self.in_bytes else numbers
