"""Which 16 blocks each token of a long step attends to: index scores of blocks, then their top.

A program of `block_scores` holds the index queries of one query tile, all heads, and walks a run of blocks of its row,
so a short chunk against a long context still fills the chip; a block's score needs no merge. A token's own
block is always chosen, and every key of an older block is at an older position, so nothing is ever masked.
"""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from longturn.kernels.dependent import FRESH, wait_then_release
from longturn.kernels.kv_formats import PLAIN

GROUP_BLOCKS = 32
"""Blocks of a group of `top_blocks`: what a warp reads at once."""
_GROUP = tl.constexpr(GROUP_BLOCKS)
_FORCED = tl.constexpr(0x7FFFFFFF)
_ABSENT = tl.constexpr(-0x7FFFFFFF)


@triton.jit(do_not_specialize=["counters", "tile_count"])
def block_scores(
    index_query, positions, rows, page_table, table_stride, tiles, tile_count, index, index_stride, index_lane,
    scores, score_stride, counts, counters, total_pieces,
    KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, SPAN: tl.constexpr,
    TOKENS: tl.constexpr, PROGRAMS: tl.constexpr, STAGES: tl.constexpr, CLEAR: tl.constexpr,
    INDEX_FORMAT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Best index score of blocks 0 .. own block - 1 of each token and head, fp32 [T, KV_HEADS, score_stride].

    A unit of work is a block for one part (TOKENS tokens) of a query tile. The units of all parts, one part after the
    other, are cut into PROGRAMS equal runs, so that rows of any length keep all programs busy to the end.
    On the side it sets `counts` [counters] and `total_pieces` to 0, for the kernels that come later.
    """
    program = tl.program_id(0)
    wait_then_release(PDL)
    if program == 0:
        tl.store(total_pieces, 0)
    for start in tl.range(program * CLEAR, counters, PROGRAMS * CLEAR):
        at = start + tl.arange(0, CLEAR)
        tl.store(counts + at, tl.zeros([CLEAR], dtype=tl.int32), mask=at < counters)
    number = tl.arange(0, SPAN)
    real = number < tile_count
    firsts = tl.load(tiles + 2 * number, mask=real, other=0, cache_modifier=FRESH)
    sizes = tl.load(tiles + 2 * number + 1, mask=real, other=0, cache_modifier=FRESH)
    last = tl.load(positions + firsts + sizes - 1, mask=sizes > 0, other=0, cache_modifier=FRESH)
    blocks_of = last // PAGE
    work = blocks_of * ((sizes + TOKENS - 1) // TOKENS)
    ends = tl.cumsum(work, axis=0)
    total = tl.sum(work, axis=0).to(tl.int64)
    at = (program * total // PROGRAMS).to(tl.int32)
    stop = ((program + 1) * total // PROGRAMS).to(tl.int32)
    member = tl.arange(0, TOKENS * KV_HEADS)
    d = tl.arange(0, D)
    key_at = index_lane + tl.arange(0, PAGE)[:, None] * D + d[None, :]
    while at < stop:
        tile = tl.sum((ends <= at).to(tl.int32), axis=0)
        blocks = tl.sum(tl.where(number == tile, blocks_of, 0), axis=0)
        unit = at - tl.sum(tl.where(number == tile, ends - work, 0), axis=0)
        skipped = unit // blocks * TOKENS
        begin = unit % blocks
        end = tl.minimum(begin + stop - at, blocks)
        at += end - begin
        first = tl.load(tiles + 2 * tile, cache_modifier=FRESH) + skipped
        count = tl.load(tiles + 2 * tile + 1, cache_modifier=FRESH) - skipped
        table = page_table + tl.load(rows + first, cache_modifier=FRESH).to(tl.int64) * table_stride
        mine = member < count * KV_HEADS
        line = first.to(tl.int64) * KV_HEADS + member
        query = tl.load(index_query + line[:, None] * D + d[None, :], mask=mine[:, None], other=0.0,
                        cache_modifier=FRESH)  # fmt: skip
        to = scores + line * score_stride
        if INDEX_FORMAT == PLAIN:
            for block in tl.range(begin, end, num_stages=STAGES):
                page = tl.load(table + block).to(tl.int64)
                keys = tl.load(index + page * index_stride + key_at)
                best = tl.max(tl.dot(query, tl.trans(keys), input_precision="ieee"), axis=1)
                tl.store(to + block, best, mask=mine)
        else:
            # Keys that are converted on their way to the dot escape the compiler's pipelining, hence this one.
            keys = tl.load(index + tl.load(table + begin).to(tl.int64) * index_stride + key_at)
            page = tl.load(table + begin + 1, mask=begin + 1 < end, other=0).to(tl.int64)
            for block in tl.range(begin, end, num_stages=1):
                next_keys = tl.load(index + page * index_stride + key_at, mask=block + 1 < end, other=0.0)
                page = tl.load(table + block + 2, mask=block + 2 < end, other=0).to(tl.int64)
                best = tl.max(tl.dot(query, tl.trans(keys.to(query.dtype)), input_precision="ieee"), axis=1)
                tl.store(to + block, best, mask=mine)
                keys = next_keys


@triton.jit
def _order_keys(base, block, count, INIT: tl.constexpr, LOCAL: tl.constexpr):
    """int32 keys of blocks, larger is better: forced ones on top, then by score, NaN as -inf, absent blocks last.

    Scores of forced and absent blocks were never written, and what is read there is thrown away: a mask on the load
    would cost its vector form.
    """
    value = tl.load(base + block, cache_modifier=FRESH)
    value = tl.where(value == value, value, float("-inf"))
    bits = value.to(tl.int32, bitcast=True)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = tl.where((block < INIT) | (block >= count - LOCAL), _FORCED, key)
    return tl.where(block < count, key, _ABSENT)


@triton.jit
def _first_of_best(key, block):
    """The best key along the last axis, and the earliest of the blocks that have it."""
    best = tl.max(key, axis=-1)
    return best, tl.min(tl.where(key == tl.expand_dims(best, -1), block, 0x7FFFFFFF), axis=-1)


@triton.jit
def top_blocks(
    positions, rows, page_table, table_stride, scores, score_stride, selected, ranks, counts,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, TOP: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr,
    GROUPS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The chosen blocks of each token and head, int32 [T, KV_HEADS, TOP], -1 at the end where there are fewer; one
    program each. Among equal scores the earlier block wins. score_stride is GROUPS * GROUP_BLOCKS.

    Only the best of each group of blocks is kept in registers. The best of those is chosen, TOP times; its group is
    then read again for the best of what comes after it in the order.

    Each choice also takes its place in the list of its page: `ranks` is its place, `counts` [pages, KV_HEADS] the
    lists' lengths, which must be 0 before. Places come from an atomic count and so differ between runs; results don't,
    since no sum runs along a list.
    """
    line = tl.program_id(0)
    token = line // KV_HEADS
    head = line % KV_HEADS
    wait_then_release(PDL)
    position = tl.load(positions + token, cache_modifier=FRESH)
    count = tl.where(position >= 0, position // PAGE + 1, 0)
    slot = tl.arange(0, TOP)
    group = tl.arange(0, GROUPS)
    member = tl.arange(0, _GROUP)
    base = scores + line.to(tl.int64) * score_stride
    all_blocks = group[:, None] * _GROUP + member[None, :]
    best, where = _first_of_best(_order_keys(base, all_blocks, count, INIT, LOCAL), all_blocks)
    block = tl.full([TOP], -1, tl.int32)
    for k in tl.range(0, tl.minimum(count, TOP)):  # a loop, not unrolled: its code is small enough to stay cached
        most = tl.max(best, axis=0)
        at = tl.min(tl.where(best == most, where, 0x7FFFFFFF), axis=0)
        block = tl.where(slot == k, at, block)
        of = at // _GROUP
        others = of * _GROUP + member
        key = _order_keys(base, others, count, INIT, LOCAL)
        key = tl.where((key < most) | ((key == most) & (others > at)), key, _ABSENT)
        next_best, next_where = _first_of_best(key, others)
        best = tl.where(group == of, next_best, best)
        where = tl.where(group == of, next_where, where)
    chosen = slot < count
    to = line * TOP + slot
    tl.store(selected + to, block)
    table = page_table + tl.load(rows + token, cache_modifier=FRESH).to(tl.int64) * table_stride
    page = tl.load(table + block, mask=chosen, other=0, cache_modifier=FRESH)
    rank = tl.atomic_add(counts + page * KV_HEADS + head, 1, mask=chosen, sem="relaxed")
    tl.store(ranks + to, rank, mask=chosen)
