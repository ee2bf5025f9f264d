"""MiniMax Sparse Attention over the paged cache on a CPU: index scan, choice of blocks, attention to the chosen ones.

`ops/msa.py` is the twin that is plainly right. Here only the index scan grows with the context: keys and values of a
block that no query chose are never touched. A context that fits in the chosen blocks needs no choice and no scan.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from longturn.ops.attention import AttentionPlan
from longturn.ops.kv_lane import Lane
from longturn.ops.msa import BLOCK_TOKENS, select_blocks

SCAN_ELEMENTS = 1 << 19
"""Index keys read at once, and scores held at once (2 MiB of fp32 each): the scan stays in the processor's cache."""
GATHER_QUERIES = 8
"""Up to so many queries of a row, each reads its own blocks; above, each block is read once for all that chose it."""


@dataclass(frozen=True, slots=True)
class Selection:
    """How many blocks a query attends to."""

    top: int
    """Chosen blocks in all, the two kinds below included."""
    init: int = 0
    """Blocks at the start that are always chosen."""
    local: int = 1
    """Blocks up to the query's own that are always chosen."""


def dense_paged_attention(plan: AttentionPlan, query: Tensor, key: Lane, value: Lane) -> Tensor:
    """Causal attention to the whole context, after the step was written. query [T, Hq, d]; returns the same shape."""
    out = torch.empty_like(query)
    for span in plan.spans:
        out[span.begin : span.end] = _dense(query[span.begin : span.end], key, value, span.pages, span.context)
    return out


def sparse_paged_attention(
    plan: AttentionPlan,
    query: Tensor,
    index_query: Tensor,
    key: Lane,
    value: Lane,
    index_key: Lane,
    selection: Selection,
) -> Tensor:
    """Block-sparse causal attention of a step, after the step's keys, values and index keys were written.

    Args:
        plan: from `plan_attention`.
        query: [T, Hq, d], scaled by d^-0.5 here.
        index_query: [T, Hkv, di], one head for each key/value head; not scaled.
        key, value: lanes of Hkv heads.
        index_key: lane of one head.
        selection: how many blocks.

    Returns:
        [T, Hq, d] in the dtype of `query`.
    """
    out = torch.empty_like(query)
    for span in plan.spans:
        q = query[span.begin : span.end]
        if span.context <= selection.top * BLOCK_TOKENS:
            out[span.begin : span.end] = _dense(q, key, value, span.pages, span.context)
            continue
        positions = torch.arange(span.context - len(q), span.context)
        chosen = choose_blocks(index_query[span.begin : span.end], index_key, span.pages, positions, selection)
        attend = _attend_by_query if len(q) <= GATHER_QUERIES else _attend_by_block
        out[span.begin : span.end] = attend(q, key, value, span.pages, positions, chosen)
    return out


