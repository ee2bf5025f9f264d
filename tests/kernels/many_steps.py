"""Steps of many tokens, made up for tests, and what the sparse attention of one should give."""

from __future__ import annotations

import torch

from longturn.kernels.many_tokens import TILE_TOKENS, ManyTokens
from longturn.kernels.msa_plan import MsaNorms
from longturn.kernels.pages import PageLayout
from longturn.ops.gemma_norm import gemma_rms_norm
from longturn.ops.msa import gather_pages, index_block_scores, select_blocks, sparse_attention

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


def expected_attention(
    projected: torch.Tensor, step: ManyTokens, norms: MsaNorms, cache: torch.Tensor, layout: PageLayout, layer: int,
    q_heads: int, inv_freq: torch.Tensor, dtype: torch.dtype = torch.float32,
    top_blocks: int = 16,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Outputs [T, q_heads * d], zeros for padding, and the cache after the step, row by row from the references.

    Queries and keys are rounded to `dtype`, so that blocks are chosen by the numbers that the kernels see.
    """

    def turned(x: torch.Tensor, weight: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        return heads(x, weight, at, inv_freq).to(dtype).float()

    kv, d = layout.kv_heads, layout.head_dim
    cache = cache.clone()
    out = torch.zeros(projected.shape[0], q_heads * d, device=projected.device)
    for row in sorted(set(step.rows[step.positions >= 0].tolist())):
        mine = (step.rows == row) & (step.positions >= 0)
        at = step.positions[mine].long()
        pages = step.page_table[row].long()
        q, k, v, iq, ik = projected[mine].view(len(at), -1, d).split((q_heads, kv, kv, kv, 1), 1)
        for lane, new in zip(
            lanes(cache, layout, layer),
            (turned(k, norms.key, at), v, turned(ik, norms.index_key, at)),
            strict=True,
        ):
            lane[pages[at // 128], :, at % 128] = new
        key, value, index = (
            gather_pages(lane, pages[: int(at[-1]) // 128 + 1]) for lane in lanes(cache, layout, layer)
        )
        scores = index_block_scores(turned(iq, norms.index_query, at), index[:, 0], at)
        chosen = select_blocks(scores, at, top_blocks)
        out[mine] = sparse_attention(turned(q, norms.query, at), key, value, at, chosen, d**-0.5).flatten(1)
    return out, cache
