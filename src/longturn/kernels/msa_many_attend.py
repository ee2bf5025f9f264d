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


@triton.jit(do_not_specialize=["counters"])
def lay_out_lists(
    counts, counters, first_piece, piece_list, piece_size, total_pieces,
    PIECE: tl.constexpr, SPAN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Deal out pieces to lists: first_piece [counters], and each piece's list and size; total_pieces must be 0
    before."""
    wait_then_release(PDL)
    counter = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    count = tl.load(counts + counter, mask=counter < counters, other=0, cache_modifier=FRESH)
    pieces = (count + PIECE - 1) // PIECE
    here = tl.sum(pieces, axis=0)
    if here > 0:
        base = tl.atomic_add(total_pieces, here)
        first = base + tl.cumsum(pieces, axis=0) - pieces
        tl.store(first_piece + counter, first, mask=pieces > 0)
        for i in tl.range(0, tl.max(pieces, axis=0)):
            tl.store(piece_list + first + i, counter, mask=i < pieces)
            tl.store(piece_size + first + i, tl.minimum(count - i * PIECE, PIECE), mask=i < pieces)


@triton.jit(do_not_specialize=["choices"])
def fill_lists(
    positions, rows, page_table, table_stride, selected, ranks, first_piece, entries, lasts, choices, pages,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, TOP: tl.constexpr, PIECE: tl.constexpr, SPAN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """entries[place] = the choice's number, (token * KV_HEADS + head) * TOP + slot; lasts[place] = the last key of the
    page that its query sees."""
    wait_then_release(PDL)
    choice = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    block = tl.load(selected + choice, mask=choice < choices, other=-1, cache_modifier=FRESH)
    chosen = block >= 0
    line = choice // TOP
    token = line // KV_HEADS
    row = tl.load(rows + token, mask=chosen, other=0, cache_modifier=FRESH)
    position = tl.load(positions + token, mask=chosen, other=0, cache_modifier=FRESH)
    table = page_table + row.to(tl.int64) * table_stride
    page = tl.load(table + block, mask=chosen, other=0, cache_modifier=FRESH)
    first = tl.load(first_piece + (line % KV_HEADS) * pages + page, mask=chosen, other=0, cache_modifier=FRESH)
    place = first * PIECE + tl.load(ranks + choice, mask=chosen, other=0, cache_modifier=FRESH)
    tl.store(entries + place, choice, mask=chosen)
    tl.store(lasts + place, tl.minimum(position - block * PAGE, PAGE - 1), mask=chosen)


@triton.jit
def _queries_of(
    query, entries, place, count, head, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, TOP: tl.constexpr
):
    """The queries of the choices at `place` of a piece, GROUP rows a choice; zeros past its end."""
    ok = place < count
    choice = tl.load(entries + place, mask=ok, other=0, cache_modifier=FRESH)
    row = (choice // (KV_HEADS * TOP)) * (KV_HEADS * GROUP) + head * GROUP + tl.arange(0, place.shape[0]) % GROUP
    at = query + row[:, None].to(tl.int64) * D + tl.arange(0, D)[None, :]
    return tl.load(at, mask=ok[:, None], other=0.0, cache_modifier=FRESH)


@triton.jit
def attend_lists(
    query, piece_list, piece_size, total_pieces, entries, lasts, pages,
    cache, page_stride, key_lane, value_lane, parts, weights, scale_log2,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TOP: tl.constexpr,
    PIECE: tl.constexpr, TOKENS: tl.constexpr, STAGES: tl.constexpr, PROGRAMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Parts [choice, GROUP, D] and the base-2 logarithms of their weights, fp32 [choice, GROUP].

    query [T, KV_HEADS * GROUP, D]. A list's tokens come TOKENS at a time, GROUP rows each.
    """
    wait_then_release(PDL)
    d = tl.arange(0, D)
    key = tl.arange(0, PAGE)
    member = tl.arange(0, TOKENS * GROUP)
    lane = key[:, None] * D + d[None, :]
    total = tl.load(total_pieces, cache_modifier=FRESH)
    for piece in tl.range(tl.program_id(0), total, PROGRAMS):
        counter = tl.load(piece_list + piece, cache_modifier=FRESH)
        count = tl.load(piece_size + piece, cache_modifier=FRESH)
        head = counter // pages
        mine = entries + piece * PIECE
        at = (counter % pages).to(tl.int64) * page_stride + head * PAGE * D + lane
        k = tl.load(cache + key_lane + at, cache_modifier=FRESH)
        v = tl.load(cache + value_lane + at, cache_modifier=FRESH)
        for start in tl.range(0, count, TOKENS, num_stages=STAGES):
            place = start + member // GROUP
            ok = place < count
            last = tl.load(lasts + piece * PIECE + place, mask=ok, other=PAGE - 1, cache_modifier=FRESH)
            q = _queries_of(query, mine, place, count, head, KV_HEADS, GROUP, D, TOP)
            logit = tl.dot(q, tl.trans(k), input_precision="ieee")
            logit = tl.where(key[None, :] <= last[:, None], logit, float("-inf"))
            most = tl.max(logit, axis=1) * scale_log2
            weight = tl.exp2(logit * scale_log2 - most[:, None])
            sum_of = tl.sum(weight, axis=1)
            part = tl.dot(weight.to(v.dtype), v, input_precision="ieee") * (1.0 / sum_of)[:, None]
            to = tl.load(mine + place, mask=ok, other=0, cache_modifier=FRESH).to(tl.int64) * GROUP + member % GROUP
            tl.store(parts + to[:, None] * D + d[None, :], part.to(parts.dtype.element_ty), mask=ok[:, None])
            tl.store(weights + to, most + tl.log2(sum_of), mask=ok)


@triton.jit
def combine_parts(
    selected, parts, weights, out,
    GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, TOP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [T, KV_HEADS * GROUP, D]; zeros where nothing was chosen, so padding never carries NaN onwards. The grid is
    (T * KV_HEADS, GROUP / HEADS)."""
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
        weight = tl.where(chosen, tl.load(weights + at, cache_modifier=FRESH), float("-inf"))
        part = tl.load(parts + at[:, None] * D + d[None, :], cache_modifier=FRESH).to(tl.float32)
        part = tl.where(chosen, part, 0.0)
        new = tl.maximum(most, weight)
        safe = tl.where(new == float("-inf"), 0.0, new)
        shrink, share = tl.exp2(most - safe), tl.exp2(weight - safe)
        sum_of = sum_of * shrink + share
        total = total * shrink[:, None] + part * share[:, None]
        most = new
    total = total * tl.where(sum_of > 0.0, 1.0 / sum_of, 0.0)[:, None]
    to = (line.to(tl.int64) * GROUP + member)[:, None] * D + d[None, :]
    tl.store(out + to, total.to(out.dtype.element_ty))
