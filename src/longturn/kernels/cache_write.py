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
from longturn.kernels.kv_formats import NUMBER, NVFP4, PLAIN, LaneViews, store_rows
from longturn.kernels.many_tokens import ManyTokens
from longturn.kernels.msa_plan import MsaNorms
from longturn.kernels.pages import PageLayout


@triton.jit
def _write_heads(
    heads_at, to, norm_weight, cos_row, sin_row, eps, D: tl.constexpr, HALF: tl.constexpr
):  # fmt: skip
    """Normalise and rotate the heads at pointers `heads_at` [H] and store them at pointers `to` [H].

    As `norm_rope_heads` and a store, but each rotated half is a tile of its own where widths allow: a column's partner
    is then in the same registers, and all accesses are wide.
    """
    REST: tl.constexpr = D - 2 * HALF
    if REST > 0 and (REST & (REST - 1)) == 0:
        half = tl.arange(0, HALF)
        rest = 2 * HALF + tl.arange(0, REST)
        a = tl.load(heads_at[:, None] + half[None, :], cache_modifier=FRESH).to(tl.float32)
        b = tl.load(heads_at[:, None] + (HALF + half)[None, :], cache_modifier=FRESH).to(tl.float32)
        c = tl.load(heads_at[:, None] + rest[None, :], cache_modifier=FRESH).to(tl.float32)
        square = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1) + tl.sum(c * c, axis=1)
        scale = tl.rsqrt(square / D + eps)[:, None]
        a = a * scale * (tl.load(norm_weight + half).to(tl.float32) + 1.0)[None, :]
        b = b * scale * (tl.load(norm_weight + HALF + half).to(tl.float32) + 1.0)[None, :]
        c = c * scale * (tl.load(norm_weight + rest).to(tl.float32) + 1.0)[None, :]
        first_cos = tl.load(cos_row + half, cache_modifier=FRESH)[None, :]
        first_sin = tl.load(sin_row + half, cache_modifier=FRESH)[None, :]
        second_cos = tl.load(cos_row + HALF + half, cache_modifier=FRESH)[None, :]
        second_sin = tl.load(sin_row + HALF + half, cache_modifier=FRESH)[None, :]
        form: tl.constexpr = to.dtype.element_ty
        tl.store(to[:, None] + half[None, :], (a * first_cos + b * first_sin).to(form))
        tl.store(to[:, None] + (HALF + half)[None, :], (b * second_cos + a * second_sin).to(form))
        tl.store(to[:, None] + rest[None, :], c.to(form))
    else:
        x = norm_rope_heads(heads_at, heads_at == heads_at, norm_weight, cos_row, sin_row, eps, D, HALF)
        tl.store(to[:, None] + tl.arange(0, D)[None, :], x.to(to.dtype.element_ty))


