"""Which blocks a decode step attends to: `scores` of whole blocks, and `select` of the best (see msa_decode.py)."""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from longturn.kernels.dependent import FRESH, wait_then_release
from longturn.kernels.head_norm import norm_rope_heads
from longturn.kernels.kv_formats import FP8, FP8_LOW, PLAIN, fp8_halves, write_token_as

_FORCED = tl.constexpr(1e30)
_ABSENT = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
_FORCED_KEY = tl.constexpr(0x7FFFFFFF)
_ABSENT_KEY = tl.constexpr(-0x7FFFFFFF)


@triton.jit
def _best(keys, query, rest, grow, INDEX_FORMAT: tl.constexpr):
    """Largest product of keys [PAGE, D] with each column of a query [D, 16]; fp8 ones come as `fp8_halves`."""
    dots = tl.dot(keys, query, input_precision="ieee")
    if INDEX_FORMAT == FP8:
        dots += tl.dot(keys, rest) * FP8_LOW
    return tl.max(dots, axis=0) * grow


@triton.jit
def _scores(
    projected, positions, page_table, table_stride, cos, sin, index_query_norm, key_norm, index_key_norm,
    cache, page_stride, key_lane, value_lane, scales, scale_stride, key_scale_lane, value_scale_lane,
    index, index_stride, index_lane, scores, score_stride, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, HALF: tl.constexpr,
    FORMAT: tl.constexpr, INDEX_FORMAT: tl.constexpr,
    CHUNKS: tl.constexpr, PAGES: tl.constexpr, AHEAD: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    # The first program of a row writes the new token, which takes as long as scoring a few blocks: it scores none.
    chunk = tl.program_id(0) - 1
    row = tl.program_id(1)
    position = tl.load(positions + row, cache_modifier=FRESH)
    own_block = position // PAGE  # -1 // PAGE is 0 or -1 by rounding; both give no block below
    table = page_table + row.to(tl.int64) * table_stride
    key = tl.arange(0, PAGE)
    at = index_lane + key[:, None] * D + tl.arange(0, D)[None, :]
    if AHEAD:
        # Blocks below the own one were complete before this step: this program's only one needs no wait.
        there = (chunk >= 0) & (chunk < own_block)
        page = tl.load(table + chunk, mask=there, other=0, cache_modifier=FRESH).to(tl.int64)
        keys = tl.load(index + page * index_stride + at, mask=there, other=0.0)
    else:
        # Pages of the next PAGES blocks. One by one in the loop they would be loads on which the loads of keys hang,
        # and the pipeline would hold half as many keys.
        slot = tl.arange(0, PAGES)
        next_block = chunk + slot * CHUNKS
        there = (chunk >= 0) & (next_block < own_block)
        pages = tl.load(table + next_block, mask=there, other=0, cache_modifier=FRESH)
    wait_then_release(PDL)
    if position < 0:
        return
    cos_row = cos + row * D
    sin_row = sin + row * D
    if chunk < 0:
        new = tl.load(table + own_block, cache_modifier=FRESH).to(tl.int64)
        write_token_as(
            projected, row, key_norm, index_key_norm, cos_row, sin_row,
            cache + new * page_stride + key_lane, scales + new * scale_stride + key_scale_lane,
            cache + new * page_stride + value_lane, scales + new * scale_stride + value_scale_lane,
            index + new * index_stride + index_lane, position % PAGE, eps,
            Q_HEADS, KV_HEADS, D, PAGE, HALF, FORMAT, INDEX_FORMAT,
        )  # fmt: skip
    if (chunk >= 0) & (chunk < own_block):
        head = tl.arange(0, 16)
        width: tl.constexpr = (Q_HEADS + 3 * KV_HEADS + 1) * D
        heads_at = projected + row.to(tl.int64) * width + (Q_HEADS + 2 * KV_HEADS + head) * D
        query = norm_rope_heads(heads_at, head < KV_HEADS, index_query_norm, cos_row, sin_row, eps, D, HALF)
        to = scores + (row * KV_HEADS + head).to(tl.int64) * score_stride
        if INDEX_FORMAT == PLAIN:
            query = tl.trans(query.to(index.dtype.element_ty))
            rest = query
            grow = tl.full([16], 1.0, tl.float32)
        else:
            high, low, grow = fp8_halves(query)
            query, rest = tl.trans(high), tl.trans(low)
        if AHEAD:
            tl.store(to + chunk, _best(keys, query, rest, grow, INDEX_FORMAT), mask=head < KV_HEADS)
        else:
            for begin in tl.range(chunk, own_block, CHUNKS * PAGES, num_stages=1):
                for n in tl.range(0, tl.minimum(PAGES, tl.cdiv(own_block - begin, CHUNKS)), num_stages=STAGES):
                    page = tl.sum(tl.where(slot == n, pages, 0), axis=0).to(tl.int64)
                    keys = tl.load(index + page * index_stride + at)
                    best = _best(keys, query, rest, grow, INDEX_FORMAT)
                    tl.store(to + begin + n * CHUNKS, best, mask=head < KV_HEADS)
                next_block = begin + (PAGES + slot) * CHUNKS
                pages = tl.load(table + next_block, mask=next_block < own_block, other=0, cache_modifier=FRESH)


@triton.jit
def order_keys(base, block, count, INIT: tl.constexpr, LOCAL: tl.constexpr):
    """int64 keys of blocks, all different: the larger is chosen first. Forced blocks on top, NaN at the bottom, then
    absent ones.

    The score in an integer order above, the block's number, negated, below. Forced and absent blocks' scores are not
    read.
    """
    forced = (block < INIT) | (block >= count - LOCAL)
    value = tl.load(base + block, mask=block < count - LOCAL, other=float("-inf"), cache_modifier=FRESH)
    value = tl.where(forced, _FORCED, tl.where(value == value, value, float("-inf")))
    bits = value.to(tl.int32, bitcast=True)
    key = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) - block
    return tl.where(block < count, key, _ABSENT)


