"""QK-norm, partial rotation and the write of K, V and index key to the page-first cache, fused in one pass over a
projection.

Decode steps do this inside `scores` and `attend` (msa_decode.py); this kernel is for prefill, where queries are read
many times.
"""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from longturn.kernels.dependent import FRESH, launch_options, wait_then_release
from longturn.kernels.head_norm import norm_rope_heads
from longturn.kernels.many_tokens import ManyTokens
from longturn.kernels.msa_plan import MsaNorms
from longturn.kernels.pages import PageLayout


@triton.jit
def write_token(
    projected, row, key_norm, index_key_norm, cos_row, sin_row, cache, page_at, slot,
    key_lane, value_lane, index_lane, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Normalise, rotate and store one token's K, V and index key."""
    head = tl.arange(0, KV_HEADS)
    one = tl.arange(0, 1)
    d = tl.arange(0, D)
    width: tl.constexpr = (Q_HEADS + 3 * KV_HEADS + 1) * D
    token = projected + row.to(tl.int64) * width
    at = (head * PAGE + slot)[:, None] * D + d[None, :]
    k = norm_rope_heads(token + (Q_HEADS + head) * D, head >= 0, key_norm, cos_row, sin_row, eps, D, HALF)
    tl.store(cache + page_at + key_lane + at, k.to(cache.dtype.element_ty))
    v = tl.load(token + (Q_HEADS + KV_HEADS + head)[:, None] * D + d[None, :])
    tl.store(cache + page_at + value_lane + at, v.to(cache.dtype.element_ty))
    index = norm_rope_heads(
        token + (Q_HEADS + 3 * KV_HEADS + one) * D, one >= 0, index_key_norm, cos_row, sin_row, eps, D, HALF
    )
    tl.store(cache + page_at + index_lane + slot * D + d[None, :], index.to(cache.dtype.element_ty))


@triton.jit
def _queries_and_cache(
    projected, positions, rows, page_table, table_stride, cos, sin, query_norm, key_norm, index_query_norm,
    index_key_norm, query, index_query, cache, page_stride, key_lane, value_lane, index_lane, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    wait_then_release(PDL)
    position = tl.load(positions + row, cache_modifier=FRESH)
    if position < 0:
        return
    width: tl.constexpr = (Q_HEADS + 3 * KV_HEADS + 1) * D
    token = projected + row.to(tl.int64) * width
    cos_row = cos + row.to(tl.int64) * D
    sin_row = sin + row.to(tl.int64) * D
    d = tl.arange(0, D)
    member = tl.arange(0, GROUP)
    one = tl.arange(0, 1)
    head = kv_head * GROUP + member
    q = norm_rope_heads(token + head * D, member >= 0, query_norm, cos_row, sin_row, eps, D, HALF)
    tl.store(query + (row.to(tl.int64) * Q_HEADS + head)[:, None] * D + d[None, :], q.to(query.dtype.element_ty))
    index_at = token + (Q_HEADS + 2 * KV_HEADS + kv_head + one) * D
    index = norm_rope_heads(index_at, one >= 0, index_query_norm, cos_row, sin_row, eps, D, HALF)
    to = index_query + (row.to(tl.int64) * KV_HEADS + kv_head) * D + d[None, :]
    tl.store(to, index.to(index_query.dtype.element_ty))
    if kv_head == 0:
        table = page_table + tl.load(rows + row, cache_modifier=FRESH).to(tl.int64) * table_stride
        page = tl.load(table + position // PAGE, cache_modifier=FRESH).to(tl.int64) * page_stride
        write_token(
            projected, row, key_norm, index_key_norm, cos_row, sin_row, cache, page, position % PAGE,
            key_lane, value_lane, index_lane, eps, Q_HEADS, KV_HEADS, D, PAGE, HALF,
        )  # fmt: skip


def queries_and_cache(
    projected: Tensor, step: ManyTokens, norms: MsaNorms, query: Tensor, index_query: Tensor, cache: Tensor,
    layer: int, layout: PageLayout, *, rotary_dim: int, eps: float = 1e-6, pdl: bool = False,
) -> None:  # fmt: skip
    """Normalised, rotated queries of T tokens into `query` [T, q_heads, d] and `index_query` [T, kv_heads, d]; their
    K, V and index key to slot positions % 128 of their pages. Nothing is written for padding.

    projected [T, (q_heads + 3 kv_heads + 1) d] is the raw q | k | v | index_q | index_k projection.
    """
    tokens, q_heads, head_dim = query.shape
    kv = layout.kv_heads
    lanes = (layout.key_offset(layer), layout.value_offset(layer), layout.index_offset(layer))
    _queries_and_cache[(tokens, kv)](
        projected, step.positions, step.rows, step.page_table, step.page_table.stride(0), step.cos, step.sin,
        norms.query, norms.key, norms.index_query, norms.index_key, query, index_query, cache, layout.page_stride,
        *lanes, eps,
        Q_HEADS=q_heads, KV_HEADS=kv, GROUP=q_heads // kv, D=head_dim, PAGE=layout.page_tokens, HALF=rotary_dim // 2,
        num_warps=4, PDL=pdl, **launch_options(pdl),
    )  # fmt: skip
