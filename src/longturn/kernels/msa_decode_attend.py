"""Attention of a decode step over the chosen blocks: `attend` in splits, `merge` of the splits (see msa_decode.py)."""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from longturn.kernels.dependent import FRESH, wait_then_release
from longturn.kernels.head_norm import norm_rope_heads
from longturn.kernels.kv_formats import E2M1_GROW, NVFP4, PLAIN, widen_e2m1
from longturn.kernels.msa_decode_choose import order_keys


@triton.jit
def _chosen_block(order, chosen, table, rank, i, pages, count, RANKED: tl.constexpr):
    """The block of rank `order` and its page: from the ranks of all blocks `i`, or as `select` found it; block -1 and a
    page that exists if there is none."""
    if RANKED > 0:
        block = tl.where(order < count, tl.sum(tl.where(rank == order, i, 0), axis=0), -1)
        page = tl.sum(tl.where(rank == order, pages, 0), axis=0)
    else:
        block = tl.load(chosen + order, cache_modifier=FRESH)
        page = tl.load(table + block, mask=block >= 0, other=0, cache_modifier=FRESH)
    return block, page


@triton.jit
def _load_tile(at, key_lane, value_lane, key_scales, value_scales, ok, FORMAT: tl.constexpr):
    """K and V of the tokens `ok`, and their scales if they have any."""
    k = tl.load(at + key_lane, mask=ok[:, None], other=0.0)
    v = tl.load(at + value_lane, mask=ok[:, None], other=0.0)
    if FORMAT == NVFP4:
        k_scale = tl.load(key_scales, mask=ok[:, None], other=0.0)
        v_scale = tl.load(value_scales, mask=ok[:, None], other=0.0)
    else:
        k_scale = ok
        v_scale = ok
    return k, v, k_scale, v_scale


