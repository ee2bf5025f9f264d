"""The kernel that streams the experts of a few tokens (moe_stream.py): what its eight computing warps do."""

# Functions under gluon.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from longturn.kernels.dependent_gluon import wait_then_release
from longturn.kernels.moe_stream_fetch import fetch, scales_tile, words_tile
from longturn.kernels.moe_stream_parts import (
    MAILS,
    TOKENS,
    R,
    S,
    W,
    choices,
    expert_of,
    flat,
    groups_form,
    left_form,
    mxfp8_scales_shared,
    nvfp4_scales_shared,
    pieces_form,
    sums_form,
    words_form,
    words_shared,
    x_form,
)
from longturn.kernels.moe_stream_x import ONE, SEVERAL, SHARED, lay_out, lay_out_row, own_group, x_operand
from longturn.kernels.one_token_experts import _swiglu
from longturn.kernels.one_token_parts import arrive, fresh, wait
from longturn.kernels.packed_linear import product_layout
from longturn.kernels.packed_weights import SCALE_BITS, WeightFormat
from longturn.kernels.packed_weights_decode import ASSEMBLY

_NVFP4_STEP, _NVFP4_BASE = (gl.constexpr(0x10001 * bits) for bits in SCALE_BITS[WeightFormat.NVFP4])
_MXFP8_STEP, _MXFP8_BASE = (gl.constexpr(0x10001 * bits) for bits in SCALE_BITS[WeightFormat.MXFP8])
_WIDE_STEP = gl.constexpr(SCALE_BITS[WeightFormat.NVFP4][0] << 13)
_WIDE_BASE = gl.constexpr((SCALE_BITS[WeightFormat.NVFP4][1] << 13) + (112 << 23))
"""The same factors as fp32: three bits of the fraction further up, and a bias of 127 in place of 15."""
_NVFP4_ASM = gl.constexpr(ASSEMBLY[WeightFormat.NVFP4][0])
_MXFP8_ASM = gl.constexpr(ASSEMBLY[WeightFormat.MXFP8][0])
_PLAIN_ASM = gl.constexpr("""{
.reg .b32 a, b;
and.b32 $0, $4, 0x8e008e00;
shl.b32 a, $4, 3;
and.b32 $1, a, 0x8e008e00;
shl.b32 a, $4, 1;
shl.b32 b, $4, 6;
lop3.b32 $2, a, b, 0x8e008e00, 0x28;
shl.b32 a, $4, 2;
shl.b32 b, $4, 9;
lop3.b32 $3, a, b, 0x8e008e00, 0x28;
}""")
"""`packed_weights_decode`'s text for NVFP4 without factors."""


@gluon.jit
def _operand(part):
    return gl.convert_layout(part, left_form(), assert_trivial=True)


@gluon.jit
def _zeros():
    return gl.full([S, R, TOKENS], 0.0, gl.float32, product_layout(8, 1))


@gluon.jit
def _by_words(factor):
    """Factors of words from those of groups, in whichever way these come."""
    return gl.convert_layout(gl.reshape(factor, [S, R, W]), words_form(), assert_trivial=True)


@gluon.jit
def _four(parts, room, turn, own, total, KIND: gl.constexpr):
    total = mma_v2(_operand(parts[0]), x_operand(room, 4 * turn, own, KIND), total)
    total = mma_v2(_operand(parts[1]), x_operand(room, 4 * turn + 1, own, KIND), total)
    total = mma_v2(_operand(parts[2]), x_operand(room, 4 * turn + 2, own, KIND), total)
    return mma_v2(_operand(parts[3]), x_operand(room, 4 * turn + 3, own, KIND), total)


