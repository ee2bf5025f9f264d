"""The persistent kernel for one token: all phases of consecutive layers, a grid barrier between two (one_token.py)."""

# Functions under gluon.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from longturn.kernels.one_token_attention import attend, merge, queries, score_blocks, write_token
from longturn.kernels.one_token_choose import block_at_place, places_of_blocks
from longturn.kernels.one_token_experts import choose, dealt_experts, down, logits_of_all, route, routed_in, shared_in
from longturn.kernels.one_token_fetch import (
    BARS,
    FREE_DOWN,
    FREE_KEYS,
    FREE_PROJECTION,
    FREE_ROUTED,
    FREE_SHARED,
    fetch_all,
)
from longturn.kernels.one_token_linear import hidden_form, project, project_out
from longturn.kernels.one_token_parts import (
    GROUPS,
    PROGRAMS,
    arrive,
    cycles,
    flat_shared,
    head_gains,
    keep_gains,
    keep_turns,
    prefetch,
    wait,
)

_PROGRAMS = gl.constexpr(PROGRAMS)
_GROUPS = gl.constexpr(GROUPS)
_BARS = gl.constexpr(BARS)


@gluon.jit
def _stamp(stamps, layer, at: gl.constexpr, program, TIMED: gl.constexpr):
    if TIMED:
        gl.store(stamps + (layer * 18 + at) * _PROGRAMS + program, cycles())


