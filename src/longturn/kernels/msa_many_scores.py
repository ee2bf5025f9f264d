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

LEAST_BLOCKS = 32
"""Of each of the two tiles of `top_blocks`: what a warp reads at once."""
_LANES = tl.constexpr(32)
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
def _chosen(key, block, bound, limit):
    """Whether a key is above `bound`, or at it and of a block up to `limit`."""
    return (key > bound) | ((key == bound) & (block <= limit))


@triton.jit
def _store_chosen(to, here, first, SIZE: tl.constexpr):
    """Store the numbers of the chosen of SIZE blocks from `first` on at `to`; how many they are.

    A lane's come before the next lane's. Each lane packs which of its blocks are chosen into the bits of a word, so
    that 32 counts pass between lanes and not one a block; that would be most of the kernel's time."""
    if SIZE >= 4 * _LANES:
        ROUNDS: tl.constexpr = min(SIZE // (4 * _LANES), 8)
        GROUPS: tl.constexpr = SIZE // (4 * _LANES * ROUNDS)
        bits = tl.reshape(here.to(tl.int32), [GROUPS, ROUNDS, _LANES, 4])
        shift = (4 * tl.arange(0, ROUNDS))[None, :, None, None] + tl.arange(0, 4)[None, None, None, :]
        left = tl.reshape(tl.sum(tl.sum(bits << shift, axis=3), axis=1), [GROUPS * _LANES])
        count = tl.reshape(tl.sum(tl.sum(bits, axis=3), axis=1), [GROUPS * _LANES])
        lane = tl.arange(0, GROUPS * _LANES)
        number = first + lane // _LANES * (4 * _LANES * ROUNDS) + lane % _LANES * 4
        place = tl.cumsum(count, axis=0) - count
        while tl.max((left != 0).to(tl.int32), axis=0) > 0:
            lowest = (left & (0 - left)).to(tl.uint32, bitcast=True).to(tl.float32)
            bit = (lowest.to(tl.int32, bitcast=True) >> 23) - 127
            tl.store(to + place, number + bit // 4 * (4 * _LANES) + bit % 4, mask=left != 0)
            left = left & (left - 1)
            place += 1
        return tl.sum(count, axis=0)
    else:
        count = here.to(tl.int32)
        tl.store(to + tl.cumsum(count, axis=0) - count, first + tl.arange(0, SIZE), mask=here)
        return tl.sum(count, axis=0)


@triton.jit
def top_blocks(
    positions, rows, page_table, table_stride, scores, score_stride, selected, ranks, counts,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, TOP: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr,
    FULL: tl.constexpr, REST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The chosen blocks of each token and head, int32 [T, KV_HEADS, TOP], in an order that is always the same, -1 at
    the end where there are fewer; one program each. Among equal scores the earlier block wins. score_stride is FULL +
    REST, two powers of two: one tile for all would be half empty where a graph's bound is little above one.

    All keys stay in registers. A bound that exactly TOP of them reach is found by halving, a count a step, each a few
    instructions a key and one reduction; taking the best TOP times would read its group of blocks again each time.

    Each choice also takes its place in the list of its page: `ranks` is its place, `counts` [pages, KV_HEADS] the
    lists' lengths, which must be 0 before. Places come from an atomic count and so differ between runs; results don't,
    since no sum runs along a list.
    """
    line = tl.program_id(0)
    token = line // KV_HEADS
    head = line % KV_HEADS
    # What the step began with is older than the kernel before.
    position = tl.load(positions + token, cache_modifier=FRESH)
    table = page_table + tl.load(rows + token, cache_modifier=FRESH).to(tl.int64) * table_stride
    wait_then_release(PDL)
    count = tl.where(position >= 0, position // PAGE + 1, 0)
    base = scores + line.to(tl.int64) * score_stride
    block = tl.arange(0, FULL)
    key = _order_keys(base, block, count, INIT, LOCAL)
    later, rest = block, key
    high = tl.max(tl.where(key == _FORCED, _ABSENT, key), axis=0)
    if REST > 0:
        later = FULL + tl.arange(0, REST)
        rest = _order_keys(base, later, count, INIT, LOCAL)
        high = tl.maximum(high, tl.max(tl.where(rest == _FORCED, _ABSENT, rest), axis=0))
    # `low` is reached by TOP blocks or more (by all, if there are fewer), `high` by fewer; `many` reach `low`.
    low = count * 0 + (_ABSENT + 1)
    if FULL >= 4 * _LANES and TOP <= _LANES:
        # Of the lanes that have a block at all, TOP or more reach the least of the lanes' largest keys.
        lanes = tl.max(tl.max(tl.reshape(key, [FULL // (4 * _LANES), _LANES, 4]), axis=2), axis=0)
        low = tl.where(count >= 4 * TOP, tl.min(tl.where(lanes == _ABSENT, _FORCED, lanes), axis=0), low)
    low, high = low.to(tl.int64), high.to(tl.int64) + 1
    if INIT + LOCAL >= TOP:
        low = tl.where(count >= TOP, _FORCED, low)
    high = tl.where(count > TOP, high, low)
    many = tl.where(count > TOP, count, 0)
    while high - low > 1:
        middle = (low + high) >> 1
        reached = tl.sum((key >= middle.to(tl.int32)).to(tl.int32), axis=0)
        if REST > 0:
            reached += tl.sum((rest >= middle.to(tl.int32)).to(tl.int32), axis=0)
        low = tl.where(reached >= TOP, middle, low)
        many = tl.where(reached >= TOP, reached, many)
        high = tl.where(reached > TOP, high, tl.where(reached == TOP, middle + 1, middle))
    bound = low.to(tl.int32)
    limit = FULL + REST
    if many > TOP:  # of the blocks at the bound the first ones, up to a block that is found by halving too
        above = tl.sum((key > bound).to(tl.int32), axis=0)
        if REST > 0:
            above += tl.sum((rest > bound).to(tl.int32), axis=0)
        before = -1
        while limit - before > 1:
            middle = (before + limit) >> 1
            reached = above + tl.sum(((key == bound) & (block <= middle)).to(tl.int32), axis=0)
            if REST > 0:
                reached += tl.sum(((rest == bound) & (later <= middle)).to(tl.int32), axis=0)
            limit = tl.where(reached >= TOP, middle, limit)
            before = tl.where(reached >= TOP, before, middle)
    to = selected + line * TOP
    stored = _store_chosen(to, _chosen(key, block, bound, limit), 0, FULL)
    if REST > 0:
        _store_chosen(to + stored, _chosen(rest, later, bound, limit), FULL, REST)
    slot = tl.arange(0, TOP)
    chosen = slot < count
    tl.store(to + slot, tl.full([TOP], -1, tl.int32), mask=slot >= count)
    tl.debug_barrier()  # other threads stored what is read here
    mine = tl.load(to + slot, mask=chosen, other=0, cache_modifier=FRESH)
    page = tl.load(table + mine, mask=chosen, other=0, cache_modifier=FRESH)
    rank = tl.atomic_add(counts + page * KV_HEADS + head, 1, mask=chosen, sem="relaxed")
    tl.store(ranks + line * TOP + slot, rank, mask=chosen)
