"""Causal grouped-query attention over a paged cache: a reference that is plainly right, and a fast CPU path.

One layer's lane of the cache is a view [pages, kv_heads, 128, head_dim] of the one page-first allocation. A step holds
rows; the queries of a row are consecutive tokens at consecutive positions that end at the row's context length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from longturn.config import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class PagedRows:
    """The rows of one step, as device tensors."""

    query_starts: Tensor
    """int32 [R + 1]: tokens query_starts[r] .. query_starts[r+1]-1 of the step are row r's."""
    context_tokens: Tensor
    """int32 [R]: tokens of row r after this step, cached ones and this step's."""
    page_table: Tensor
    """int32 [R, P]: page of positions 128*i .. 128*i+127; entries past the context are not read."""


@dataclass(frozen=True, slots=True)
class _Span:
    """One row, unpacked for the CPU path."""

    begin: int
    end: int
    context: int
    pages: Tensor
    """int64 [ceil(context / 128)]."""
    mask: Tensor | None
    """[end - begin, context], 0 where a query sees a key and -inf elsewhere; None if every query sees every key."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What every layer of a step shares, worked out once: where keys are written and which rows read what."""

    pages: Tensor
    """int64 [T]: page that each token's key and value go to."""
    offsets: Tensor
    """int64 [T]: its place in that page."""
    spans: tuple[_Span, ...]


def plan_attention(rows: PagedRows, positions: Tensor, dtype: torch.dtype = torch.float32) -> AttentionPlan:
    """Prepare a step for the CPU path.

    Args:
        rows: the step's rows.
        positions: int32 or int64 [T], of every token of the step.
        dtype: of the queries that will come. Masks are made in it once; torch would convert bool ones in every layer.
    """
    starts, contexts = rows.query_starts.tolist(), rows.context_tokens.tolist()
    counts = rows.query_starts.diff().to(torch.int64)
    row_of = torch.repeat_interleave(torch.arange(len(contexts)), counts)
    where = positions.to(torch.int64)
    table = rows.page_table.to(torch.int64)
    spans = []
    for row, context in enumerate(contexts):
        begin, end = starts[row], starts[row + 1]
        mask = None
        if end - begin > 1:
            later = torch.arange(context) > torch.arange(context - (end - begin), context)[:, None]
            mask = torch.zeros(later.shape, dtype=dtype).masked_fill_(later, -torch.inf)
        spans.append(_Span(begin, end, context, table[row, : -(-context // PAGE_TOKENS)], mask))
    return AttentionPlan(table[row_of, where // PAGE_TOKENS], where % PAGE_TOKENS, tuple(spans))


def write_kv(plan: AttentionPlan, key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor) -> None:
    """Store key and value [T, kv_heads, head_dim] in a layer's pages [pages, kv_heads, 128, head_dim]."""
    key_pages[plan.pages, :, plan.offsets] = key.to(key_pages.dtype)
    value_pages[plan.pages, :, plan.offsets] = value.to(value_pages.dtype)


def paged_attention(plan: AttentionPlan, query: Tensor, key_pages: Tensor, value_pages: Tensor) -> Tensor:
    """Attention of a step, after `write_kv` of the same layer.

    Args:
        plan: from `plan_attention`.
        query: [T, heads, head_dim].
        key_pages, value_pages: [pages, kv_heads, 128, head_dim]; any floating dtype, read as the dtype of `query`.

    Returns:
        [T, heads, head_dim] in the dtype of `query`.
    """
    _, heads, head_dim = query.shape
    kv_heads = key_pages.shape[1]
    out = torch.empty_like(query)
    for span in plan.spans:
        count = span.end - span.begin
        # heads that share a KV head become one batch entry, so that its keys are read once and never repeated
        q = query[span.begin : span.end].view(count, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
        keys = _gather(key_pages, span, query.dtype).expand(-1, q.shape[1], -1, -1)
        values = _gather(value_pages, span, query.dtype).expand(-1, q.shape[1], -1, -1)
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=span.mask)
        out[span.begin : span.end] = mixed.permute(2, 0, 1, 3).reshape(count, heads, head_dim)
    return out


def _gather(pages: Tensor, span: _Span, dtype: torch.dtype) -> Tensor:
    """The row's keys or values in order: [kv_heads, 1, context, head_dim]."""
    _, kv_heads, _, head_dim = pages.shape
    lane = pages[span.pages].to(dtype).transpose(0, 1).reshape(kv_heads, 1, -1, head_dim)
    return lane[:, :, : span.context]


def paged_attention_reference(rows: PagedRows, query: Tensor, key_pages: Tensor, value_pages: Tensor) -> Tensor:
    """The same as `paged_attention`, one query and one head at a time in float64."""
    _, heads, head_dim = query.shape
    group = heads // key_pages.shape[1]
    out = torch.empty_like(query)
    for row in range(len(rows.context_tokens)):
        begin, end = int(rows.query_starts[row]), int(rows.query_starts[row + 1])
        context = int(rows.context_tokens[row])
        for token in range(begin, end):
            position = context - (end - token)
            slots = [(int(rows.page_table[row, p // PAGE_TOKENS]), p % PAGE_TOKENS) for p in range(position + 1)]
            for head in range(heads):
                keys = torch.stack([key_pages[page, head // group, slot] for page, slot in slots]).double()
                values = torch.stack([value_pages[page, head // group, slot] for page, slot in slots]).double()
                scores = keys @ query[token, head].double() / head_dim**0.5
                out[token, head] = (scores.softmax(0) @ values).to(query.dtype)
    return out