@triton.jit
def _queries_and_cache(
    projected, positions, rows, page_table, table_stride, cos, sin, query_norm, key_norm, index_query_norm,
    index_key_norm, query, index_query, cache, page_stride, key_lane, value_lane,
    scales, scale_stride, key_scale_lane, value_scale_lane, index, index_stride, index_lane, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    HALF: tl.constexpr, FORMAT: tl.constexpr, INDEX_FORMAT: tl.constexpr, PDL: tl.constexpr,
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
    table = page_table + tl.load(rows + row, cache_modifier=FRESH).to(tl.int64) * table_stride
    page = tl.load(table + position // PAGE, cache_modifier=FRESH).to(tl.int64)
    slot = position % PAGE
    d = tl.arange(0, D)
    member = tl.arange(0, GROUP)
    one = tl.arange(0, 1)
    head = kv_head * GROUP + member
    to = query + (row.to(tl.int64) * Q_HEADS + head) * D
    if FORMAT == NVFP4:
        # Columns are stored as keys' columns come out of their codes: the even ones, then the odd ones.
        q = norm_rope_heads(token + head * D, member >= 0, query_norm, cos_row, sin_row, eps, D, HALF)
        even, odd = tl.split(tl.reshape(q, [GROUP, D // 2, 2]))
        half = tl.arange(0, D // 2)[None, :]
        tl.store(to[:, None] + half, even.to(query.dtype.element_ty))
        tl.store(to[:, None] + D // 2 + half, odd.to(query.dtype.element_ty))
    else:
        _write_heads(token + head * D, to, query_norm, cos_row, sin_row, eps, D, HALF)
    index_at = token + (Q_HEADS + 2 * KV_HEADS + kv_head + one) * D
    to = index_query + (row.to(tl.int64) * KV_HEADS + kv_head + one) * D
    _write_heads(index_at, to, index_query_norm, cos_row, sin_row, eps, D, HALF)
    at = kv_head * PAGE + slot + one
    lane = cache + page * page_stride
    scales_of = scales + page * scale_stride
    k_at = token + (Q_HEADS + kv_head + one) * D
    if FORMAT == PLAIN:
        _write_heads(k_at, lane + key_lane + at * D, key_norm, cos_row, sin_row, eps, D, HALF)
    else:
        k = norm_rope_heads(k_at, one >= 0, key_norm, cos_row, sin_row, eps, D, HALF)
        store_rows(k, lane + key_lane, scales_of + key_scale_lane, at, 1, D, FORMAT)
    v_at = token + (Q_HEADS + KV_HEADS + kv_head + one)[:, None] * D + d[None, :]
    v = tl.load(v_at, cache_modifier=FRESH).to(tl.float32)
    store_rows(v, lane + value_lane, scales_of + value_scale_lane, at, 1, D, FORMAT)
    if kv_head == 0:
        ik_at = token + (Q_HEADS + 3 * KV_HEADS + one) * D
        lane_of = index + page * index_stride + index_lane
        if INDEX_FORMAT == PLAIN:
            _write_heads(ik_at, lane_of + (slot + one) * D, index_key_norm, cos_row, sin_row, eps, D, HALF)
        else:
            ik = norm_rope_heads(ik_at, one >= 0, index_key_norm, cos_row, sin_row, eps, D, HALF)
            store_rows(ik, lane_of, lane_of, slot + one, 1, D, INDEX_FORMAT)


def queries_and_cache(
    projected: Tensor, step: ManyTokens, norms: MsaNorms, query: Tensor, index_query: Tensor, lanes: LaneViews,
    layout: PageLayout, *, rotary_dim: int, eps: float = 1e-6, pdl: bool = False,
) -> None:  # fmt: skip
    """Normalised, rotated queries of T tokens into `query` [T, q_heads, d] and `index_query` [T, kv_heads, d]; their
    K, V and index key to slot positions % 128 of their pages. Nothing is written for padding.

    projected [T, (q_heads + 3 kv_heads + 1) d] is the raw q | k | v | index_q | index_k projection; `lanes` are those
    of `kv_formats.lane_views`. With NVFP4 keys a query's even columns come before its odd ones.
    """
    tokens, q_heads, head_dim = query.shape
    kv = layout.kv_heads
    _queries_and_cache[(tokens, kv)](
        projected, step.positions, step.rows, step.page_table, step.page_table.stride(0), step.cos, step.sin,
        norms.query, norms.key, norms.index_query, norms.index_key, query, index_query,
        lanes.kv, lanes.kv_stride, lanes.key, lanes.value,
        lanes.scales, lanes.scale_stride, lanes.key_scale, lanes.value_scale,
        lanes.index, lanes.index_stride, lanes.index_key, eps,
        Q_HEADS=q_heads, KV_HEADS=kv, GROUP=q_heads // kv, D=head_dim, PAGE=layout.page_tokens, HALF=rotary_dim // 2,
        FORMAT=NUMBER[layout.kv_format], INDEX_FORMAT=NUMBER[layout.index_format],
        num_warps=1, PDL=pdl, **launch_options(pdl),
    )  # fmt: skip
