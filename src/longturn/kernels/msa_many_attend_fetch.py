"""What `attend_lists_hopper` works on, on its way to shared memory: pages, queries, and which queries want which page.

These functions are what its warps do that do not multiply (msa_many_attend_hopper.py). A load waits behind all that the
copy engine was asked for before, some microseconds in which pieces are read and multiplied. One load a piece or a tile,
even if it is for the next one, would be what bounds the kernel; so numbers of pieces are read 32 at a time, and entries
of tiles copied several tiles ahead.
"""

# Functions under gluon.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.runtime.jit import constexpr_function

ROWS = 64
"""Rows of a query tile: choices of a page times query heads."""
HALVES = gl.constexpr(5)
"""Keys or values of pages, 32 KiB each, that have room in shared memory."""
TILES = gl.constexpr(4)
"""Query tiles, 16 KiB each, that have room beside them."""
AHEAD = gl.constexpr(4)
ENTRIES = gl.constexpr(8)
"""TILES + AHEAD."""
_ROWS = gl.constexpr(ROWS)
COPYING_THREADS = gl.constexpr(128)
"""That arrive where a query tile is complete."""


@constexpr_function
def copied():
    """How the gathering threads hold a tile's addresses."""
    return gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])


@gluon.jit
def after_predecessor(PDL: gl.constexpr):
    """Wait for the kernel before, if this one was launched early."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def before_successor(PDL: gl.constexpr):
    """Let the kernel after start launching, if it is launched early."""
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )


@constexpr_function
def _lanes(WARPS):
    return gl.BlockedLayout([1], [32], [WARPS], [0])


@gluon.jit
def of_pieces(values, first, own, PROGRAMS: gl.constexpr, WARPS: gl.constexpr):
    """What `values` says of this program's pieces `first` to `first` + 31: one a lane, 0 past the last of `own`."""
    number = first + gl.arange(0, 32, _lanes(WARPS))
    at = values + gl.program_id(0) + number * PROGRAMS
    return gl.load(at, mask=number < own, other=0, cache_modifier=".cg")


@gluon.jit
def one_of(values, number, WARPS: gl.constexpr):
    """The one that lane `number` has."""
    return gl.sum(gl.where(gl.arange(0, 32, _lanes(WARPS)) == number, values, 0), axis=0)


@gluon.jit
def own_pieces(total_pieces, PROGRAMS: gl.constexpr):
    """How many of all pieces are this program's: every PROGRAMS-th."""
    return (gl.load(total_pieces, cache_modifier=".cg") - gl.program_id(0) + PROGRAMS - 1) // PROGRAMS


