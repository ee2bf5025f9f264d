"""The warp of the persistent kernel for several rows that fetches weights and index keys (see one_token_rows.py).

Weights come in units, in the order of their use, through a ring of slots: unit n of the launch lies in slot n % SLOTS.
This warp waits until a slot has been read, asks for the next unit, and so is always as far ahead as there is room, but
for two limits: it cannot ask for experts before it knows which, and it keeps no more units on their way than the plan
says. The projection's last two units, for which the ring has no room, go to the shared memory beside it.
"""

# Functions under gluon.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.runtime.jit import constexpr_function

from longturn.kernels.one_token_parts import GROUP_BYTES, PROGRAMS
from longturn.kernels.one_token_rows_attention import KEYS_BAR, KEYS_FREE, block_tile, older_blocks, row_and_block
from longturn.kernels.one_token_rows_experts import CHOSEN, chosen_by_any, following
from longturn.kernels.one_token_rows_linear import FREE_PROJECTION, SIDE_BAR
from longturn.kernels.one_token_rows_parts import SLOTS

_PROGRAMS = gl.constexpr(PROGRAMS)
_BYTES = gl.constexpr(GROUP_BYTES)
FREE_SIDE = gl.constexpr(2 * SLOTS.value + 7)
"""Barrier that says, once a layer, that the shared memory beside the ring is free for weights."""
ROW_BARS = 2 * SLOTS.value + 9


@constexpr_function
def _rows_tile():
    """A tile of 16 rows of 512 columns as the copy engine leaves it, [8, 16, 64]."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


@constexpr_function
def _pairs_tile():
    """A tile of 4 rows of a gate and of its up, 1,024 columns, as the copy engine leaves it, [16, 2, 4, 64]."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)


