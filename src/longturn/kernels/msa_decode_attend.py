"""Attention of a decode step over the chosen blocks: `attend` in splits, `merge` of the splits (see msa_decode.py)."""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from longturn.kernels.dependent import FRESH, release_then_wait
from longturn.kernels.head_norm import norm_rope_heads
from longturn.kernels.kv_formats import E2M1_GROW, FP8, NVFP4, PLAIN, widen_words_e2m1, widen_words_fp8
from longturn.kernels.msa_decode_choose import order_keys


@triton.jit
def _load_tile(at, key_lane, value_lane, key_scales, value_scales, ok, FORMAT: tl.constexpr):
    """K and V of the tokens `ok`, and their scales if they have any."""
    k = tl.load(at + key_lane, mask=ok[:, None], other=0)
    v = tl.load(at + value_lane, mask=ok[:, None], other=0)
    if FORMAT == NVFP4:
        k_scale = tl.load(key_scales, mask=ok[:, None], other=0.0)
        v_scale = tl.load(value_scales, mask=ok[:, None], other=0.0)
    else:
        k_scale = ok
        v_scale = ok
    return k, v, k_scale, v_scale


@triton.jit
def _in_parts(x, PARTS: tl.constexpr):
    """Columns of x [R, D] by their number modulo PARTS: PARTS tiles [R, D / PARTS]."""
    R: tl.constexpr = x.shape[0]
    W: tl.constexpr = x.shape[1] // PARTS
    if PARTS == 1:
        return (x,)
    elif PARTS == 2:
        return tl.split(tl.reshape(x, [R, W, 2]))
    else:
        even, odd = tl.split(tl.reshape(x, [R, W, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth


@triton.jit
def _of_parts(parts, PARTS: tl.constexpr):
    """The inverse of `_in_parts`."""
    R: tl.constexpr = parts[0].shape[0]
    D: tl.constexpr = parts[0].shape[1] * PARTS
    if PARTS == 1:
        return parts[0]
    elif PARTS == 2:
        return tl.reshape(tl.join(parts[0], parts[1]), [R, D])
    else:
        return tl.reshape(tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3])), [R, D])


