"""Which blocks a token attends to, inside a persistent kernel (see one_token.py).

Every warp finds them on its own: a bound that as many blocks as are wanted reach is found by halving, each time with
one count over its lanes. The own block, which is always chosen, has no score and takes no part.

Scores and pages reach the warps through shared memory. All programs read them at once, and lines that every warp of
every program asks for keep L2 busy for microseconds.
"""

# Functions under gluon.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from longturn.kernels.one_token_parts import flat_shared

_ABSENT = gl.constexpr(-0x7FFFFFFF)
_LARGEST = gl.constexpr(0x7FFFFFFF)


@constexpr_function
def _every_warp(BLOCKS):
    """Whether every warp holds all blocks; more of them are dealt out to the warps."""
    return BLOCKS <= 256


@constexpr_function
def _dealt_form(BLOCKS):
    return gl.SliceLayout(0, gl.BlockedLayout([1, max(1, BLOCKS // 256)], [1, 32], [1, 8], [1, 0]))


@constexpr_function
def blocks_form(BLOCKS):
    """Registers of a number a block."""
    if BLOCKS <= 256:
        return gl.SliceLayout(0, gl.BlockedLayout([1, BLOCKS // 32], [1, 32], [8, 1], [1, 0]))
    return _dealt_form(BLOCKS)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@gluon.jit
def places_of_blocks(scores, table, own, held, WANTED: gl.constexpr, BLOCKS: gl.constexpr):
    """Of the blocks below `own`, at most BLOCKS: the place of each among the WANTED best in the order of their numbers,
    from 1 on, 0 for the others; and their pages. Both int32 [BLOCKS].

    Equal scores at the bound are taken from the earliest block on; NaN comes last. `held` is 2 KB of shared memory,
    int32 [512].
    """
    form: gl.constexpr = blocks_form(BLOCKS)
    dealt: gl.constexpr = _dealt_form(BLOCKS)
    block = gl.arange(0, BLOCKS, dealt)
    value = gl.load(scores + block, mask=block < own, other=0.0, cache_modifier=".cg")
    page = gl.load(table + block, mask=block < own, other=0, cache_modifier=".cg")
    value = gl.where(value == value, value, float("-inf"))
    bits = value.to(gl.int32, bitcast=True)
    key = gl.where(block < own, bits ^ ((bits >> 31) & 0x7FFFFFFF), _ABSENT)
    if _every_warp(BLOCKS):
        view = held._reinterpret(gl.int32, [512 // BLOCKS, BLOCKS], flat_shared(1))
        view.index(0).store(key)
        view.index(1).store(page)
        gl.thread_barrier()
        key = view.index(0).load(form)
        page = view.index(1).load(form)
    block = gl.arange(0, BLOCKS, form)
    present = block < own
    place = gl.where(present, block + 1, 0)
    if own > WANTED:
        # `low` is reached by WANTED blocks or more, `high` by fewer. Of 32 groups' largest keys the least is reached by
        # 32 blocks, where all groups have one. Differences of keys need all 32 bits of an unsigned number.
        low = gl.min(gl.where(present, key, _LARGEST), axis=0)
        low = gl.maximum(low, gl.min(gl.max(key.reshape([32, BLOCKS // 32]), axis=1), axis=0))
        high = gl.max(key, axis=0) + 1
        apart = (high - low).to(gl.uint32, bitcast=True)
        while apart > 1:
            third = gl.maximum((apart >> 2) + (apart >> 4) + (apart >> 6), 1).to(gl.int32, bitcast=True)
            middle = low + third
            upper = middle + third
            reached = gl.sum((key >= middle).to(gl.int32) + ((key >= upper).to(gl.int32) << 16), axis=0)
            at_upper = reached >> 16
            at_middle = reached & 0xFFFF
            above_upper = gl.where(at_upper == WANTED, upper + 1, high)
            below_upper = gl.where(at_middle == WANTED, middle + 1, upper)
            high = gl.where(at_upper >= WANTED, above_upper, gl.where(at_middle >= WANTED, below_upper, middle))
            low = gl.where(at_upper >= WANTED, upper, gl.where(at_middle >= WANTED, middle, low))
            apart = (high - low).to(gl.uint32, bitcast=True)
        above = key > low
        tie = (key == low) & present
        left = WANTED - gl.sum(above.to(gl.int32), axis=0)
        # Blocks above the bound and at it, counted in the halves of one number.
        both = above.to(gl.int32) + (tie.to(gl.int32) << 16)
        seen = gl.sum(gl.associative_scan(both[None, :], 1, _add), axis=0)
        ties = seen >> 16
        chosen = above | (tie & (ties <= left))
        place = gl.where(chosen, (seen & 0xFFFF) + gl.minimum(ties, left), 0)
    return place, page


@gluon.jit
def block_at_place(place, page, wanted, BLOCKS: gl.constexpr):
    """The block of a place, from 1 on, as page * 2**32 + block (int64); -1 if there are fewer."""
    here = place == wanted
    number = gl.arange(0, BLOCKS, blocks_form(BLOCKS)) + 1
    if _every_warp(BLOCKS):
        block = gl.sum(gl.where(here, number, 0), axis=0)
        at = gl.sum(gl.where(here, page, 0), axis=0)
    else:
        block, at = gl.reduce((gl.where(here, number, 0), gl.where(here, page, 0)), 0, _add_both)
    return gl.where(block > 0, (at.to(gl.int64) << 32) + (block - 1), -1)
