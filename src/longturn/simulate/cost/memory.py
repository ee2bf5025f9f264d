"""Bytes on a chip: weights, one page of the cache, and how many pages fit. Moving pages to host memory."""

from __future__ import annotations

from dataclasses import dataclass

from longturn.config import GIB, PAGE_TOKENS
from longturn.errors import ConfigError
from longturn.simulate.cost.formulas import projection_elements
from longturn.simulate.cost.options import Drafter
from longturn.simulate.formats import CACHE_BYTES, WEIGHT_BYTES, Formats
from longturn.simulate.layout import Layout, heads_per_rank
from longturn.simulate.platform import Platform
from longturn.simulate.shapes import ModelShape

RESERVED_BYTES = 4 * GIB
"""Left for activations, graphs and communication buffers: aiconfigurator assumes 3.5 GiB and 0.4 GiB for NCCL."""
MEMORY_SHARE = 0.9
"""Of a chip's memory that an engine takes: published recipes' gpu_memory_utilization."""
TRANSFER_SHARE = 0.85
"""Of the host link's bandwidth, for copies of whole pages. Assumed: no table."""
TRANSFER_FIXED_NS = 10_000


@dataclass(frozen=True, slots=True)
class ChipMemory:
    """How one chip's memory is used."""

    weight_bytes: int
    page_bytes: int
    """One page of all layers and lanes, this chip's part."""
    pages: int
    """Pages that fit beside weights and reserve, page 0 included."""


def weight_bytes(shape: ModelShape, layout: Layout, formats: Formats, drafter: Drafter | None = None) -> int:
    """Weights on one chip."""
    tp = layout.attention_tp
    attention = 0.0
    for layers, index in ((shape.sparse_layers, True), (shape.dense_layers, False)):
        attention += layers * attention_elements(shape, tp, index)
    ffn = (
        3.0 * shape.hidden * (shape.moe_layers * shape.shared_ffn + (shape.layers - shape.moe_layers) * shape.dense_ffn)
    )
    experts = 3.0 * shape.hidden * shape.expert_ffn * shape.experts * shape.moe_layers / layout.chips
    total = attention * WEIGHT_BYTES[formats.attention] + experts * WEIGHT_BYTES[formats.experts]
    total += ffn / tp * WEIGHT_BYTES[formats.ffn]
    total += (1.0 if shape.tied else 2.0) * shape.vocab * shape.hidden * 2.0 / tp
    total += shape.moe_layers * shape.hidden * shape.experts * 4.0
    if drafter is not None:
        total += drafter_elements(drafter, shape.hidden) / tp * WEIGHT_BYTES[formats.ffn]
    return round(total)


def attention_elements(shape: ModelShape, ways: int, index: bool) -> float:
    """Projection weights of one layer on one of `ways` ranks."""
    return projection_elements(
        float(shape.hidden),
        float(shape.heads // ways),
        float(heads_per_rank(shape.kv_heads, ways)),
        float(heads_per_rank(shape.index_heads, ways)) if index else 0.0,
        shape.head_dim,
        shape.index_dim if index else 0,
    )


def drafter_elements(drafter: Drafter, hidden: int) -> float:
    """Weights of a draft model, all ranks together."""
    attention = (2.0 * drafter.heads + 2.0 * drafter.kv_heads) * drafter.head_dim * hidden
    return drafter.layers * (attention + 3.0 * hidden * drafter.ffn) + drafter.context_layers * hidden * hidden


def page_bytes(shape: ModelShape, layout: Layout, formats: Formats, drafter: Drafter | None = None) -> int:
    """One page on one chip. Index keys have one head, which every rank holds."""
    kv_heads = heads_per_rank(shape.kv_heads, layout.attention_tp)
    token = 2.0 * shape.layers * kv_heads * shape.head_dim * CACHE_BYTES[formats.cache]
    token += shape.sparse_layers * shape.index_dim * CACHE_BYTES[formats.index]
    if drafter is not None and drafter.window == 0:
        draft_heads = heads_per_rank(drafter.kv_heads, layout.attention_tp)
        token += 2.0 * drafter.layers * draft_heads * drafter.head_dim * CACHE_BYTES[formats.cache]
    return round(PAGE_TOKENS * token)


def chip_memory(
    platform: Platform,
    shape: ModelShape,
    layout: Layout,
    formats: Formats,
    drafter: Drafter | None = None,
    *,
    share: float = MEMORY_SHARE,
) -> ChipMemory:
    """How the memory of each chip of a replica is used.

    Raises:
        ConfigError: weights and the pages of one context of the model's full length, or of 131,072 tokens if that is
            less, do not fit; the line says by how much.
    """
    usable = round(platform.value("hbm_bytes") * share) - RESERVED_BYTES
    weights = weight_bytes(shape, layout, formats, drafter)
    page = page_bytes(shape, layout, formats, drafter)
    least = 1 + -(-min(shape.max_context, 131_072) // PAGE_TOKENS)
    short = weights + least * page - usable
    if short > 0:
        raise ConfigError(
            f"{shape.name} in layout {layout.name} does not fit on {platform.name}: {weights / GIB:.1f} GiB of weights "
            f"and {least * page / GIB:.1f} GiB for one context a chip, {usable / GIB:.1f} GiB usable; "
            f"short by {short / GIB:.1f} GiB"
        )
    return ChipMemory(weights, page, (usable - weights) // page)


def transfer_ns(platform: Platform, page: int, pages: int) -> int:
    """Copying `pages` pages of `page` bytes between a chip and its host, one direction."""
    if pages <= 0:
        return 0
    return TRANSFER_FIXED_NS + round(pages * page / (platform.value("host_link_bandwidth") * TRANSFER_SHARE) * 1e9)
