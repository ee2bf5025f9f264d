"""The warp that fetches weights for the kernel that streams the experts of a few tokens (moe_stream.py).

It goes through all turns of its program, of both products, in the order of their use, and is always as far ahead as the
ring has room: weights of the down projection are on their way before its input exists. Of each product the program has
an even share of three quarters; tiles of the rest go to whoever asks next, since multiprocessors do not get weights
equally fast (an even share of all took 117 to 196 us where the mean is 145). The number of a tile is left for the
computing warps in shared memory, and is there when the tile's first turn is.
"""

# Functions under gluon.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.runtime.jit import constexpr_function

from longturn.kernels.dependent_gluon import wait_for_predecessor
from longturn.kernels.moe_stream_parts import (
    MAILS,
    SLOT_BYTES,
    SLOT_SCALE_BYTES,
    ask_number,
    choices,
    dealt_out,
    expert_of,
    number_asked,
)

_NVFP4_BYTES = gl.constexpr(SLOT_BYTES + SLOT_SCALE_BYTES)
_MXFP8_BYTES = gl.constexpr(SLOT_BYTES + SLOT_SCALE_BYTES // 4)


@constexpr_function
def words_tile():
    """A box of words as the copy engine leaves it [4, 32, 64]."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


@constexpr_function
def scales_tile(width):
    """A box of scales [32, width]."""
    return gl.NVMMASharedLayout(swizzle_byte_width=64 if width == 64 else 0, element_bitwidth=8, rank=2)


@gluon.jit
def _free_slot(bars, number, SLOTS: gl.constexpr):
    slot = number % SLOTS
    mbarrier.wait(bars.index(SLOTS + slot), (number // SLOTS + 1) & 1, pred=number >= SLOTS)
    return slot


@gluon.jit
def _leave_number(mails, mail, number):
    """Tell the computing warps which tile comes next."""
    form: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mails.index(mail & (MAILS - 1)).store(gl.full([1], 0, gl.int32, form) + number)
    gl.thread_barrier()


@gluon.jit
def _tile(words, scales, row, other, ring, ring_scales, bars, number, TURNS: gl.constexpr, SLOTS: gl.constexpr,
          SHARED: gl.constexpr):  # fmt: skip
    """Ask for all turns of 32 rows from `row` on and 32 from `other` on."""
    for turn in range(TURNS):
        slot = _free_slot(bars, number + turn, SLOTS)
        bar = bars.index(slot)
        if SHARED:
            mbarrier.expect(bar, _MXFP8_BYTES)
            to = ring_scales._reinterpret(gl.uint8, [8 * SLOTS, 32, 16], scales_tile(16))
            tma.async_copy_global_to_shared(scales, [row, 16 * turn], bar, to.index(8 * slot))
            tma.async_copy_global_to_shared(scales, [other, 16 * turn], bar, to.index(8 * slot + 1))
        else:
            mbarrier.expect(bar, _NVFP4_BYTES)
            tma.async_copy_global_to_shared(scales, [row, 64 * turn], bar, ring_scales.index(2 * slot))
            tma.async_copy_global_to_shared(scales, [other, 64 * turn], bar, ring_scales.index(2 * slot + 1))
        tma.async_copy_global_to_shared(words, [4 * turn, row, 0], bar, ring.index(2 * slot))
        tma.async_copy_global_to_shared(words, [4 * turn, other, 0], bar, ring.index(2 * slot + 1))


@gluon.jit
def _product(
    words, scales, shared_words, shared_scales, expert, rank, count, counter, ring, ring_scales, mails, bars, number,
    mail,
    TILES: gl.constexpr, STEP: gl.constexpr, OTHER: gl.constexpr, ROWS: gl.constexpr, TURNS: gl.constexpr,
    SLOTS: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """Matrices of ROWS rows in TILES tiles: the first half of one begins at STEP times its number, the second OTHER
    rows on."""
    tile, end, common = dealt_out(TILES, count, PROGRAMS)
    asked = ask_number(counter)
    if tile >= end:
        tile = common + number_asked(asked)
        asked = ask_number(counter)
    while tile < (count + 1) * TILES:
        _leave_number(mails, mail, tile)
        which = tile // TILES
        row = tile % TILES * STEP
        if which == 0:
            _tile(
                shared_words, shared_scales, row, row + OTHER, ring, ring_scales, bars, number, 2 * TURNS, SLOTS, True
            )  # fmt: skip
            number += 2 * TURNS
        else:
            row += expert_of(expert, rank, which - 1) * ROWS
            _tile(words, scales, row, row + OTHER, ring, ring_scales, bars, number, TURNS, SLOTS, False)
            number += TURNS
        mail += 1
        tile += 1
        if tile >= end:
            tile = common + number_asked(asked)
            asked = ask_number(counter)
    # A turn without weights says that there are no more.
    _leave_number(mails, mail, -1)
    mbarrier.arrive(bars.index(_free_slot(bars, number, SLOTS)))
    return number + 1, mail + 1


@gluon.jit
def fetch(
    in_words, in_scales, down_words, down_scales, shared_in_words, shared_in_scales, shared_down_words,
    shared_down_scales, experts, counters, ring, ring_scales, mails, bars,
    PAIRS: gl.constexpr, K: gl.constexpr, INTER: gl.constexpr, SLOTS: gl.constexpr,
    PROGRAMS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Both products."""
    if PDL:
        wait_for_predecessor()
    expert, _, rank, count = choices(experts, PAIRS)
    number = 0
    mail = 0
    number, mail = _product(
        in_words, in_scales, shared_in_words, shared_in_scales, expert, rank, count, counters + 1, ring, ring_scales,
        mails, bars, number, mail, INTER // 32, 32, INTER, 2 * INTER, K // 1024, SLOTS, PROGRAMS,
    )  # fmt: skip
    _product(
        down_words, down_scales, shared_down_words, shared_down_scales, expert, rank, count, counters + 2, ring,
        ring_scales, mails, bars, number, mail, K // 64, 64, 32, K, INTER // 1024, SLOTS, PROGRAMS,
    )  # fmt: skip