@triton.jit
def _select(
    positions, page_table, table_stride, scores, score_stride, selected, pages,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, TOP: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr,
    BLOCKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The TOP best blocks of a row and head, in the order of their numbers, and their pages; -1 and page 0 where the
    row has fewer. The grid is (KV_HEADS, rows).

    A bound that exactly TOP blocks reach is found by halving: a dozen counts, each a few instructions a thread. Equal
    keys at the bound are taken from the earliest block on.
    """
    head = tl.program_id(0)
    row = tl.program_id(1)
    block = tl.arange(0, BLOCKS)
    position = tl.load(positions + row, cache_modifier=FRESH)
    count = tl.where(position >= 0, position // PAGE + 1, 0)
    present = block < count
    page = tl.load(page_table + row.to(tl.int64) * table_stride + block, mask=present, other=0, cache_modifier=FRESH)
    wait_then_release(PDL)
    line = (row * KV_HEADS + head).to(tl.int64)
    forced = (block < INIT) | (block >= count - LOCAL)
    value = tl.load(scores + line * score_stride + block, mask=block < count - LOCAL, other=0.0, cache_modifier=FRESH)
    value = tl.where(value == value, value, float("-inf"))
    bits = value.to(tl.int32, bitcast=True)
    key = tl.where(forced, _FORCED_KEY, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    key = tl.where(present, key, _ABSENT_KEY)
    # `low` is reached by TOP blocks or more (by all, if there are fewer), `high` by fewer.
    low = tl.min(tl.where(present, key, _FORCED_KEY), axis=0).to(tl.int64)
    high = tl.max(tl.where(present & (forced == 0), key, _ABSENT_KEY), axis=0).to(tl.int64) + 1
    if INIT + LOCAL >= TOP:
        low = tl.where(count >= TOP, _FORCED_KEY, low)
    high = tl.where(count > TOP, high, low)
    while high - low > 1:
        middle = (low + high) >> 1
        reached = tl.sum((key >= middle.to(tl.int32)).to(tl.int32), axis=0)
        low = tl.where(reached >= TOP, middle, low)
        high = tl.where(reached > TOP, high, tl.where(reached == TOP, middle + 1, middle))
    bound = low.to(tl.int32)
    above = key > bound
    tie = (key == bound) & present
    left = TOP - tl.sum(above.to(tl.int32), axis=0)
    # Blocks above the bound and at it, counted in the halves of one number.
    seen = tl.cumsum(above.to(tl.int32) + (tie.to(tl.int32) << 16), axis=0)
    ties = seen >> 16
    chosen = above | (tie & (ties <= left))
    place = line * TOP + (seen & 0xFFFF) + tl.minimum(ties, left) - 1
    tl.store(selected + place, block, mask=chosen)
    tl.store(pages + place, page, mask=chosen)
    slot = tl.arange(0, TOP)
    tl.store(selected + line * TOP + slot, tl.full([TOP], -1, tl.int32), mask=slot >= count)
    tl.store(pages + line * TOP + slot, tl.zeros([TOP], tl.int32), mask=slot >= count)