@gluon.jit
def _compute_all(
    table, norms, biases, x, position, page_table, cos, sin, cache,
    qkv, scores, partial, partial_max, partial_sum, attention, logits, hidden, counter, stamps,
    ring, xs, sums, gains, turns, bars, first, last, page_stride, scaling, scale_log2, eps,
    Q: gl.constexpr, KV: gl.constexpr, HALF: gl.constexpr, ROWS: gl.constexpr, TOP: gl.constexpr,
    BLOCKS: gl.constexpr, ALPHA: gl.constexpr, BETA: gl.constexpr, LIMIT: gl.constexpr,
    TIMED: gl.constexpr,
):  # fmt: skip
    """What the eight warps do."""
    program = gl.program_id(0)
    c = gl.arange(0, 2048, hidden_form())
    experts = dealt_experts()
    own = gl.where(position < 0, 0, position // 128)
    new_page = gl.load(page_table + own, cache_modifier=".cg").to(gl.int64)
    own_chosen = (new_page << 32) + own
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    kv_head = program // 32
    order = program % 32 // 2
    keep_turns(turns, cos, sin, 1)
    target = 0
    turn = 0
    for layer in range(first, last):
        parity = turn & 1
        norm = norms + layer * (2 * 2048 + 4 * 128)
        following = norms + gl.minimum(layer + 1, last - 1) * (2 * 2048 + 4 * 128)
        router = gl.load(table + layer * 8 + 6) + program * 8192
        layer_at = gl.multiple_of(gl.load(table + layer * 8 + 7), 128)
        weight = gl.load(norm + c).to(gl.float32)
        own_gains, partner_gains = head_gains(norm + 4096, HALF)
        keep_gains(gains, own_gains, partner_gains)
        lane = gl.arange(0, 256, lanes)
        prefetch(following.to(gl.int64) + program * 128 + lane, (lane == 0) & (program < 72))
        # Projection.
        if turn > 0:
            wait(counter, target)
        _stamp(stamps, layer, 0, program, TIMED)
        project(x, weight, ring, bars, xs, sums, qkv, program, parity, eps, ROWS)
        _stamp(stamps, layer, 1, program, TIMED)
        arrive(counter)
        mbarrier.arrive(bars.index(FREE_PROJECTION))
        target += _PROGRAMS
        # Scores of blocks, and the new token's keys and values.
        wait(counter, target)
        _stamp(stamps, layer, 2, program, TIMED)
        if position >= 0:
            write_token(
                qkv, cache, new_page * page_stride + layer_at, position % 128, gains, turns, eps, program, Q, KV,
                HALF,
            )  # fmt: skip
        if program < own:
            score_blocks(
                qkv, gains, turns, eps, ring, bars, FREE_KEYS, scores, program, own, turn, Q, KV, HALF, BLOCKS,
            )  # fmt: skip
        _stamp(stamps, layer, 3, program, TIMED)
        arrive(counter)
        target += _PROGRAMS
        query = queries(qkv, gains, turns, eps, scale_log2, kv_head, Q, KV, HALF)
        prefetch(router + lane * 128, lane < 64)
        wait(counter, target)
        _stamp(stamps, layer, 4, program, TIMED)
        # Which block: the own one, or one of the best of the others.
        if order == 0:
            chosen = gl.where(position < 0, -1, own_chosen)
        else:
            place, page = places_of_blocks(scores + kv_head * BLOCKS, page_table, own, xs, TOP - 1, BLOCKS)
            chosen = block_at_place(place, page, order, BLOCKS)
        _stamp(stamps, layer, 17, program, TIMED)
        attend(
            query, cache, page_stride, layer_at, chosen, program % 2, kv_head, position, ring, partial, partial_max,
            partial_sum, program % 32, Q, KV, 32,
        )  # fmt: skip
        _stamp(stamps, layer, 5, program, TIMED)
        arrive(counter)
        target += _PROGRAMS
        wait(counter, target)
        _stamp(stamps, layer, 6, program, TIMED)
        merge(partial, partial_max, partial_sum, attention, program, Q, 32)
        _stamp(stamps, layer, 7, program, TIMED)
        arrive(counter)
        target += _PROGRAMS
        wait(counter, target)
        # Output projection.
        _stamp(stamps, layer, 8, program, TIMED)
        project_out(attention, x, ring, bars, xs, sums, program, parity)
        _stamp(stamps, layer, 9, program, TIMED)
        arrive(counter)
        target += _PROGRAMS
        wait(counter, target)
        # Router, and the shared expert, which nobody waits for.
        _stamp(stamps, layer, 10, program, TIMED)
        router_row = gl.multiple_of(router.to(gl.pointer_type(gl.float32)), 16)
        route(x, norm + 2048, router_row, xs, logits, program, eps)
        _stamp(stamps, layer, 11, program, TIMED)
        arrive(counter)
        target += _PROGRAMS
        bias = gl.load(biases + layer * 128 + experts)
        shared_in(ring, bars, xs, sums, hidden, program, parity, ALPHA, BETA, LIMIT)
        # `attend` wrote to groups that the copy engine writes next.
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(bars.index(FREE_SHARED))
        wait(counter, target)
        _stamp(stamps, layer, 12, program, TIMED)
        value, bias = logits_of_all(logits, bias, sums)
        _, _, _, _, s_0, s_1, s_2, s_3 = choose(value, bias, scaling)
        routed_in(ring, bars, xs, sums, hidden, program, parity, ALPHA, BETA, LIMIT)
        _stamp(stamps, layer, 13, program, TIMED)
        arrive(counter)
        mbarrier.arrive(bars.index(FREE_ROUTED))
        target += _PROGRAMS
        wait(counter, target)
        _stamp(stamps, layer, 14, program, TIMED)
        down(hidden, x, ring, bars, xs, program, parity, s_0, s_1, s_2, s_3)
        _stamp(stamps, layer, 15, program, TIMED)
        arrive(counter)
        mbarrier.arrive(bars.index(FREE_DOWN))
        target += _PROGRAMS
        turn += 1  # noqa: SIM113  Triton has no enumerate


@gluon.jit(do_not_specialize=["first", "last"], do_not_specialize_on_alignment=["positions", "page_table"])
def _one_token(
    lines, keys, table, norms, biases, x, positions, page_table, cos, sin, cache,
    qkv, scores, partial, partial_max, partial_sum, attention, logits, hidden, counter, stamps,
    first, last, page_stride, scaling, scale_log2, eps,
    Q: gl.constexpr, KV: gl.constexpr, HALF: gl.constexpr, ROWS: gl.constexpr, TOP: gl.constexpr,
    BLOCKS: gl.constexpr, ALPHA: gl.constexpr, BETA: gl.constexpr, LIMIT: gl.constexpr,
    TIMED: gl.constexpr, OUT_AHEAD: gl.constexpr, IN_AHEAD: gl.constexpr,
):  # fmt: skip
    tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    ring = gl.allocate_shared_memory(gl.bfloat16, [_GROUPS, 128, 64], tile)
    xs = gl.allocate_shared_memory(gl.bfloat16, [4, 1024], flat_shared(2))
    sums = gl.allocate_shared_memory(gl.float32, [8, 32], flat_shared(2))
    gains = gl.allocate_shared_memory(gl.bfloat16, [8, 128], flat_shared(2))
    turns = gl.allocate_shared_memory(gl.float32, [2, 128], flat_shared(2))
    bars = gl.allocate_shared_memory(gl.int64, [_BARS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_BARS):
        mbarrier.init(bars.index(i), count=1)
    gl.thread_barrier()
    position = gl.load(positions, cache_modifier=".cg")
    own = gl.where(position < 0, 0, position // 128)
    BARRIERS: gl.constexpr = 8
    gl.warp_specialize(
        [
            (
                _compute_all,
                (
                    table, norms, biases, x, position, page_table, cos, sin, cache, qkv, scores, partial, partial_max,
                    partial_sum, attention, logits, hidden, counter, stamps, ring, xs, sums, gains, turns, bars, first,
                    last, page_stride, scaling, scale_log2, eps, Q, KV, HALF, ROWS, TOP, BLOCKS, ALPHA, BETA, LIMIT,
                    TIMED,
                ),
            ),
            (
                fetch_all,
                (
                    lines, keys, table, biases, page_table, logits, counter, ring, bars, first, last, own, page_stride,
                    KV, ROWS, BARRIERS, BARRIERS - 2, OUT_AHEAD, IN_AHEAD,
                ),
            ),
        ],
        [1],
        [56],
    )  # fmt: skip
