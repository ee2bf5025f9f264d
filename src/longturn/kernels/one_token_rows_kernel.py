"""The persistent kernel for several rows: all phases of consecutive layers, a grid barrier between two
(one_token_rows.py)."""

# Functions under gluon.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from longturn.kernels.one_token_choose import block_at_place, places_of_blocks
from longturn.kernels.one_token_kernel import _stamp
from longturn.kernels.one_token_parts import (
    PROGRAMS,
    arrive,
    flat_shared,
    fresh,
    head_gains,
    keep_gains,
    keep_turns,
    prefetch,
    wait,
)
from longturn.kernels.one_token_rows_attention import (
    attend_row,
    merge_rows,
    new_heads,
    new_place,
    new_tokens,
    older_blocks,
    queries_of_row,
    score_rows,
)
from longturn.kernels.one_token_rows_experts import (
    CHOSEN,
    choose_rows,
    chosen_by_any,
    down_rows,
    present_rows,
    route_rows,
    routed_in_rows,
    shared_in_rows,
)
from longturn.kernels.one_token_rows_fetch import FREE_SIDE, ROW_BARS, fetch_rows
from longturn.kernels.one_token_rows_linear import project_out_rows, project_rows
from longturn.kernels.one_token_rows_parts import SIDE, SLOTS, X_AT, operand, tokens_form

_PROGRAMS = gl.constexpr(PROGRAMS)
_ROW_BARS = gl.constexpr(ROW_BARS)


@gluon.jit
def _chosen(place, page, own_chosen, order, BLOCKS: gl.constexpr):
    """Block of an order: first the own one, then the best of the others."""
    return gl.where(order == 0, own_chosen, block_at_place(place, page, gl.maximum(order, 1), BLOCKS))