@triton.jit
def _take_tile(
    query, odd_query, k, v, k_scale, v_scale, ok, top, denominator, total, odd_total,
    TILE: tl.constexpr, D: tl.constexpr, FORMAT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add a tile of tokens to a softmax in progress: largest logit, sum of weights and weighted sum of values."""
    if FORMAT == NVFP4:
        k, odd_k = widen_e2m1(k, k_scale, TILE, D, ASM)
        logit = tl.dot(query, tl.trans(k), input_precision="ieee")
        logit = tl.dot(odd_query, tl.trans(odd_k), logit, input_precision="ieee")
    else:
        logit = tl.dot(query, tl.trans(k.to(query.dtype)), input_precision="ieee")
    logit = tl.where(ok[None, :], logit, float("-inf"))
    new_top = tl.maximum(top, tl.max(logit, axis=1))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(logit - safe[:, None])
    shrink = tl.exp2(top - safe)
    denominator = denominator * shrink + tl.sum(weight, axis=1)
    weight = weight.to(query.dtype)
    if FORMAT == NVFP4:
        v, odd_v = widen_e2m1(v, v_scale, TILE, D, ASM)
        odd_total = odd_total * shrink[:, None] + tl.dot(weight, odd_v, input_precision="ieee")
        total = total * shrink[:, None] + tl.dot(weight, v, input_precision="ieee")
    else:
        total = total * shrink[:, None] + tl.dot(weight, v.to(query.dtype), input_precision="ieee")
    return new_top, denominator, total, odd_total


@triton.jit
def _attend(
    projected, positions, page_table, table_stride, cos, sin, query_norm, scores, score_stride, selected,
    cache, page_stride, key_lane, value_lane, scales, scale_stride, key_scale_lane, value_scale_lane,
    partial, partial_max, partial_sum, out, scale_log2, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, HALF: tl.constexpr,
    FORMAT: tl.constexpr, ASM: tl.constexpr,
    TOP: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr, RANKED: tl.constexpr,
    SPLITS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    TILES_PER_BLOCK: tl.constexpr = PAGE // TILE
    TILES: tl.constexpr = TOP * TILES_PER_BLOCK // SPLITS
    member = tl.arange(0, 16)
    d = tl.arange(0, D)
    width: tl.constexpr = (Q_HEADS + 3 * KV_HEADS + 1) * D
    position = tl.load(positions + row, cache_modifier=FRESH)
    count = tl.where(position >= 0, position // PAGE + 1, 0)
    # The projection is at least two launches back, so it is complete before this kernel's wait (see dependent.py).
    heads_at = projected + row.to(tl.int64) * width + (kv_head * GROUP + member) * D
    query = norm_rope_heads(heads_at, member < GROUP, query_norm, cos + row * D, sin + row * D, eps, D, HALF)
    FLOAT: tl.constexpr = cache.dtype.element_ty if FORMAT == PLAIN else tl.float16
    # Columns of NVFP4 come as an even and an odd half, both of queries and of what is summed up.
    HALVES: tl.constexpr = 2 if FORMAT == NVFP4 else 1
    if FORMAT == NVFP4:
        query *= scale_log2 * E2M1_GROW
        query, odd_query = tl.split(tl.reshape(query.to(FLOAT), [16, D // 2, 2]))
        odd_total = tl.zeros([16, D // 2], dtype=tl.float32)
    else:
        query = (query * scale_log2).to(FLOAT)
        odd_query = query
        odd_total = tl.zeros([16, 1], dtype=tl.float32)
    table = page_table + row.to(tl.int64) * table_stride
    i = tl.arange(0, RANKED if RANKED > 0 else TOP)
    rank = i
    pages = i
    if RANKED > 0:
        pages = tl.load(table + i, mask=i < count, other=0, cache_modifier=FRESH)
    wait_then_release(PDL)
    if RANKED > 0:
        base = scores + (row * KV_HEADS + kv_head).to(tl.int64) * score_stride
        key = order_keys(base, i, count, INIT, LOCAL)
        rank = tl.where(i < count, tl.sum((key[None, :] > key[:, None]).to(tl.int32), axis=1), TOP)
    token = tl.arange(0, TILE)
    WIDTH: tl.constexpr = D // HALVES
    lane = (kv_head * PAGE + token)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    top = tl.full([16], float("-inf"), tl.float32)
    denominator = tl.zeros([16], dtype=tl.float32)
    total = tl.zeros([16, WIDTH], dtype=tl.float32)
    chosen = selected + (row * KV_HEADS + kv_head) * TOP
    first = split * TILES
    if FORMAT == PLAIN:
        for step in tl.range(0, TILES, num_stages=STAGES):
            start = ((first + step) % TILES_PER_BLOCK) * TILE
            block, page = _chosen_block((first + step) // TILES_PER_BLOCK, chosen, table, rank, i, pages, count, RANKED)
            ok = (block >= 0) & (block * PAGE + start + token <= position)
            k, v, k_scale, v_scale = _load_tile(
                cache + page.to(tl.int64) * page_stride + start * WIDTH + lane, key_lane, value_lane,
                scales, scales, ok, FORMAT,
            )  # fmt: skip
            top, denominator, total, odd_total = _take_tile(
                query, odd_query, k, v, k_scale, v_scale, ok, top, denominator, total, odd_total, TILE, D, FORMAT, ASM
            )
    else:
        # Lanes that are converted escape the compiler's pipelining: load a tile ahead, and find its block two ahead.
        scale_lane = (kv_head * PAGE + token)[:, None] * (D // 16) + tl.arange(0, D // 16)[None, :]
        start = (first % TILES_PER_BLOCK) * TILE
        block, page = _chosen_block(first // TILES_PER_BLOCK, chosen, table, rank, i, pages, count, RANKED)
        ok = (block >= 0) & (block * PAGE + start + token <= position)
        at_scale = scales + page.to(tl.int64) * scale_stride + start * (D // 16) + scale_lane
        k, v, k_scale, v_scale = _load_tile(
            cache + page.to(tl.int64) * page_stride + start * WIDTH + lane, key_lane, value_lane,
            at_scale + key_scale_lane, at_scale + value_scale_lane, ok, FORMAT,
        )  # fmt: skip
        tile = first + (1 if TILES > 1 else 0)
        block, page = _chosen_block(tile // TILES_PER_BLOCK, chosen, table, rank, i, pages, count, RANKED)
        for step in tl.range(0, TILES, num_stages=1):
            start = ((first + step + 1) % TILES_PER_BLOCK) * TILE
            next_ok = (block >= 0) & (block * PAGE + start + token <= position) & (step + 1 < TILES)
            at_scale = scales + page.to(tl.int64) * scale_stride + start * (D // 16) + scale_lane
            next_k, next_v, next_k_scale, next_v_scale = _load_tile(
                cache + page.to(tl.int64) * page_stride + start * WIDTH + lane, key_lane, value_lane,
                at_scale + key_scale_lane, at_scale + value_scale_lane, next_ok, FORMAT,
            )  # fmt: skip
            tile = first + tl.minimum(step + 2, TILES - 1)
            block, page = _chosen_block(tile // TILES_PER_BLOCK, chosen, table, rank, i, pages, count, RANKED)
            top, denominator, total, odd_total = _take_tile(
                query, odd_query, k, v, k_scale, v_scale, ok, top, denominator, total, odd_total, TILE, D, FORMAT, ASM
            )
            k, v, k_scale, v_scale, ok = next_k, next_v, next_k_scale, next_v_scale, next_ok
    if FORMAT == NVFP4:
        total = tl.reshape(tl.join(total, odd_total), [16, D]) * E2M1_GROW
    mine = member < GROUP
    if SPLITS == 1:
        total = tl.where((denominator > 0.0)[:, None], total / denominator[:, None], 0.0)
        to = out + (row * Q_HEADS + kv_head * GROUP + member)[:, None] * D + d[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=mine[:, None])
    else:
        slot = ((row * SPLITS + split) * Q_HEADS + kv_head * GROUP + member).to(tl.int64)
        tl.store(partial + slot[:, None] * D + d[None, :], total, mask=mine[:, None])
        tl.store(partial_max + slot, top, mask=mine)
        tl.store(partial_sum + slot, denominator, mask=mine)


@triton.jit
def _merge(
    partial, partial_max, partial_sum, out,
    Q_HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1)
    wait_then_release(PDL)
    slot = (row * SPLITS + tl.arange(0, SPLITS)).to(tl.int64) * Q_HEADS + head
    d = tl.arange(0, D)
    part = tl.load(partial + slot[:, None] * D + d[None, :], cache_modifier=FRESH)
    top = tl.load(partial_max + slot, cache_modifier=FRESH)
    best = tl.max(top, axis=0)
    share = tl.exp2(top - tl.where(best == float("-inf"), 0.0, best))
    denominator = tl.sum(tl.load(partial_sum + slot, cache_modifier=FRESH) * share, axis=0)
    total = tl.sum(part * share[:, None], axis=0)
    # A padded row attends to nothing: it gets zeros, never NaN, since later kernels read every row of the bucket.
    total = tl.where(denominator > 0.0, total / denominator, 0.0)
    tl.store(out + (row * Q_HEADS + head) * D + d, total.to(out.dtype.element_ty))
