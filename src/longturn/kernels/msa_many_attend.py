"""Sparse attention with keys outside and queries inside: each chosen page is read once, for all who chose it.

    lay_out_lists   the choices of a page and key/value head become a list; lists are cut into pieces of PIECE choices
    fill_lists      each choice writes itself to its place in its list
    attend_lists    a program takes a piece: K and V of the page stay in shared memory while the queries stream past;
                    a page is one softmax, so each choice yields a finished part and the logarithm of its weight
    combine_parts   the at most 16 parts of a token and head, weighted

A token's own block is chosen by every token in it; its long list is many pieces, like any other.
"""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from longturn.kernels.dependent import FRESH, wait_then_release
from longturn.kernels.kv_formats import E2M1_GROW, FP8, NVFP4, widen_e2m1


@triton.jit(do_not_specialize=["counters"])
def lay_out_lists(
    counts, counters, first_piece, piece_list, piece_size, piece_open, total_pieces,
    PIECE: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Deal out pieces to lists: first_piece [counters], and each piece's list and size, and 0 for whether it is open;
    total_pieces must be 0 before."""
    wait_then_release(PDL)
    counter = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    count = tl.load(counts + counter, mask=counter < counters, other=0, cache_modifier=FRESH)
    pieces = (count + PIECE - 1) // PIECE
    here = tl.sum(pieces, axis=0)
    if here > 0:
        base = tl.atomic_add(total_pieces, here, sem="relaxed")
        first = base + tl.cumsum(pieces, axis=0) - pieces
        tl.store(first_piece + counter, first, mask=pieces > 0)
        for i in tl.range(0, tl.max(pieces, axis=0)):
            tl.store(piece_list + first + i, counter, mask=i < pieces)
            tl.store(piece_size + first + i, tl.minimum(count - i * PIECE, PIECE), mask=i < pieces)
            tl.store(piece_open + first + i, tl.zeros_like(counter), mask=i < pieces)


@triton.jit(do_not_specialize=["choices"])
def fill_lists(
    positions, rows, page_table, table_stride, selected, ranks, first_piece, piece_open, entries, choices,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, TOP: tl.constexpr, PIECE: tl.constexpr, SPAN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """entries[place] = the choice's number, (token * KV_HEADS + head) * TOP + slot, times PAGE, plus the last key of
    the page that its query sees. piece_open becomes 1 where that is not the page's last one for all."""
    # All but `first_piece` is older than the kernel before.
    choice = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    block = tl.load(selected + choice, mask=choice < choices, other=-1, cache_modifier=FRESH)
    chosen = block >= 0
    line = choice // TOP
    token = line // KV_HEADS
    row = tl.load(rows + token, mask=chosen, other=0, cache_modifier=FRESH)
    position = tl.load(positions + token, mask=chosen, other=0, cache_modifier=FRESH)
    table = page_table + row.to(tl.int64) * table_stride
    page = tl.load(table + block, mask=chosen, other=0, cache_modifier=FRESH)
    rank = tl.load(ranks + choice, mask=chosen, other=0, cache_modifier=FRESH)
    wait_then_release(PDL)
    first = tl.load(first_piece + page * KV_HEADS + line % KV_HEADS, mask=chosen, other=0, cache_modifier=FRESH)
    place = first * PIECE + rank
    last = tl.minimum(position - block * PAGE, PAGE - 1)
    tl.store(entries + place, choice * PAGE + last, mask=chosen)
    tl.store(piece_open + place // PIECE, tl.full([SPAN], 1, tl.int32), mask=chosen & (last < PAGE - 1))


@triton.jit
def _next_tile(piece_size, piece, start, count, later, total, TOKENS: tl.constexpr, PROGRAMS: tl.constexpr):
    """The tile after the one at `start` of `piece`, whose size is `count`, that of the program's next piece `later`."""
    over = start + TOKENS >= count
    piece = tl.where(over, piece + PROGRAMS, piece)
    start = tl.where(over, 0, start + TOKENS)
    count = tl.where(over, later, count)
    following = piece + PROGRAMS
    later = tl.load(piece_size + following, mask=following < total, other=0, cache_modifier=FRESH)
    return piece, start, count, later


@triton.jit
def _choices_at(entries, piece, start, count, of, spare, PAGE: tl.constexpr, PIECE: tl.constexpr):
    """The choices of a tile and the last key that each sees; past the end of the piece the entry is `spare`."""
    entry = tl.load(entries + piece * PIECE + start + of, mask=start + of < count, other=spare, cache_modifier=FRESH)
    return entry // PAGE, entry % PAGE


@triton.jit
def _queries_of(query, choice, member, START: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
                D: tl.constexpr, TOP: tl.constexpr):  # fmt: skip
    """WIDTH columns from START on of the query heads of choices."""
    row = (choice // TOP) * GROUP + member
    at = query + row[:, None].to(tl.int64) * D + (START + tl.arange(0, WIDTH))[None, :]
    return tl.load(at, cache_modifier=FRESH)


@triton.jit
def _page_of_head(
    lane, scale_lane, PAGE: tl.constexpr, D: tl.constexpr, FORMAT: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """A page of one head's keys or values [PAGE, D], twice, in the type they are multiplied in. NVFP4: its even and its
    odd columns [PAGE, D / 2], E2M1_GROW times too small."""
    row = tl.arange(0, PAGE)[:, None]
    if FORMAT == NVFP4:
        codes = tl.load(lane + row * (D // 2) + tl.arange(0, D // 2)[None, :], cache_modifier=FRESH)
        scale = tl.load(scale_lane + row * (D // 16) + tl.arange(0, D // 16)[None, :], cache_modifier=FRESH)
        return widen_e2m1(codes, scale, PAGE, D, ASM)
    elif FORMAT == FP8:
        tile = tl.load(lane + row * D + tl.arange(0, D)[None, :], cache_modifier=FRESH).to(tl.float16)
        return tile, tile
    else:
        tile = tl.load(lane + row * D + tl.arange(0, D)[None, :], cache_modifier=FRESH)
        return tile, tile


@triton.jit
def _finite(tile):
    """`tile` with zeros for what is not finite: a page's last rows may still hold what an earlier, broken request
    wrote, and a weight of 0 does not silence NaN. Once a page; a mask by length would be needed once a tile."""
    return tl.where(tl.abs(tile) < float("inf"), tile, 0.0).to(tile.dtype)


@triton.jit(do_not_specialize=["spare"])
def attend_lists(
    query, piece_list, piece_size, total_pieces, entries, spare,
    cache, page_stride, key_lane, value_lane, scales, scale_stride, key_scale_lane, value_scale_lane,
    parts, weights, scale_log2,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TOP: tl.constexpr,
    PIECE: tl.constexpr, TOKENS: tl.constexpr, PROGRAMS: tl.constexpr,
    FORMAT: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Parts [choice, GROUP, D]: sums of values, each times 2 ** (its logit - the largest); and `weights` fp32 [choice,
    GROUP, 2], that largest logit and the sum of the powers.

    query [T, KV_HEADS * GROUP, D]. A list's tokens come TOKENS at a time, GROUP rows each. With NVFP4 the columns of
    queries and parts are the even ones, then the odd ones. Rows past a list's end have the entry `spare`, whose choice
    has room in all buffers, and which nothing reads: cheaper than masks.

    What a tile needs is a chain of reads: size of the piece, choices, queries. Each link is read one tile further
    ahead, across pieces too, so that no tile waits for more than its page.
    """
    wait_then_release(PDL)
    key = tl.arange(0, PAGE)
    line = tl.arange(0, TOKENS * GROUP)
    of = line // GROUP
    member = line % GROUP
    WIDTH: tl.constexpr = D // 2 if FORMAT == NVFP4 else D
    d = tl.arange(0, WIDTH)
    total = tl.load(total_pieces, cache_modifier=FRESH)
    ahead = tl.program_id(0)
    start = 0
    count = tl.load(piece_size + ahead, mask=ahead < total, other=0, cache_modifier=FRESH)
    later = tl.load(piece_size + ahead + PROGRAMS, mask=ahead + PROGRAMS < total, other=0, cache_modifier=FRESH)
    counter = tl.load(piece_list + ahead, mask=ahead < total, other=0, cache_modifier=FRESH)
    choice, last = _choices_at(entries, ahead, start, count, of, spare, PAGE, PIECE)
    q = _queries_of(query, choice, member, 0, WIDTH, GROUP, D, TOP)
    if FORMAT == NVFP4:
        odd_q = _queries_of(query, choice, member, WIDTH, WIDTH, GROUP, D, TOP)
    ahead, start, count, later = _next_tile(piece_size, ahead, start, count, later, total, TOKENS, PROGRAMS)
    next_choice, next_last = _choices_at(entries, ahead, start, count, of, spare, PAGE, PIECE)
    for piece in tl.range(tl.program_id(0), total, PROGRAMS):
        here = tl.load(piece_size + piece, cache_modifier=FRESH)
        head = counter % KV_HEADS
        page = (counter // KV_HEADS).to(tl.int64)
        lane = cache + page * page_stride + head * (PAGE * WIDTH)
        scale_lane = scales + page * scale_stride + head * (PAGE * D // 16)
        k, odd_k = _page_of_head(lane + key_lane, scale_lane + key_scale_lane, PAGE, D, FORMAT, ASM)
        v, odd_v = _page_of_head(lane + value_lane, scale_lane + value_scale_lane, PAGE, D, FORMAT, ASM)
        v = _finite(v)
        odd_v = _finite(odd_v)
        following = piece + PROGRAMS
        counter = tl.load(piece_list + following, mask=following < total, other=0, cache_modifier=FRESH)
        for _ in tl.range(0, here, TOKENS, num_stages=1):
            next_q = _queries_of(query, next_choice, member, 0, WIDTH, GROUP, D, TOP)
            if FORMAT == NVFP4:
                next_odd_q = _queries_of(query, next_choice, member, WIDTH, WIDTH, GROUP, D, TOP)
            ahead, start, count, later = _next_tile(piece_size, ahead, start, count, later, total, TOKENS, PROGRAMS)
            later_choice, later_last = _choices_at(entries, ahead, start, count, of, spare, PAGE, PIECE)
            logit = tl.dot(q, tl.trans(k), input_precision="ieee")
            if FORMAT == NVFP4:
                logit = tl.dot(odd_q, tl.trans(odd_k), logit, input_precision="ieee")
            logit = tl.where(key[None, :] <= last[:, None], logit, float("-inf"))
            most = tl.max(logit, axis=1) * scale_log2
            weight = tl.exp2(logit * scale_log2 - most[:, None])
            sum_of = tl.sum(weight, axis=1)
            weight = weight.to(v.dtype)
            to = choice.to(tl.int64) * GROUP + member
            at = parts + to[:, None] * D + d[None, :]
            part = tl.dot(weight, v, input_precision="ieee")
            tl.store(at, part.to(parts.dtype.element_ty))
            if FORMAT == NVFP4:
                part = tl.dot(weight, odd_v, input_precision="ieee")
                tl.store(at + WIDTH, part.to(parts.dtype.element_ty))
                odd_q = next_odd_q
            tl.store(weights + to[:, None] * 2 + tl.arange(0, 2)[None, :], tl.join(most, sum_of))
            q, choice, last = next_q, next_choice, next_last
            next_choice, next_last = later_choice, later_last


@triton.jit
def combine_parts(
    selected, parts, weights, out,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, TOP: tl.constexpr, FORMAT: tl.constexpr,
    ORDERED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [T, KV_HEADS * GROUP, D]; zeros where nothing was chosen, so padding never carries NaN onwards. The grid is
    (T * KV_HEADS, GROUP / HEADS). ORDERED parts have their columns as `attend_lists_hopper` stores them."""
    line = tl.program_id(0)
    wait_then_release(PDL)
    member = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    d = tl.arange(0, D)
    most = tl.full([HEADS], float("-inf"), tl.float32)
    sum_of = tl.zeros([HEADS], dtype=tl.float32)
    total = tl.zeros([HEADS, D], dtype=tl.float32)
    # Nothing in the loop depends on what `selected` says but the last selects, so all its loads are in flight at once.
    for slot in tl.static_range(TOP):
        chosen = tl.load(selected + line * TOP + slot, cache_modifier=FRESH) >= 0
        at = (line.to(tl.int64) * TOP + slot) * GROUP + member
        weight = tl.where(chosen, tl.load(weights + 2 * at, cache_modifier=FRESH), float("-inf"))
        sum_here = tl.where(chosen, tl.load(weights + 2 * at + 1, cache_modifier=FRESH), 0.0)
        part = tl.load(parts + at[:, None] * D + d[None, :], cache_modifier=FRESH).to(tl.float32)
        part = tl.where(chosen, part, 0.0)
        new = tl.maximum(most, weight)
        safe = tl.where(new == float("-inf"), 0.0, new)
        shrink, share = tl.exp2(most - safe), tl.exp2(weight - safe)
        sum_of = sum_of * shrink + share * sum_here
        total = total * shrink[:, None] + part * share[:, None]
        most = new
    total = total * tl.where(sum_of > 0.0, 1.0 / sum_of, 0.0)[:, None]
    column = d
    if FORMAT == NVFP4:
        total *= E2M1_GROW
        column = (d % (D // 2)) * 2 + d // (D // 2)
    if ORDERED:
        total = tl.reshape(tl.permute(tl.reshape(total, [HEADS, D // 32, 4, 4, 2]), (0, 1, 3, 2, 4)), [HEADS, D])
    to = (line.to(tl.int64) * GROUP + member)[:, None] * D + column[None, :]
    tl.store(out + to, total.to(out.dtype.element_ty))
