"""QK-norm, partial rotation and the write of K, V and index key to the page-first cache, fused in one pass over a
projection.

Decode steps do this inside `scores` and `attend` (msa_decode.py); this kernel is for prefill, where queries are read
many times.
"""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import torch
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


@triton.jit
def _rows_at(at, D: tl.constexpr, HALF: tl.constexpr):
    """The rows at pointers `at` [R]: columns up to HALF, those up to twice that, and the rest."""
    half_at = at[:, None] + tl.arange(0, HALF)[None, :]
    rest_at = at[:, None] + (2 * HALF + tl.arange(0, D - 2 * HALF))[None, :]
    return half_at, half_at + HALF, rest_at


@triton.jit
def _turned(x, weight, cos, sin, eps, D: tl.constexpr):
    """Rows in three parts, normalised, and their halves rotated; fp32. `weight`, `cos` and `sin` are in such parts too,
    of the same shapes: as rows of their own they would need conversions between layouts."""
    a, b, c = x[0].to(tl.float32), x[1].to(tl.float32), x[2].to(tl.float32)
    square = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1) + tl.sum(c * c, axis=1)
    scale = tl.rsqrt(square / D + eps)[:, None]
    a = a * scale * (weight[0].to(tl.float32) + 1.0)
    b = b * scale * (weight[1].to(tl.float32) + 1.0)
    c = c * scale * (weight[2].to(tl.float32) + 1.0)
    return a * cos[0] + b * sin[0], b * cos[1] + a * sin[1], c


@triton.jit
def _loaded(at):
    return (
        tl.load(at[0], cache_modifier=FRESH), tl.load(at[1], cache_modifier=FRESH), tl.load(at[2], cache_modifier=FRESH)
    )  # fmt: skip


@triton.jit
def _store(to, x, ok):
    """Store the three parts of rows at pointers of their shapes."""
    form: tl.constexpr = to[0].dtype.element_ty
    tl.store(to[0], x[0].to(form), mask=ok)
    tl.store(to[1], x[1].to(form), mask=ok)
    tl.store(to[2], x[2].to(form), mask=ok)


@triton.jit
def _plain_queries_and_cache(
    projected, positions, rows, page_table, table_stride, cos, sin, query_norm, key_norm, index_query_norm,
    index_key_norm, query, index_query, cache, page_stride, key_lane, value_lane, index, index_stride, index_lane, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
    HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `_queries_and_cache`, where all that it writes is of one type and a head's halves and rest are powers of two.

    A column and its partner are then in the same registers, all accesses are wide, and the rows of few heads are one
    tile. All loads come before all stores, past which the compiler could not move them."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    # What the step began with is older than the kernel before.
    position = tl.load(positions + row, cache_modifier=FRESH)
    table = page_table + tl.load(rows + row, cache_modifier=FRESH).to(tl.int64) * table_stride
    wait_then_release(PDL)
    if position < 0:
        return
    page = tl.load(table + position // PAGE, cache_modifier=FRESH).to(tl.int64)
    token = projected + row.to(tl.int64) * ((Q_HEADS + 3 * KV_HEADS + 1) * D)
    member = tl.arange(0, GROUP)
    few = tl.arange(0, 4)  # index query, key, index key, and the index key again for a power of two
    d = tl.arange(0, D)
    few_head = tl.where(few == 0, 2 * KV_HEADS + kv_head, tl.where(few == 1, kv_head, 3 * KV_HEADS))
    q = _loaded(_rows_at(token + (kv_head * GROUP + member) * D, D, HALF))
    x = _loaded(_rows_at(token + (Q_HEADS + few_head) * D, D, HALF))
    v = tl.load(token + (Q_HEADS + KV_HEADS + kv_head) * D + d, cache_modifier=FRESH)
    few_norm = tl.where(few == 0, index_query_norm, tl.where(few == 1, key_norm, index_key_norm))
    line = row.to(tl.int64) * D
    q_cos, q_sin = _rows_at(cos + line + member * 0, D, HALF), _rows_at(sin + line + member * 0, D, HALF)
    x_cos, x_sin = _rows_at(cos + line + few * 0, D, HALF), _rows_at(sin + line + few * 0, D, HALF)
    q = _turned(
        q, _loaded(_rows_at(query_norm + member * 0, D, HALF)),
        (tl.load(q_cos[0], cache_modifier=FRESH), tl.load(q_cos[1], cache_modifier=FRESH)),
        (tl.load(q_sin[0], cache_modifier=FRESH), tl.load(q_sin[1], cache_modifier=FRESH)), eps, D,
    )  # fmt: skip
    x = _turned(
        x, _loaded(_rows_at(few_norm, D, HALF)),
        (tl.load(x_cos[0], cache_modifier=FRESH), tl.load(x_cos[1], cache_modifier=FRESH)),
        (tl.load(x_sin[0], cache_modifier=FRESH), tl.load(x_sin[1], cache_modifier=FRESH)), eps, D,
    )  # fmt: skip
    _store(_rows_at(query + (row.to(tl.int64) * Q_HEADS + kv_head * GROUP + member) * D, D, HALF), q, True)
    slot = position % PAGE
    lane = cache + page * page_stride + (kv_head * PAGE + slot) * D
    index_to = index + page * index_stride + index_lane + slot * D
    query_to = index_query + (row.to(tl.int64) * KV_HEADS + kv_head) * D
    to = tl.where(few == 0, query_to, tl.where(few == 1, lane + key_lane, index_to))
    _store(_rows_at(to, D, HALF), x, ((few < 2) | ((few == 2) & (kv_head == 0)))[:, None])
    tl.store(lane + value_lane + d, v)


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
    group, half, rest = q_heads // kv, rotary_dim // 2, head_dim - rotary_dim
    types = {projected.dtype, query.dtype, index_query.dtype, lanes.kv.dtype, lanes.index.dtype, *_types_of(norms)}
    if len(types) == 1 and rest > 0 and all(width & (width - 1) == 0 for width in (half, rest)):
        _plain_queries_and_cache[(tokens, kv)](
            projected, step.positions, step.rows, step.page_table, step.page_table.stride(0), step.cos, step.sin,
            norms.query, norms.key, norms.index_query, norms.index_key, query, index_query,
            lanes.kv, lanes.kv_stride, lanes.key, lanes.value, lanes.index, lanes.index_stride, lanes.index_key, eps,
            Q_HEADS=q_heads, KV_HEADS=kv, GROUP=group, D=head_dim, PAGE=layout.page_tokens, HALF=half,
            num_warps=max(1, group // 8), PDL=pdl, **launch_options(pdl),
        )  # fmt: skip
        return
    _queries_and_cache[(tokens, kv)](
        projected, step.positions, step.rows, step.page_table, step.page_table.stride(0), step.cos, step.sin,
        norms.query, norms.key, norms.index_query, norms.index_key, query, index_query,
        lanes.kv, lanes.kv_stride, lanes.key, lanes.value,
        lanes.scales, lanes.scale_stride, lanes.key_scale, lanes.value_scale,
        lanes.index, lanes.index_stride, lanes.index_key, eps,
        Q_HEADS=q_heads, KV_HEADS=kv, GROUP=group, D=head_dim, PAGE=layout.page_tokens, HALF=half,
        FORMAT=NUMBER[layout.kv_format], INDEX_FORMAT=NUMBER[layout.index_format],
        num_warps=1, PDL=pdl, **launch_options(pdl),
    )  # fmt: skip


def _types_of(norms: MsaNorms) -> set[torch.dtype]:
    return {norms.query.dtype, norms.key.dtype, norms.index_query.dtype, norms.index_key.dtype}
