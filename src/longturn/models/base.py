"""What every model family offers an executor: forward over a step, logits, and the shape of its cache pages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from longturn.ops.attention import PagedRows


@dataclass(frozen=True, slots=True)
class KVLane:
    """What one layer keeps of one page in one lane: keys, values, scales, or index keys."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The cache of a model: `cache[page][layer][lane bytes]`, one uint8 tensor [pages, page_bytes]."""

    layers: tuple[tuple[KVLane, ...], ...]
    """Lanes of each layer, in the order of their bytes."""

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of all layers and lanes."""
        return sum(lane.nbytes for lanes in self.layers for lane in lanes)

    def allocate(self, pages: int, device: torch.device | str = "cpu") -> Tensor:
        """Zeroed storage for `pages` pages. Zeroed, for padding must not read NaN from pages never written."""
        return torch.zeros((pages, self.page_bytes), dtype=torch.uint8, device=device)

    def view(self, cache: Tensor, layer: int, lane: int) -> Tensor:
        """One lane of one layer for all pages, [pages, *lane.shape]: a view of `cache` [pages, page_bytes]."""
        before = sum(item.nbytes for lanes in self.layers[:layer] for item in lanes)
        before += sum(item.nbytes for item in self.layers[layer][:lane])
        spec = self.layers[layer][lane]
        return cache[:, before : before + spec.nbytes].view(spec.dtype).view(-1, *spec.shape)


@dataclass(frozen=True, slots=True)
class ModelStep:
    """The tokens of one step, rows one after the other."""

    token_ids: Tensor
    """int32 or int64 [T]."""
    positions: Tensor
    """int32 or int64 [T]: consecutive within a row."""
    rows: PagedRows


class CausalModel(Protocol):
    """A model on one device."""

    @property
    def kv(self) -> KVSpec: ...

    @property
    def vocab_size(self) -> int: ...

    def forward(self, step: ModelStep, cache: Tensor) -> Tensor:
        """Write the step's keys and values to `cache` (from `kv.allocate`) and return hidden states [T, hidden].

        The hidden states are those before the final norm.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Final norm and head: fp32 [n, vocab_size] for hidden [n, hidden]."""
        ...
