"""MiniMax Sparse Attention: a reference that is plainly right (arXiv:2606.13392).

Each query scores every earlier token with a small index head, keeps the best score of each block of 128 *absolute*
positions, chooses 16 blocks for each key/value head and attends exactly to the tokens of those blocks. Functions take
one sequence whose keys are contiguous; `gather_pages` makes them so from a paged cache. All of it is differentiable
except the choice itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_TOKENS = 128
"""Tokens of a selectable block, which is a page of the cache."""


def gather_pages(lane: Tensor, pages: Tensor) -> Tensor:
    """Contiguous keys [S, heads, d] of one sequence, from a lane [all pages, heads, 128, d] and page ids [n]; S = 128
    n."""
    chosen = lane[pages.long()]
    return chosen.transpose(1, 2).reshape(-1, lane.shape[1], lane.shape[3])


def index_block_scores(index_q: Tensor, index_k: Tensor, positions: Tensor) -> Tensor:
    """Best index score of each block, fp32 [T, H, B] with B = ceil(S / 128).

    index_q [T, H, d], one head for each key/value head; index_k [S, d], one head shared by all; positions int [T]
    absolute. Scores are unscaled dot products in fp32; a token after the query's own position counts as -inf.
    """
    scores = torch.einsum("thd,sd->ths", index_q.float(), index_k.float())
    token = torch.arange(index_k.shape[0], device=index_k.device)
    scores = scores.masked_fill((token[None, :] > positions[:, None])[:, None, :], float("-inf"))
    missing = -index_k.shape[0] % BLOCK_TOKENS
    scores = torch.nn.functional.pad(scores, (0, missing), value=float("-inf"))
    return scores.view(*scores.shape[:2], -1, BLOCK_TOKENS).amax(-1)


def select_blocks(
    block_scores: Tensor, positions: Tensor, top_blocks: int, init_blocks: int = 0, local_blocks: int = 1
) -> Tensor:
    """Chosen blocks, int64 [T, H, top_blocks], unordered, -1 where fewer than `top_blocks` exist.

    The first `init_blocks` and the last `local_blocks` blocks up to the query's own are always chosen, and count. Among
    equal scores the earlier block wins. block_scores is what `index_block_scores` returns.
    """
    block = torch.arange(block_scores.shape[-1], device=block_scores.device)
    count = (positions // BLOCK_TOKENS + 1)[:, None, None]
    forced = (block < init_blocks) | (block >= count - local_blocks)
    scores = torch.where(block_scores.isnan(), torch.full_like(block_scores, -1e30), block_scores)
    scores = torch.where(forced, torch.full_like(scores, 1e30), scores)
    scores = torch.where(block < count, scores, torch.full_like(scores, float("-inf")))
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :top_blocks]
    missing = top_blocks - order.shape[-1]
    order = torch.nn.functional.pad(order, (0, missing), value=-1)
    rank = torch.arange(top_blocks, device=order.device)
    return torch.where(rank < count, order, torch.full_like(order, -1))


def sparse_attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, selected: Tensor, scale: float) -> Tensor:
    """Exact causal softmax attention over the chosen blocks, [T, Hq, d] in the dtype of q.

    q [T, Hq, d]; k, v [S, Hkv, d]; query heads h*g .. h*g+g-1 use the choice `selected[:, h]` (g = Hq / Hkv).
    Written as dense attention under a mask, in fp32.
    """
    tokens, heads, _ = q.shape
    kv_heads = k.shape[1]
    position = torch.arange(k.shape[0], device=k.device)
    chosen = (selected[..., None] == (position // BLOCK_TOKENS)).any(2)  # [T, Hkv, S]
    visible = chosen & (position <= positions[:, None])[:, None, :]
    grouped = q.float().view(tokens, kv_heads, heads // kv_heads, -1)
    logits = torch.einsum("tkgd,skd->tkgs", grouped, k.float()) * scale
    weights = logits.masked_fill(~visible[:, :, None, :], float("-inf")).softmax(-1)
    return torch.einsum("tkgs,skd->tkgd", weights, v.float()).reshape(q.shape).to(q.dtype)