@gluon.jit
def _compute_rows(
    table, norms, biases, x, positions, page_table, table_stride, cos, sin, cache,
    qkv, scores, partial, partial_max, partial_sum, attention, logits, hidden, counter, stamps,
    ring, side, sums, gains, turns, of_experts, bars, first, last, page_stride, scaling, scale_log2, eps,
    R: gl.constexpr, Q: gl.constexpr, KV: gl.constexpr, HALF: gl.constexpr, ROWS: gl.constexpr, TOP: gl.constexpr,
    BLOCKS: gl.constexpr, ALPHA: gl.constexpr, BETA: gl.constexpr, LIMIT: gl.constexpr,
    TIMED: gl.constexpr,
):  # fmt: skip
    """What the eight warps do."""
    WIDTH: gl.constexpr = (Q + 3 * KV + 1) * 128
    SPLITS: gl.constexpr = _PROGRAMS // (R * KV)
    TWO: gl.constexpr = TOP // SPLITS == 2
    program = gl.program_id(0)
    c = gl.arange(0, 2048, gl.SliceLayout(0, tokens_form()))
    lane = gl.arange(0, 256, gl.BlockedLayout([1], [32], [8], [0]))
    row_1, row_2, row_3, total = older_blocks(positions, R)
    # This program's share of attention: a part of one head of one row.
    row = program // SPLITS // KV
    kv_head = program // SPLITS % KV
    split = program % SPLITS
    position = gl.load(positions + row, cache_modifier=".cg")
    own = gl.where(position < 0, 0, position // 128)
    pages = page_table + row * table_stride
    new_page = gl.load(pages + own, cache_modifier=".cg").to(gl.int64)
    own_chosen = gl.where(position < 0, -1, (new_page << 32) + own)
    new_row, new_at = new_place(positions, page_table, table_stride, page_stride, program, R)
    present = present_rows(positions, R)
    experts = gl.arange(0, 128, gl.BlockedLayout([1], [32], [8], [0]))
    keep_turns(turns, cos, sin, R)
    target = 0
    number = 0
    turn = 0
    for layer in range(first, last):
        norm = norms + layer * (2 * 2048 + 4 * 128)
        following_norm = norms + gl.minimum(layer + 1, last - 1) * (2 * 2048 + 4 * 128)
        router = gl.load(table + layer * 8 + 6) + program * 8192
        router_row = gl.multiple_of(router.to(gl.pointer_type(gl.float32)), 16)
        layer_at = gl.multiple_of(gl.load(table + layer * 8 + 7), 128)
        weight = gl.load(norm + c).to(gl.float32)
        own_gains, partner_gains = head_gains(norm + 4096, HALF)
        keep_gains(gains, own_gains, partner_gains)
        of_experts.store(gl.load(biases + layer * 128 + experts))
        prefetch(following_norm.to(gl.int64) + program * 128 + lane, (lane == 0) & (program < 72))
        # Projection.
        if turn > 0:
            wait(counter, target)
        _stamp(stamps, layer, 0, program, TIMED)
        project_rows(
            fresh(x), weight, ring, side, bars, sums, fresh(qkv), program, number, turn & 1, eps, R, ROWS, WIDTH
        )
        number += 4
        _stamp(stamps, layer, 1, program, TIMED)
        arrive(counter)
        target += _PROGRAMS
        # Scores of blocks, and the new tokens' keys and values.
        wait(counter, target)
        _stamp(stamps, layer, 2, program, TIMED)
        new, partner = new_heads(fresh(qkv), new_row, new_at, program, Q, KV, HALF, WIDTH)
        score_rows(
            fresh(qkv), gains, turns, eps, side, bars, fresh(scores), program, row_1, row_2, row_3, total, turn, Q, KV,
            HALF, WIDTH, R, BLOCKS,
        )  # fmt: skip
        new_tokens(new, partner, fresh(cache), new_row, new_at, layer_at, gains, turns, eps, program, KV, R)
        _stamp(stamps, layer, 3, program, TIMED)
        arrive(counter)
        target += _PROGRAMS
        query = queries_of_row(fresh(qkv), gains, turns, eps, scale_log2, row, kv_head, Q, KV, HALF, WIDTH, R)
        prefetch(router + lane * 128, lane < 64)
        wait(counter, target)
        _stamp(stamps, layer, 4, program, TIMED)
        at_scores = fresh(scores) + (row * KV + kv_head) * BLOCKS
        place, page = places_of_blocks(at_scores, pages, own, sums, TOP - 1, BLOCKS)
        if TWO:
            chosen = _chosen(place, page, own_chosen, 2 * split, BLOCKS)
            also = block_at_place(place, page, 2 * split + 1, BLOCKS)
        else:
            chosen = _chosen(place, page, own_chosen, split, BLOCKS)
            also = chosen
        _stamp(stamps, layer, 17, program, TIMED)
        attend_row(
            query, fresh(cache), page_stride, layer_at, chosen, also, row, kv_head, position, side, fresh(partial),
            fresh(partial_max), fresh(partial_sum), split, Q, KV, SPLITS, TWO,
        )  # fmt: skip
        _stamp(stamps, layer, 5, program, TIMED)
        arrive(counter)
        target += _PROGRAMS
        wait(counter, target)
        _stamp(stamps, layer, 6, program, TIMED)
        merge_rows(fresh(partial), fresh(partial_max), fresh(partial_sum), fresh(attention), program, Q, SPLITS, R)
        _stamp(stamps, layer, 7, program, TIMED)
        arrive(counter)
        target += _PROGRAMS
        wait(counter, target)
        # Output projection.
        _stamp(stamps, layer, 8, program, TIMED)
        project_out_rows(fresh(attention), fresh(x), ring, side, bars, sums, program, number, R)
        number += 4
        _stamp(stamps, layer, 9, program, TIMED)
        arrive(counter)
        target += _PROGRAMS
        post_norm = gl.load(norm + 2048 + c).to(gl.float32)
        of_router = gl.load(router_row + c)
        wait(counter, target)
        # Router, and the shared expert, which nobody waits for.
        _stamp(stamps, layer, 10, program, TIMED)
        route_rows(fresh(x), post_norm, of_router, side, fresh(logits), program, eps, R)
        _stamp(stamps, layer, 11, program, TIMED)
        arrive(counter)
        target += _PROGRAMS
        x_0 = operand(side, 2 * X_AT)
        x_1 = operand(side, 2 * X_AT + 1)
        shared_in_rows(ring, bars, x_0, x_1, sums, fresh(hidden), program, number, ALPHA, BETA, LIMIT)
        number += 1
        wait(counter, target)
        _stamp(stamps, layer, 12, program, TIMED)
        choose_rows(fresh(logits), of_experts, present, scaling, sums, side, R)
        mbarrier.arrive(bars.index(CHOSEN))
        any_chose = chosen_by_any(sums)
        count = routed_in_rows(
            ring, bars, x_0, x_1, sums, side, any_chose, fresh(hidden), program, number, ALPHA, BETA, LIMIT
        )
        number += count - 1
        _stamp(stamps, layer, 13, program, TIMED)
        arrive(counter)
        target += _PROGRAMS
        wait(counter, target)
        _stamp(stamps, layer, 14, program, TIMED)
        down_rows(fresh(hidden), fresh(x), ring, side, bars, sums, program, number, count, R)
        number += (count + 1) // 2
        # The side's shared memory has been written by threads, and the copy engine writes there next.
        fence_async_shared()
        _stamp(stamps, layer, 15, program, TIMED)
        arrive(counter)
        mbarrier.arrive(bars.index(FREE_SIDE))
        target += _PROGRAMS
        turn += 1  # noqa: SIM113  Triton has no enumerate


@gluon.jit(
    do_not_specialize=["first", "last", "table_stride"], do_not_specialize_on_alignment=["positions", "page_table"]
)
def _one_token_rows(
    projections, outs, pairs, downs, keys, table, norms, biases, x, positions, page_table, table_stride, cos, sin,
    cache, qkv, scores, partial, partial_max, partial_sum, attention, logits, hidden, counter, stamps,
    first, last, page_stride, scaling, scale_log2, eps,
    R: gl.constexpr, Q: gl.constexpr, KV: gl.constexpr, HALF: gl.constexpr, ROWS: gl.constexpr, TOP: gl.constexpr,
    BLOCKS: gl.constexpr, ALPHA: gl.constexpr, BETA: gl.constexpr, LIMIT: gl.constexpr,
    TIMED: gl.constexpr, IN_AHEAD: gl.constexpr, OUT_AHEAD: gl.constexpr, EXPERTS_AHEAD: gl.constexpr,
):  # fmt: skip
    tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ring = gl.allocate_shared_memory(gl.bfloat16, [2 * SLOTS, 128, 64], tile)
    side = gl.allocate_shared_memory(gl.bfloat16, [SIDE, 128, 64], tile)
    sums = gl.allocate_shared_memory(gl.float32, [2, 1024], flat_shared(1))
    gains = gl.allocate_shared_memory(gl.bfloat16, [8, 128], flat_shared(2))
    turns = gl.allocate_shared_memory(gl.float32, [2 * R, 128], flat_shared(2))
    of_experts = gl.allocate_shared_memory(gl.float32, [128], flat_shared(1))
    bars = gl.allocate_shared_memory(gl.int64, [_ROW_BARS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_ROW_BARS):
        mbarrier.init(bars.index(i), count=1)
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (
                _compute_rows,
                (
                    table, norms, biases, x, positions, page_table, table_stride, cos, sin, cache, qkv, scores,
                    partial, partial_max, partial_sum, attention, logits, hidden, counter, stamps, ring, side, sums,
                    gains, turns, of_experts, bars, first, last, page_stride, scaling, scale_log2, eps, R, Q, KV, HALF,
                    ROWS, TOP, BLOCKS, ALPHA, BETA, LIMIT, TIMED,
                ),
            ),
            (
                fetch_rows,
                (
                    projections, outs, pairs, downs, keys, table, positions, page_table, table_stride, ring, side,
                    sums, bars, first, last, page_stride, R, KV, ROWS, IN_AHEAD, OUT_AHEAD, EXPERTS_AHEAD,
                ),
            ),
        ],
        [1],
        [56],
    )  # fmt: skip