@triton.jit
def _widened(words, scale, TILE: tl.constexpr, D: tl.constexpr, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """A tile of K or V as the parts that the query and the sum are in."""
    if FORMAT == NVFP4:
        return widen_words_e2m1(words, scale, TILE, D, ASM)
    elif FORMAT == FP8:
        return widen_words_fp8(words, ASM)
    else:
        return (words,)


@triton.jit
def _take_tile(
    query, k, v, k_scale, v_scale, ok, top, denominator, total,
    TILE: tl.constexpr, D: tl.constexpr, FORMAT: tl.constexpr, PARTS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Add a tile of tokens to a softmax in progress: largest logit, sum of weights and weighted sum of values, the
    last in parts."""
    keys = _widened(k, k_scale, TILE, D, FORMAT, ASM)
    logit = tl.dot(query[0], tl.trans(keys[0]), input_precision="ieee")
    for j in tl.static_range(1, PARTS):
        logit = tl.dot(query[j], tl.trans(keys[j]), logit, input_precision="ieee")
    logit = tl.where(ok[None, :], logit, float("-inf"))
    new_top = tl.maximum(top, tl.max(logit, axis=1))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(logit - safe[:, None])
    shrink = tl.exp2(top - safe)
    denominator = denominator * shrink + tl.sum(weight, axis=1)
    weight = weight.to(query[0].dtype)
    values = _widened(v, v_scale, TILE, D, FORMAT, ASM)
    by = shrink[:, None]
    if PARTS == 1:
        sums = (tl.dot(weight, values[0], total[0] * by, input_precision="ieee"),)
        return new_top, denominator, sums
    elif PARTS == 2:
        first = tl.dot(weight, values[0], total[0] * by, input_precision="ieee")
        second = tl.dot(weight, values[1], total[1] * by, input_precision="ieee")
        return new_top, denominator, (first, second)
    else:
        first = tl.dot(weight, values[0], total[0] * by, input_precision="ieee")
        second = tl.dot(weight, values[1], total[1] * by, input_precision="ieee")
        third = tl.dot(weight, values[2], total[2] * by, input_precision="ieee")
        fourth = tl.dot(weight, values[3], total[3] * by, input_precision="ieee")
        return new_top, denominator, (first, second, third, fourth)


@triton.jit
def _attend(
    projected, positions, page_table, table_stride, cos, sin, query_norm, scores, score_stride,
    selected, selected_pages, cache, page_stride, key_lane, value_lane,
    scales, scale_stride, key_scale_lane, value_scale_lane, partial, partial_max, partial_sum, out, scale_log2, eps,
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
    # Converted lanes travel as 16-bit words; a word's numbers are as many operands, one after the other.
    PARTS: tl.constexpr = 4 if FORMAT == NVFP4 else (2 if FORMAT == FP8 else 1)
    if FORMAT == NVFP4:
        scale_log2 *= E2M1_GROW
    query = _in_parts((query * scale_log2).to(FLOAT), PARTS)
    UNIT: tl.constexpr = 1 if FORMAT == PLAIN else 2
    words = cache if FORMAT == PLAIN else cache.to(tl.pointer_type(tl.int16))
    table = page_table + row.to(tl.int64) * table_stride
    # This program's blocks and their pages are found before the loop: pages found in it would be loads on which the
    # loads of keys and values hang, and each link of such a chain costs the compiler's pipeline a stage.
    BLOCKS: tl.constexpr = max(1, TILES // TILES_PER_BLOCK)
    first = split * TILES
    order = first // TILES_PER_BLOCK
    if BLOCKS > 1:
        order += tl.arange(0, BLOCKS)
    if RANKED > 0:
        i = tl.arange(0, RANKED)
        pages_of_all = tl.load(table + i, mask=i < count, other=0, cache_modifier=FRESH)
    release_then_wait(PDL)
    if RANKED > 0:
        base = scores + (row * KV_HEADS + kv_head).to(tl.int64) * score_stride
        key = order_keys(base, i, count, INIT, LOCAL)
        rank = tl.where(i < count, tl.sum((key[None, :] > key[:, None]).to(tl.int32), axis=1), TOP)
        if BLOCKS == 1:
            block = tl.where(order < count, tl.sum(tl.where(rank == order, i, 0), axis=0), -1)
            page = tl.sum(tl.where(rank == order, pages_of_all, 0), axis=0)
        else:
            wanted = rank[None, :] == order[:, None]
            blocks = tl.where(order < count, tl.sum(tl.where(wanted, i[None, :], 0), axis=1), -1)
            pages = tl.sum(tl.where(wanted, pages_of_all[None, :], 0), axis=1)
    else:
        at_chosen = (row * KV_HEADS + kv_head) * TOP + order
        chosen = tl.load(selected + at_chosen, cache_modifier=FRESH)
        page_of = tl.load(selected_pages + at_chosen, cache_modifier=FRESH)
        if BLOCKS == 1:
            block = chosen
            page = page_of
        else:
            blocks = chosen
            pages = page_of
    token = tl.arange(0, TILE)
    WIDTH: tl.constexpr = D // PARTS
    lane = (kv_head * PAGE + token)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    top = tl.full([16], float("-inf"), tl.float32)
    denominator = tl.zeros([16], dtype=tl.float32)
    total = _in_parts(tl.zeros([16, D], dtype=tl.float32), PARTS)
    scale_lane = (kv_head * PAGE + token)[:, None] * (D // 16) + tl.arange(0, D // 16)[None, :]
    for step in tl.range(0, TILES, num_stages=STAGES):
        start = ((first + step) % TILES_PER_BLOCK) * TILE
        if BLOCKS > 1:
            this = tl.arange(0, BLOCKS) == step // TILES_PER_BLOCK
            block = tl.sum(tl.where(this, blocks, 0), axis=0)
            page = tl.sum(tl.where(this, pages, 0), axis=0)
        ok = (block >= 0) & (block * PAGE + start + token <= position)
        at_scale = scales + page.to(tl.int64) * scale_stride + start * (D // 16) + scale_lane
        k, v, k_scale, v_scale = _load_tile(
            words + page.to(tl.int64) * (page_stride // UNIT) + start * WIDTH + lane, key_lane // UNIT,
            value_lane // UNIT, at_scale + key_scale_lane, at_scale + value_scale_lane, ok, FORMAT,
        )  # fmt: skip
        top, denominator, total = _take_tile(
            query, k, v, k_scale, v_scale, ok, top, denominator, total, TILE, D, FORMAT, PARTS, ASM
        )
    total = _of_parts(total, PARTS)
    if FORMAT == NVFP4:
        total *= E2M1_GROW
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
    release_then_wait(PDL)
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
