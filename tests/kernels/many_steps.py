"""Steps of many tokens, made up for tests, and what the sparse attention of one should give."""

from __future__ import annotations

import torch

from longturn.kernels.kv_formats import lane_views
from longturn.kernels.many_tokens import TILE_TOKENS, ManyTokens
from longturn.kernels.msa_plan import MsaNorms
from longturn.kernels.pages import KvFormat, PageLayout
from longturn.ops.gemma_norm import gemma_rms_norm
from longturn.ops.msa import gather_pages, index_block_scores, select_blocks, sparse_attention
from longturn.ops.nvfp4 import dequantize_lane, quantize_lane

EPS = 1e-6


def rotation(positions: torch.Tensor, inv_freq: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors [T, head_dim] as `norm_rope_heads` reads them."""
    angle = positions[:, None].float() * inv_freq
    shape = len(positions), head_dim - 2 * len(inv_freq)
    ones, zeros = angle.new_ones(shape), angle.new_zeros(shape)
    return torch.cat((angle.cos(), angle.cos(), ones), 1), torch.cat((-angle.sin(), angle.sin(), zeros), 1)


def query_tiles(spans: list[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """(first token, tokens) of tiles of rows that have (cached, new) tokens each."""
    tiles, first = [], 0
    for _, new in spans:
        tiles += [(first + i, min(most, new - i)) for i in range(0, new, most)]
        first += new
    return tiles


def many_step(
    spans: list[tuple[int, int]], bucket: int, table: torch.Tensor, inv_freq: torch.Tensor, head_dim: int
) -> ManyTokens:
    """A step in which row r has spans[r] = (cached, new) tokens; table [rows, P] on the device of all."""
    device = table.device
    positions, rows = [], []
    for r, (cached, new) in enumerate(spans):
        positions += range(cached, cached + new)
        rows += [r] * new
    padding = bucket - len(positions)
    tiles = query_tiles(spans, TILE_TOKENS)
    tiles += [(0, 0)] * (-(-bucket // TILE_TOKENS) + len(spans) - len(tiles))
    at = torch.tensor(positions + [-1] * padding, dtype=torch.int32, device=device)
    return ManyTokens(
        at,
        torch.tensor(rows + [0] * padding, dtype=torch.int32, device=device),
        table,
        torch.tensor(tiles, dtype=torch.int32, device=device),
        *rotation(at, inv_freq, head_dim),
    )


def heads(x: torch.Tensor, weight: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """Heads [T, H, d], normalised and rotated as complex numbers."""
    half = len(inv_freq)
    y = gemma_rms_norm(x, weight, EPS)
    angle = positions[:, None, None].float() * inv_freq
    turned = torch.complex(y[..., :half], y[..., half : 2 * half]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((turned.real, turned.imag, y[..., 2 * half :]), -1)


def lanes(cache: torch.Tensor, layout: PageLayout, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K and V [pages, kv_heads, 128, d] and index key [pages, 1, 128, d] views of one layer."""
    kv, d = layout.kv_heads, layout.head_dim
    flat = cache.view(-1, layout.page_stride)
    k, v, i = layout.key_offset(layer), layout.value_offset(layer), layout.index_offset(layer)
    pages = flat.shape[0]
    return (
        flat[:, k:v].view(pages, kv, 128, d),
        flat[:, v:i].view(pages, kv, 128, d),
        flat[:, i : i + 128 * d].view(pages, 1, 128, d),
    )


def quantised_lanes(cache: torch.Tensor, layout: PageLayout, layer: int) -> dict[str, torch.Tensor]:
    """Views of one layer of a uint8 cache: key, value (and their scales, if NVFP4) [pages, kv_heads, 128, ...] and
    index [pages, 1, 128, d], in the types that are stored."""
    at = lane_views(cache, layout, layer)
    kv, d = layout.kv_heads, layout.head_dim
    pages = cache.numel() // layout.page_stride

    def cut(flat: torch.Tensor, stride: int, begin: int, heads: int, width: int) -> torch.Tensor:
        return flat.view(-1, stride)[:, begin : begin + heads * 128 * width].view(pages, heads, 128, width)

    width = d // 2 if layout.kv_format == KvFormat.NVFP4 else d
    out = {
        "key": cut(at.kv, at.kv_stride, at.key, kv, width),
        "value": cut(at.kv, at.kv_stride, at.value, kv, width),
        "index": cut(at.index, at.index_stride, at.index_key, 1, d),
    }
    if layout.kv_format == KvFormat.NVFP4:
        out["key_scale"] = cut(at.scales, at.scale_stride, at.key_scale, kv, d // 16)
        out["value_scale"] = cut(at.scales, at.scale_stride, at.value_scale, kv, d // 16)
    return out


def stored_floats(cache: torch.Tensor, layout: PageLayout, layer: int) -> dict[str, torch.Tensor]:
    """What one layer of a uint8 cache holds, dequantised to fp32: key, value, index."""
    have = quantised_lanes(cache, layout, layer)
    if layout.kv_format != KvFormat.NVFP4:
        return {name: lane.to(torch.float32, copy=True) for name, lane in have.items()}
    both = {name: dequantize_lane(have[name], have[f"{name}_scale"]) for name in ("key", "value")}
    return both | {"index": have["index"].float()}


def fill_quantised(cache: torch.Tensor, layout: PageLayout, layer: int, gen: torch.Generator) -> None:
    """Random keys, values and index keys in one layer of a uint8 cache; those of the null page are NaN."""
    have = quantised_lanes(cache, layout, layer)
    for name in ("key", "value", "index"):
        pages, heads_of, _, _ = have[name].shape
        values = torch.randn(pages, heads_of, 128, layout.head_dim, generator=gen, device=cache.device)
        if layout.kv_format == KvFormat.NVFP4 and name != "index":
            codes, scales = quantize_lane(values)
            have[name].copy_(codes)
            have[f"{name}_scale"].view(torch.uint8).copy_(scales.view(torch.uint8))
            have[f"{name}_scale"].view(torch.uint8)[0] = 0x7F
        else:
            have[name].copy_(values.to(have[name].dtype))
            have[name][0] = float("nan")


def expected_attention(
    projected: torch.Tensor, step: ManyTokens, norms: MsaNorms, cache: torch.Tensor, layout: PageLayout, layer: int,
    q_heads: int, inv_freq: torch.Tensor, dtype: torch.dtype = torch.float32,
    top_blocks: int = 16,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Outputs [T, q_heads * d], zeros for padding, and the cache after the step, row by row from the references.

    Queries and keys are rounded to `dtype`, so that blocks are chosen by the numbers that the kernels see.
    """

    kv, d = layout.kv_heads, layout.head_dim
    cache = cache.clone()
    mine_of = [(step.rows == row) & (step.positions >= 0) for row in range(len(step.page_table))]
    for row, mine in enumerate(mine_of):
        at = step.positions[mine].long()
        _, k, v, _, ik = projected[mine].view(len(at), -1, d).split((q_heads, kv, kv, kv, 1), 1)
        new = (heads(k, norms.key, at, inv_freq), v, heads(ik, norms.index_key, at, inv_freq))
        for lane, value in zip(lanes(cache, layout, layer), new, strict=True):
            lane[step.page_table[row].long()[at // 128], :, at % 128] = value.to(dtype).float()
    out = attention_over(
        lanes(cache, layout, layer), projected, step, norms, q_heads, inv_freq, (dtype, dtype), top_blocks
    )
    return out, cache


def attention_over(
    cached: tuple[torch.Tensor, torch.Tensor, torch.Tensor], projected: torch.Tensor, step: ManyTokens,
    norms: MsaNorms, q_heads: int, inv_freq: torch.Tensor, dtypes: tuple[torch.dtype, torch.dtype],
    top_blocks: int = 16,
) -> torch.Tensor:  # fmt: skip
    """Outputs [T, q_heads * d] over lanes that hold the step's own tokens already; queries and index queries are
    rounded to `dtypes`."""
    _, kv, _, d = cached[0].shape
    out = torch.zeros(projected.shape[0], q_heads * d, device=projected.device)
    for row in sorted(set(step.rows[step.positions >= 0].tolist())):
        mine = (step.rows == row) & (step.positions >= 0)
        at = step.positions[mine].long()
        pages = step.page_table[row].long()[: int(at[-1]) // 128 + 1]
        q, _, _, iq, _ = projected[mine].view(len(at), -1, d).split((q_heads, kv, kv, kv, 1), 1)
        key, value, index = (gather_pages(lane, pages) for lane in cached)
        index_query = heads(iq, norms.index_query, at, inv_freq).to(dtypes[1]).float()
        chosen = select_blocks(index_block_scores(index_query, index[:, 0], at), at, top_blocks)
        query = heads(q, norms.query, at, inv_freq).to(dtypes[0]).float()
        out[mine] = sparse_attention(query, key, value, at, chosen, d**-0.5).flatten(1)
    return out
