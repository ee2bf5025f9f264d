"""One lane of one layer's cache pages: keys, values or index keys in any of the storage types.

`dtype` names a type of the cache: a floating type of torch, `torch.float8_e4m3fn` (stored without a scale,
saturating) or `torch.float4_e2m1fn_x2`, which stands for NVFP4 with an e4m3 scale for 16 values.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from longturn.ops.nvfp4 import dequantize_lane, quantize_lane

NVFP4 = torch.float4_e2m1fn_x2
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


class Lane(Protocol):
    """Storage [pages, heads, 128, d] behind whatever encoding."""

    def write(self, pages: Tensor, offsets: Tensor, values: Tensor) -> None:
        """Store values [T, heads, d] at (page, offset), int64 [T] each."""
        ...

    def read(self, pages: Tensor, dtype: torch.dtype) -> Tensor:
        """Whole pages [*pages.shape, heads, 128, d] in `dtype`."""
        ...

    def read_heads(self, pages: Tensor, heads: Tensor, dtype: torch.dtype) -> Tensor:
        """One head of each page: [*shape, 128, d] for int64 `pages` and `heads` that broadcast to `shape`."""
        ...


class PlainLane:
    """Floating-point storage, a view [pages, heads, 128, d] of the cache."""

    def __init__(self, storage: Tensor) -> None:
        self._storage = storage

    def write(self, pages: Tensor, offsets: Tensor, values: Tensor) -> None:
        if self._storage.dtype == FP8:
            # torch rounds what is over the largest e4m3 value to NaN
            values = values.clamp(-FP8_MAX, FP8_MAX)
            self._storage.view(torch.uint8)[pages, :, offsets] = values.to(FP8).view(torch.uint8)
            return
        self._storage[pages, :, offsets] = values.to(self._storage.dtype)

    def read(self, pages: Tensor, dtype: torch.dtype) -> Tensor:
        return _index(self._storage, (pages,)).to(dtype)

    def read_heads(self, pages: Tensor, heads: Tensor, dtype: torch.dtype) -> Tensor:
        return _index(self._storage, (pages, heads)).to(dtype)


class Nvfp4Lane:
    """Codes, a view uint8 [pages, heads, 128, d / 2], and scales, a view e4m3 [pages, heads, 128, d / 16]."""

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self._codes = codes
        self._scales = scales

    def write(self, pages: Tensor, offsets: Tensor, values: Tensor) -> None:
        codes, scales = quantize_lane(values)
        self._codes[pages, :, offsets] = codes
        self._scales.view(torch.uint8)[pages, :, offsets] = scales.view(torch.uint8)

    def read(self, pages: Tensor, dtype: torch.dtype) -> Tensor:
        return self._read((pages,), dtype)

    def read_heads(self, pages: Tensor, heads: Tensor, dtype: torch.dtype) -> Tensor:
        return self._read((pages, heads), dtype)

    def _read(self, where: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return dequantize_lane(self._codes[where], _index(self._scales, where)).to(dtype)


def _index(storage: Tensor, where: tuple[Tensor, ...]) -> Tensor:
    # Indexing is not defined for 8-bit floats on every device; their bytes can always be moved.
    if storage.dtype.itemsize == 1 and storage.dtype != torch.uint8:
        return storage.view(torch.uint8)[where].view(storage.dtype)
    return storage[where]
