"""The cache pages of MiniMax-M3: keys, values, their scales where they are 4-bit, and the index key of sparse layers.

The index key cannot be worked out from key and value, and a wrong one silently changes what is attended to. It is a
lane of the page like the others, so whatever moves a page moves it too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longturn.config import PAGE_TOKENS
from longturn.errors import ModelError
from longturn.models.base import KVLane, KVSpec
from longturn.models.minimax_m3_config import MiniMaxM3Config
from longturn.ops.kv_lane import FP8, NVFP4, Lane, Nvfp4Lane, PlainLane
from longturn.ops.nvfp4 import GROUP

FLOAT_TYPES = (torch.float32, torch.float16, torch.bfloat16, FP8)


@dataclass(frozen=True, slots=True)
class LayerLanes:
    """One layer's pages."""

    key: Lane
    value: Lane
    index_key: Lane | None
    """Of sparse layers."""


def minimax_m3_kv(c: MiniMaxM3Config, dtype: torch.dtype) -> KVSpec:
    """Lanes of every layer.

    Args:
        c: the model.
        dtype: of keys and values: a float type, or `ops.kv_lane.NVFP4`, which has lanes `key`, `key_scale`, `value`,
            `value_scale` in place of `key`, `value`. The index key has the same type, but fp8 where they are NVFP4,
            since the index decides what is read at all.

    Raises:
        ModelError: a type is no type of the cache, or heads do not divide into its groups.
    """
    index_dtype = FP8 if dtype == NVFP4 else dtype
    heads = (c.kv_heads, PAGE_TOKENS)
    dense = _lanes("key", heads, c.head_dim, dtype) + _lanes("value", heads, c.head_dim, dtype)
    index = _lanes("index_key", (1, PAGE_TOKENS), c.index_dim, index_dtype) if any(c.sparse_layers) else ()
    return KVSpec(tuple(dense + index if sparse else dense for sparse in c.sparse_layers))


def _lanes(name: str, rows: tuple[int, int], width: int, dtype: torch.dtype) -> tuple[KVLane, ...]:
    if dtype == NVFP4:
        if width % GROUP:
            raise ModelError(f"an NVFP4 cache needs heads of a multiple of {GROUP} channels, not {width}")
        return (
            KVLane(name, (*rows, width // 2), torch.uint8),
            KVLane(f"{name}_scale", (*rows, width // GROUP), torch.float8_e4m3fn),
        )
    if dtype not in FLOAT_TYPES:
        raise ModelError(f"a cache of {str(dtype).removeprefix('torch.')} is not supported")
    return (KVLane(name, (*rows, width), dtype),)


def layer_lanes(kv: KVSpec, cache: Tensor, layer: int) -> LayerLanes:
    """Views of one layer in `cache` (from `kv.allocate`)."""
    views = {lane.name: kv.view(cache, layer, number) for number, lane in enumerate(kv.layers[layer])}

    def lane(name: str) -> Lane:
        scale = f"{name}_scale"
        return Nvfp4Lane(views[name], views[scale]) if scale in views else PlainLane(views[name])

    return LayerLanes(lane("key"), lane("value"), lane("index_key") if "index_key" in views else None)