@gluon.jit
def _tile(ring, ring_scales, room, bars, number, KIND: gl.constexpr, TURNS: gl.constexpr, SLOTS: gl.constexpr):
    """Sums of a tile's turns, from turn `number` of the launch on. Of KIND ONE the columns are groups of a slice, whose
    factors meet sums; else they are tokens."""
    two: gl.constexpr = (gl.float16,) * 2
    four: gl.constexpr = (gl.float16,) * 4
    total = _zeros()
    own = own_group()
    for turn in range(TURNS):
        slot = (number + turn) % SLOTS
        mbarrier.wait(bars.index(slot), ((number + turn) // SLOTS) & 1)
        words = ring._reinterpret(gl.int16, [SLOTS, S, R, W], words_shared()).index(slot).load(words_form())
        if KIND == SHARED:
            of_slot = ring_scales._reinterpret(gl.uint8, [4 * SLOTS, 4, R, 4], mxfp8_scales_shared()).index(4 * slot)
            scale = of_slot.load(gl.SliceLayout(1, gl.SliceLayout(4, pieces_form())))
        else:
            of_slot = ring_scales._reinterpret(gl.uint8, [SLOTS, S, R, TOKENS], nvfp4_scales_shared()).index(slot)
            scale = of_slot.load(product_layout(8, 1) if KIND == ONE else groups_form())
        # The slot is free once all warps have what was in it, which a barrier alone does not wait for.
        fence_async_shared()
        mbarrier.arrive(bars.index(SLOTS + slot))
        if KIND == SHARED:
            factor = scale.to(gl.int32) * _MXFP8_STEP + _MXFP8_BASE
            factor = _by_words(gl.expand_dims(gl.expand_dims(factor, 1), 4).broadcast_to(4, 2, R, 4, 8))
            parts = gl.inline_asm_elementwise(_MXFP8_ASM, "=&r,=&r,r,r,r", [words, factor], two, is_pure=True, pack=2)
            total = mma_v2(_operand(parts[0]), x_operand(room, 2 * turn, own, KIND), total)
            total = mma_v2(_operand(parts[1]), x_operand(room, 2 * turn + 1, own, KIND), total)
        elif KIND == ONE:
            parts = gl.inline_asm_elementwise(_PLAIN_ASM, "=&r,=&r,=&r,=&r,r", [words], four, is_pure=True, pack=2)
            factor = (scale.to(gl.int32) * _WIDE_STEP + _WIDE_BASE).to(gl.float32, bitcast=True)
            total += _four(parts, room, turn, own, _zeros(), KIND) * factor
        else:
            factor = scale.to(gl.int32) * _NVFP4_STEP + _NVFP4_BASE
            factor = _by_words(gl.expand_dims(factor, 3).broadcast_to(S, R, TOKENS, 4))
            parts = gl.inline_asm_elementwise(
                _NVFP4_ASM, "=&r,=&r,=&r,=&r,r,r,r", [words, factor], four, is_pure=True, pack=2
            )
            total = _four(parts, room, turn, own, total, KIND)
    return total


@gluon.jit
def _finish(
    total, factor, pair, ok, tile, out, sums,
    ONE: gl.constexpr, WIDTH: gl.constexpr, DOWN: gl.constexpr,
    ALPHA: gl.constexpr, BETA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """Add the slices' sums, in one order, and write a tile's results to rows `pair` of `out` [*, WIDTH]."""
    form: gl.constexpr = gl.SliceLayout(0, sums_form())
    sums._reinterpret(gl.float32, [S, R, TOKENS], flat(3)).store(total)
    gl.thread_barrier()
    y = gl.sum(sums.load(sums_form()), axis=0)
    if ONE:
        y = gl.expand_dims(gl.sum(y, axis=2), 2).broadcast_to(2, 32, TOKENS)
    y = y * factor[:, :, None]
    half = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, form)))[:, None, None]
    r = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, form)))[None, :, None]
    at = pair.to(gl.int64)[None, None, :] * WIDTH + r
    there = ok[None, None, :] & (r >= 0)
    if DOWN:
        gl.store(out + at + (tile * 64 + half * 32), y, mask=there & (half >= 0))
    else:
        gate = gl.expand_dims(gl.sum(gl.where(half == 0, y, 0.0), axis=0), 0)
        up = gl.expand_dims(gl.sum(gl.where(half == 1, y, 0.0), axis=0), 0)
        result = _swiglu(gate, up, ALPHA, BETA, LIMIT)
        gl.store(out + at + tile * 32, result.to(out.dtype.element_ty), mask=there)