@gluon.jit
def _fetch_half(lanes, row, pages_of, full, empty, half):
    """Ask for 128 rows of the cache once half `half` of the ring is free."""
    at = half % HALVES
    mbarrier.wait(empty.index(at), ((half // HALVES) & 1) ^ 1)
    mbarrier.expect(full.index(at), lanes.block_type.nbytes)
    tma.async_copy_global_to_shared(lanes, [row, 0], full.index(at), pages_of.index(at))


@gluon.jit
def fetch_pages(
    lanes, pages_of, full, empty, piece_list, total_pieces, page_rows, key_row, value_row,
    KV_HEADS: gl.constexpr, PAGE: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """What one warp does: keys and values of this program's pieces, in their order. It waits for nothing: pieces and
    pages are older than the kernel before, which fills the lists."""
    own = own_pieces(total_pieces, PROGRAMS)
    half = 0
    for first in range(0, own, 32):
        counters = of_pieces(piece_list, first, own, PROGRAMS, 1)
        for number in range(gl.minimum(own - first, 32)):
            counter = one_of(counters, number, 1)
            row = counter // KV_HEADS * page_rows + counter % KV_HEADS * PAGE
            _fetch_half(lanes, row + key_row, pages_of, full, empty, half)
            _fetch_half(lanes, row + value_row, pages_of, full, empty, half + 1)
            half += 2


@gluon.jit
def _copy_entries(
    entry_of, tile, entries, number, start, count, own,
    GROUP: gl.constexpr, PIECE: gl.constexpr, PROGRAMS: gl.constexpr,
):  # fmt: skip
    """Start copying the entry of each line of a tile; lines past the end of the piece repeat its last choice, whose
    results they write again."""
    of = gl.minimum(start + gl.arange(0, _ROWS, _lanes(4)) // GROUP, gl.maximum(count - 1, 0))
    piece = gl.where(number < own, gl.program_id(0) + number * PROGRAMS, 0)
    async_copy.async_copy_global_to_shared(entry_of.index(tile % ENTRIES), entries + piece * PIECE + of)


@gluon.jit
def _next_tile(
    piece_size, sizes, number, start, count, own, TOKENS: gl.constexpr, PROGRAMS: gl.constexpr
):  # fmt: skip
    """The tile after the one at `start` of the program's piece `number`, which has `count` choices; `sizes` are those
    of 32 pieces."""
    over = start + TOKENS >= count
    number = gl.where(over, number + 1, number)
    start = gl.where(over, 0, start + TOKENS)
    if over & (number % 32 == 0):
        sizes = of_pieces(piece_size, number, own, PROGRAMS, 4)
    count = gl.where(over, one_of(sizes, number % 32, 4), count)
    return sizes, number, start, count


@gluon.jit
def gather_queries(
    query, ring, entry_of, full, empty, piece_size, total_pieces, entries,
    GROUP: gl.constexpr, PAGE: gl.constexpr, TOP: gl.constexpr, PIECE: gl.constexpr, TOKENS: gl.constexpr,
    PROGRAMS: gl.constexpr, D: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """What four warps do: this program's tiles, in their order. Entries come AHEAD tiles before their queries, and as
    copies: to keep loaded values for so long, a loop would have to move them, and so to wait for them."""
    after_predecessor(PDL)
    # Copies of 4 bytes go through L1, which could hold entries of the layer before: this fence empties it.
    gl.inline_asm_elementwise("fence.acq_rel.gpu; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    line = gl.arange(0, _ROWS, gl.SliceLayout(1, copied()))
    column = gl.arange(0, D, gl.SliceLayout(0, copied()))
    own = own_pieces(total_pieces, PROGRAMS)
    sizes = of_pieces(piece_size, 0, own, PROGRAMS, 4)
    number = 0
    start = 0
    count = one_of(sizes, 0, 4)
    tiles = 0
    for ahead in gl.static_range(AHEAD):
        tiles += gl.where(number < own, 1, 0)
        _copy_entries(entry_of, ahead, entries, number, start, count, own, GROUP, PIECE, PROGRAMS)
        async_copy.commit_group()
        sizes, number, start, count = _next_tile(piece_size, sizes, number, start, count, own, TOKENS, PROGRAMS)
    tile = 0
    while tile < tiles:
        at = tile % TILES
        mbarrier.wait(empty.index(at), ((tile // TILES) & 1) ^ 1)
        # The entries of TILES tiles before, in whose place these may come, have been read too.
        tiles += gl.where(number < own, 1, 0)
        _copy_entries(entry_of, tile + AHEAD, entries, number, start, count, own, GROUP, PIECE, PROGRAMS)
        async_copy.wait_group(AHEAD - 1)
        gl.thread_barrier()
        entry = entry_of.index(tile % ENTRIES).load(gl.SliceLayout(1, copied()))
        row = (entry.to(gl.uint32) // (PAGE * TOP)).to(gl.int32) * GROUP + line % GROUP
        async_copy.async_copy_global_to_shared(
            ring.index(at), query + row.to(gl.int64)[:, None] * D + column[None, :], cache_modifier=".cg"
        )
        # Every thread arrives when its copies have.
        async_copy.mbarrier_arrive(full.index(at), increment_count=False)
        async_copy.commit_group()
        sizes, number, start, count = _next_tile(piece_size, sizes, number, start, count, own, TOKENS, PROGRAMS)
        tile += 1
    async_copy.wait_group(0)