def choose_blocks(
    index_query: Tensor, index_key: Lane, pages: Tensor, positions: Tensor, selection: Selection
) -> Tensor:
    """Blocks that each query and key/value head attends to, int64 [n, H, top], -1 where there are fewer.

    Args:
        index_query: [n, H, di], consecutive queries of one row.
        pages: int64 [P], the row's pages up to the last query.
        positions: int64 [n], ascending.
    """
    n, heads, width = index_query.shape
    queries = index_query.to(torch.float32)
    scores = torch.full((n, heads, len(pages)), float("-inf"))
    scan_pages = max(1, SCAN_ELEMENTS // (BLOCK_TOKENS * width))
    for begin in range(0, len(pages), scan_pages):
        keys = index_key.read(pages[begin : begin + scan_pages], torch.float32).reshape(-1, width)
        slice_queries = max(1, SCAN_ELEMENTS // (heads * len(keys)))
        first = int(torch.searchsorted(positions, begin * BLOCK_TOKENS))  # earlier queries see nothing of these pages
        for at in range(first, n, slice_queries):
            part = slice(at, min(at + slice_queries, n))
            scores[part, :, begin : begin + scan_pages] = _block_scores(
                queries[part], keys, positions[part] - begin * BLOCK_TOKENS
            )
    return select_blocks(scores, positions, selection.top, selection.init, selection.local)


def _block_scores(queries: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """Best score [n, H, S / 128] of each block of keys [S, di], for queries [n, H, di]."""
    scores = (queries.flatten(0, 1) @ keys.T).view(len(queries), queries.shape[1], -1)
    if int(positions[0]) < len(keys) - 1:
        # What lies after a query may be anything, NaN too where a page is not full.
        scores.masked_fill_((torch.arange(len(keys)) > positions[:, None])[:, None, :], float("-inf"))
    return scores.view(len(queries), queries.shape[1], -1, BLOCK_TOKENS).amax(-1)


def _dense(query: Tensor, key: Lane, value: Lane, pages: Tensor, context: int) -> Tensor:
    n, heads, width = query.shape
    keys = key.read(pages, query.dtype).transpose(0, 1)
    kv_heads = keys.shape[0]
    keys = keys.reshape(kv_heads, 1, -1, width)[:, :, :context]
    values = value.read(pages, query.dtype).transpose(0, 1).reshape(kv_heads, 1, -1, width)[:, :, :context]
    # heads that share a key/value head become one batch entry, so that its keys are never repeated
    q = query.view(n, kv_heads, -1, width).permute(1, 2, 0, 3)
    group = q.shape[1]
    mask = None if n == 1 else torch.arange(context) <= torch.arange(context - n, context)[:, None]
    mixed = F.scaled_dot_product_attention(
        q, keys.expand(-1, group, -1, -1), values.expand(-1, group, -1, -1), attn_mask=mask
    )
    return mixed.permute(2, 0, 1, 3).reshape(n, heads, width)


def _attend_by_query(query: Tensor, key: Lane, value: Lane, pages: Tensor, positions: Tensor, chosen: Tensor) -> Tensor:
    """Few queries: gather each one's blocks and attend to them as to one short context."""
    n, heads, width = query.shape
    kv_heads = chosen.shape[1]
    head = torch.arange(kv_heads)[:, None]
    out = torch.empty_like(query)
    for i in range(n):
        blocks = chosen[i].clamp(min=0)  # [H, top]
        token = blocks[..., None] * BLOCK_TOKENS + torch.arange(BLOCK_TOKENS)
        visible = ((chosen[i] >= 0)[..., None] & (token <= positions[i])).view(kv_heads, 1, -1)
        keys = key.read_heads(pages[blocks], head, query.dtype).view(kv_heads, -1, width)
        # A masked weight is 0, and 0 times the NaN that an unwritten slot may hold is NaN.
        values = value.read_heads(pages[blocks], head, query.dtype).view(kv_heads, -1, width)
        values = values.masked_fill(~visible.transpose(1, 2), 0.0)
        q = query[i].view(kv_heads, -1, width)
        logits = torch.bmm(q.float(), keys.float().transpose(1, 2)) * width**-0.5
        weights = logits.masked_fill(~visible, float("-inf")).softmax(-1)
        out[i] = torch.bmm(weights, values.float()).view(heads, width).to(query.dtype)
    return out


def _attend_by_block(query: Tensor, key: Lane, value: Lane, pages: Tensor, positions: Tensor, chosen: Tensor) -> Tensor:
    """Many queries: visit each chosen block once, with all queries that chose it, and merge by running softmax.

    The running maximum and sum follow Milakov and Gimelshein, 2018, arXiv:1805.02867.
    """
    n, heads, width = query.shape
    kv_heads = chosen.shape[1]
    group = heads // kv_heads
    q = query.view(n, kv_heads, group, width).float() * width**-0.5
    best = torch.full((kv_heads, n, group), float("-inf"))
    total = torch.zeros((kv_heads, n, group))
    mixed = torch.zeros((kv_heads, n, group, width))
    slot = torch.arange(BLOCK_TOKENS)
    for h in range(kv_heads):
        block_of, query_of = _queries_of_blocks(chosen[:, h])
        for block, who in zip(block_of, query_of, strict=True):
            head = torch.tensor(h)
            keys = key.read_heads(pages[block], head, query.dtype).float()
            values = value.read_heads(pages[block], head, query.dtype).float()
            logits = q[who, h] @ keys.T  # [m, group, 128]
            edge = positions[who] - block * BLOCK_TOKENS
            if int(edge.min()) < BLOCK_TOKENS - 1:  # some query sits in this block: hide what comes after it
                logits = logits.masked_fill((slot > edge[:, None])[:, None, :], float("-inf"))
                values = values.masked_fill((slot > edge.max())[:, None], 0.0)
            old = best[h, who]
            new = torch.maximum(old, logits.amax(-1))
            weights = torch.exp(logits - new[..., None])
            shrink = torch.exp(old - new)
            best[h, who] = new
            total[h, who] = total[h, who] * shrink + weights.sum(-1)
            mixed[h, who] = mixed[h, who] * shrink[..., None] + weights @ values
    out = mixed / total[..., None]
    return out.transpose(0, 1).reshape(n, heads, width).to(query.dtype)


def _queries_of_blocks(chosen: Tensor) -> tuple[list[int], tuple[Tensor, ...]]:
    """Turn the choice [n, top] of one head around: the blocks that any query chose, and who chose each."""
    flat = chosen.flatten()
    order = torch.argsort(flat, stable=True)
    blocks, counts = torch.unique_consecutive(flat[order], return_counts=True)
    queries = torch.split(order // chosen.shape[1], counts.tolist())
    first = int(len(blocks) > 0 and int(blocks[0]) < 0)  # -1 is no block
    return blocks.tolist()[first:], queries[first:]