@gluon.jit
def _factors(row_scales, base, tile, STEP: gl.constexpr, OTHER: gl.constexpr):
    """Row factors [2, 32] of a tile."""
    form: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(0, sums_form()))
    half = gl.arange(0, 2, gl.SliceLayout(1, form))[:, None]
    r = gl.arange(0, 32, gl.SliceLayout(0, form))[None, :]
    return gl.load(row_scales + base + tile * STEP + half * OTHER + r)


@gluon.jit
def _next_tile(mails, mail, bars, number, SLOTS: gl.constexpr):
    """The tile that turn `number` begins, or -1."""
    mbarrier.wait(bars.index(number % SLOTS), (number // SLOTS) & 1)
    form: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(mails.index(mail & (MAILS - 1)).load(form), axis=0)


@gluon.jit
def _product(
    x, row_scales, shared_row_scales, out, expert, earlier, rank, tokens, ring, ring_scales, room, sums, mails, bars,
    number, mail,
    PAIRS: gl.constexpr, TOP: gl.constexpr, K: gl.constexpr, WIDTH: gl.constexpr,
    TILES: gl.constexpr, STEP: gl.constexpr, OTHER: gl.constexpr, ROWS: gl.constexpr, SLOTS: gl.constexpr,
    DOWN: gl.constexpr, ALPHA: gl.constexpr, BETA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """This program's tiles of one product: matrices of ROWS rows of K columns."""
    TURNS: gl.constexpr = K // 1024
    of_x: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, x_form()))
    of_out: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(0, sums_form())))
    members: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [gl.num_warps(), 1], [1, 0])
    n = gl.arange(0, TOKENS, gl.SliceLayout(0, members))
    slot = gl.arange(0, 32, gl.SliceLayout(1, members))
    own = gl.convert_layout(expert, gl.SliceLayout(1, members))
    place = gl.convert_layout(earlier, gl.SliceLayout(1, members))
    of_x_n = gl.arange(0, TOKENS, of_x)
    of_out_n = gl.arange(0, TOKENS, of_out)
    laid_out = -1
    base = 0
    count = tokens
    pair = PAIRS + of_out_n
    number_of_tile = _next_tile(mails, mail, bars, number, SLOTS)
    while number_of_tile >= 0:
        which = number_of_tile // TILES
        tile = number_of_tile % TILES
        if which != laid_out:
            if which == 0:
                lay_out(x, of_x_n + (PAIRS if DOWN else 0), of_x_n < tokens, room, K, 2)
            else:
                chosen = expert_of(expert, rank, which - 1)
                base = chosen * ROWS
                count = gl.sum((own == chosen).to(gl.int32), axis=0)
                match = (own == chosen)[:, None] & (place[:, None] == n[None, :])
                of_n = gl.sum(gl.where(match, slot[:, None], 0), axis=0)
                pair = gl.convert_layout(of_n, of_out)
                if count == 1:
                    first = gl.sum(gl.where(own == chosen, slot, 0), axis=0)
                    lay_out_row(x, first if DOWN else first // TOP, room, K)
                else:
                    x_row = gl.convert_layout(of_n, of_x)
                    lay_out(x, x_row if DOWN else x_row // TOP, of_x_n < count, room, K, 4)
            laid_out = which
        ok = of_out_n < count
        if which == 0:
            factor = _factors(shared_row_scales, 0, tile, STEP, OTHER)
            total = _tile(ring, ring_scales, room, bars, number, SHARED, 2 * TURNS, SLOTS)
            _finish(total, factor, pair, ok, tile, out, sums, False, WIDTH, DOWN, ALPHA, BETA, LIMIT)
            number += 2 * TURNS
        else:
            factor = _factors(row_scales, base, tile, STEP, OTHER)
            if count == 1:
                total = _tile(ring, ring_scales, room, bars, number, ONE, TURNS, SLOTS)
                _finish(total, factor, pair, ok, tile, out, sums, True, WIDTH, DOWN, ALPHA, BETA, LIMIT)
            else:
                total = _tile(ring, ring_scales, room, bars, number, SEVERAL, TURNS, SLOTS)
                _finish(total, factor, pair, ok, tile, out, sums, False, WIDTH, DOWN, ALPHA, BETA, LIMIT)
            number += TURNS
        mail += 1
        number_of_tile = _next_tile(mails, mail, bars, number, SLOTS)
    mbarrier.arrive(bars.index(SLOTS + number % SLOTS))
    return number + 1, mail + 1


@gluon.jit
def _compute(
    normed, experts, in_row_scales, down_row_scales, shared_in_row_scales, shared_down_row_scales, hidden, parts,
    counters, tokens, ring, ring_scales, room, sums, mails, bars,
    PAIRS: gl.constexpr, TOP: gl.constexpr, K: gl.constexpr, INTER: gl.constexpr,
    SLOTS: gl.constexpr, PROGRAMS: gl.constexpr, ALPHA: gl.constexpr, BETA: gl.constexpr, LIMIT: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    if PDL:
        wait_then_release()
    expert, earlier, rank, _ = choices(experts, PAIRS)
    number = 0
    mail = 0
    number, mail = _product(
        normed, in_row_scales, shared_in_row_scales, hidden, expert, earlier, rank, tokens, ring, ring_scales, room,
        sums, mails, bars, number, mail,
        PAIRS, TOP, K, INTER, INTER // 32, 32, INTER, 2 * INTER, SLOTS, False, ALPHA, BETA, LIMIT,
    )  # fmt: skip
    arrive(counters)
    wait(counters, PROGRAMS)
    _product(
        fresh(hidden), down_row_scales, shared_down_row_scales, parts, expert, earlier, rank, tokens, ring, ring_scales,
        room, sums, mails, bars, number, mail,
        PAIRS, TOP, INTER, K, K // 64, 64, 32, K, SLOTS, True, ALPHA, BETA, LIMIT,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["tokens"])
def _stream_experts(
    in_words, in_scales, in_row_scales, down_words, down_scales, down_row_scales,
    shared_in_words, shared_in_scales, shared_in_row_scales,
    shared_down_words, shared_down_scales, shared_down_row_scales,
    normed, experts, hidden, parts, counters, tokens,
    PAIRS: gl.constexpr, TOP: gl.constexpr, K: gl.constexpr, INTER: gl.constexpr,
    SLOTS: gl.constexpr, PROGRAMS: gl.constexpr, ALPHA: gl.constexpr, BETA: gl.constexpr, LIMIT: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    ring = gl.allocate_shared_memory(gl.int16, [2 * SLOTS, 4, 32, 64], words_tile())
    ring_scales = gl.allocate_shared_memory(gl.uint8, [2 * SLOTS, 32, 64], scales_tile(64))
    room = gl.allocate_shared_memory(gl.float16, [K // 256, S, TOKENS, W], flat(3))
    sums = gl.allocate_shared_memory(gl.float32, [S, 2, 32, TOKENS], flat(4))
    mails = gl.allocate_shared_memory(gl.int32, [MAILS, 1], flat(1))
    bars = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * SLOTS):
        mbarrier.init(bars.index(i), count=1)
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    normed, experts, in_row_scales, down_row_scales, shared_in_row_scales, shared_down_row_scales,
                    hidden, parts, counters, tokens, ring, ring_scales, room, sums, mails, bars,
                    PAIRS, TOP, K, INTER, SLOTS, PROGRAMS, ALPHA, BETA, LIMIT, PDL,
                ),
            ),
            (
                fetch,
                (
                    in_words, in_scales, down_words, down_scales, shared_in_words, shared_in_scales, shared_down_words,
                    shared_down_scales, experts, counters, ring, ring_scales, mails, bars,
                    PAIRS, K, INTER, SLOTS, PROGRAMS, PDL,
                ),
            ),
        ],
        [1],
        [56],
    )  # fmt: skip