@gluon.jit
def _wait_full(bars, number, pred):
    mbarrier.wait(bars.index(number & (SLOTS - 1)), (number // SLOTS) & 1, pred=pred)


@gluon.jit
def _slot(bars, number, AHEAD: gl.constexpr):
    """The slot of unit `number`, once it is free and no more than AHEAD units would be on their way."""
    slot = number & (SLOTS - 1)
    mbarrier.wait(bars.index(SLOTS + slot), (number // SLOTS + 1) & 1, pred=number >= SLOTS)
    if AHEAD < SLOTS:
        _wait_full(bars, gl.maximum(number - AHEAD, 0), number >= AHEAD)
    return slot


@gluon.jit
def _ask(lines, line, store, tile, bar):
    """Ask for 16 rows of 512 columns, the first at `line`."""
    to = store.index(tile)._reinterpret(gl.bfloat16, [8, 16, 64], _rows_tile())
    tma.async_copy_global_to_shared(lines, [line, 0, 0], bar, to)


@gluon.jit
def _rows(lines, line, other, ring, bars, number, AHEAD: gl.constexpr):
    """Ask for a unit of two tiles of 16 rows, which begin at two lines."""
    slot = _slot(bars, number, AHEAD)
    bar = bars.index(slot)
    mbarrier.expect(bar, 2 * _BYTES)
    _ask(lines, line, ring, 2 * slot, bar)
    _ask(lines, other, ring, 2 * slot + 1, bar)


@gluon.jit
def _pairs(lines, line, ring, bars, number, AHEAD: gl.constexpr):
    """Ask for a unit of 4 rows of a gate, the first at `line`, and of its up: 1,024 columns, then the rest."""
    slot = _slot(bars, number, AHEAD)
    bar = bars.index(slot)
    mbarrier.expect(bar, 2 * _BYTES)
    for half in gl.static_range(2):
        to = ring.index(2 * slot + half)._reinterpret(gl.bfloat16, [16, 2, 4, 64], _pairs_tile())
        tma.async_copy_global_to_shared(lines, [line + 16 * half, 0, 0, 0], bar, to)


@gluon.jit
def _page(page_table, stride, number, first, second, third, total):
    row, block = row_and_block(number, first, second, third)
    return gl.load(page_table + row * stride + block, mask=number < total, other=0, cache_modifier=".cg")


@gluon.jit
def _keys(keys, row, side, bars, buffer):
    bar = bars.index(KEYS_BAR + buffer)
    mbarrier.expect(bar, 2 * _BYTES)
    tma.async_copy_global_to_shared(keys, [row, 0], bar, block_tile(side, buffer))


@gluon.jit
def fetch_rows(
    projections, outs, pairs, downs, keys, table, positions, page_table, table_stride, ring, side, sums, bars, first,
    last, page_stride, R: gl.constexpr, KV: gl.constexpr, ROWS: gl.constexpr, IN_AHEAD: gl.constexpr,
    OUT_AHEAD: gl.constexpr, EXPERTS_AHEAD: gl.constexpr,
):  # fmt: skip
    """All layers. IN_AHEAD and the like: see `OneTokenRowsPlan`."""
    program = gl.program_id(0)
    row_1, row_2, row_3, total = older_blocks(positions, R)
    blocks = (total - program + _PROGRAMS - 1) // _PROGRAMS
    page_rows = page_stride // 128
    number = 0
    turn = 0
    for layer in range(first, last):
        row = table + layer * 8
        line = gl.load(row).to(gl.int32)
        out_line = gl.load(row + 1).to(gl.int32) + program * (16 * 64)
        shared_line = gl.load(row + 2).to(gl.int32) + program * 128
        in_line = gl.load(row + 3).to(gl.int32) + program * 128
        down_line = gl.load(row + 4).to(gl.int32) + program * 128
        shared_down = gl.load(row + 5).to(gl.int32) + program * 128
        index_row = ((gl.load(row + 7) + 2 * KV * 128 * 128) // 128).to(gl.int32)
        page = _page(page_table, table_stride, program, row_1, row_2, row_3, total)
        for n in gl.static_range(4):
            at = line + (program * ROWS + 16 * (n // 2)) * 32 + n % 2 * 16
            _rows(projections, at, at + 8, ring, bars, number + n, IN_AHEAD)
        mbarrier.wait(bars.index(FREE_SIDE), (turn + 1) & 1, pred=turn > 0)
        for n in gl.static_range(2):
            if IN_AHEAD == 1 and n == 1:
                mbarrier.wait(bars.index(SIDE_BAR), turn & 1)
            elif IN_AHEAD < SLOTS:
                _wait_full(bars, number + 4 + n - IN_AHEAD, True)
            bar = bars.index(SIDE_BAR + n)
            mbarrier.expect(bar, 2 * _BYTES)
            at = line + (program * ROWS + ROWS - 16) * 32 + n * 16
            _ask(projections, at, side, 2 * n, bar)
            _ask(projections, at + 8, side, 2 * n + 1, bar)
        number += 4
        mbarrier.wait(bars.index(FREE_PROJECTION), turn & 1)
        for n in range(blocks):
            page_next = _page(page_table, table_stride, program + (n + 1) * _PROGRAMS, row_1, row_2, row_3, total)
            buffer = n & 1
            held = gl.where(buffer == 0, (blocks + 1) // 2, blocks // 2) * turn + (n >> 1)
            mbarrier.wait(bars.index(KEYS_FREE + buffer), (held + 1) & 1, pred=n > 1)
            _keys(keys, page * page_rows + index_row, side, bars, buffer)
            page = page_next
        for n in gl.static_range(4):
            at = out_line + 16 * n
            _rows(outs, at, at + 8, ring, bars, number + n, OUT_AHEAD)
        _pairs(pairs, shared_line, ring, bars, number + 4, EXPERTS_AHEAD)
        number += 5
        mbarrier.wait(bars.index(CHOSEN), turn & 1)
        any_chose = chosen_by_any(sums)
        expert = following(any_chose, -1)
        while expert < 128:
            _pairs(pairs, in_line + expert * (1024 * 32), ring, bars, number, EXPERTS_AHEAD)
            number += 1
            expert = following(any_chose, expert)
        # Down projections by twos, the shared one first; the last may be alone.
        at = shared_down
        expert = following(any_chose, -1)
        while at >= 0:
            slot = _slot(bars, number, EXPERTS_AHEAD)
            bar = bars.index(slot)
            if expert < 128:
                mbarrier.expect(bar, 2 * _BYTES)
                _ask(downs, at, ring, 2 * slot, bar)
                _ask(downs, down_line + expert * (2048 * 8), ring, 2 * slot + 1, bar)
                expert = following(any_chose, expert)
            else:
                mbarrier.expect(bar, _BYTES)
                _ask(downs, at, ring, 2 * slot, bar)
            at = gl.where(expert < 128, down_line + expert * (2048 * 8), -1)
            expert = following(any_chose, expert)
            number += 1
        turn += 1  # noqa: SIM113  Triton has no enumerate
