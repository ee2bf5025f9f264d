"""`attend_lists` for Hopper, in Gluon: the same parts as `msa_many_attend.attend_lists` over bf16 keys and values.

Behind a long context most lists are as short as a tile, so that a program which fetches a page, waits and multiplies
leaves memory idle half of the time. Here one program a multiprocessor divides the work among its warps:

    pages       one warp asks the copy engine for the next pages' keys and values, five halves of a page ahead
    queries     four warps gather the queries of the next tiles, four ahead
    attention   twice four warps take tiles in turn: one multiplies while the other computes its powers

The first two are in msa_many_attend_fetch.py.
A part is stored as the tensor cores leave it, with its columns in their order, which `combine_parts` undoes. Triton's
interpreter cannot run Gluon; the Triton kernel is its twin in tests, and what other chips and types use.
"""

# Functions under gluon.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.runtime.jit import constexpr_function

from longturn.kernels.msa_many_attend_fetch import (
    COPYING_THREADS,
    ENTRIES,
    HALVES,
    ROWS,
    TILES,
    after_predecessor,
    before_successor,
    copied,
    fetch_pages,
    gather_queries,
    of_pieces,
    one_of,
    own_pieces,
)

_ROWS = gl.constexpr(ROWS)


@constexpr_function
def _product():
    """How the threads that multiply hold a tile's logits and sums."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16])


@constexpr_function
def _stored():
    """The same registers once the columns are in the order of `_in_lines`: 16 bytes a store, 64 a row."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 32], [0, 64], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[64, 128],
    )  # fmt: skip


@gluon.jit
def _silence(values, PAGE: gl.constexpr):
    """Zeros for what is not finite among a page's values: its last rows may still hold what an earlier, broken request
    wrote, and a weight of 0 does not silence NaN. Whoever else does the same at this time writes the same."""
    for first in gl.static_range(0, PAGE, 32):
        rows = values.slice(first, 32)
        value = rows.load(copied())
        rows.store(gl.where(gl.abs(value.to(gl.float32)) < float("inf"), value, gl.zeros_like(value)))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _in_lines(part, ROWS_: gl.constexpr, D: gl.constexpr):
    """A product's columns 32 a + 8 b + 2 u + e as 32 a + 8 u + 2 b + e: thread u of a row has 8 of them in a line."""
    part = part.reshape([ROWS_, D // 32, 4, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([ROWS_, D])
    return gl.convert_layout(part, _stored(), assert_trivial=True)


@gluon.jit
def _attend_tiles(
    pages_of, pages_full, pages_empty, ring, entry_of, queries_full, queries_empty,
    piece_size, piece_open, total_pieces, parts, weights, scale_log2,
    MINE: gl.constexpr, GROUP: gl.constexpr, PAGE: gl.constexpr, TOKENS: gl.constexpr, PROGRAMS: gl.constexpr,
    D: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """What four warps do: every other tile, from tile MINE on."""
    after_predecessor(PDL)
    if MINE == 0:
        before_successor(PDL)
    of_rows: gl.constexpr = gl.SliceLayout(1, _product())
    stored_rows: gl.constexpr = gl.SliceLayout(1, _stored())
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=_product(), k_width=2)
    member = gl.arange(0, _ROWS, of_rows) % GROUP
    stored_member = gl.arange(0, _ROWS, stored_rows) % GROUP
    stored_column = gl.arange(0, D, gl.SliceLayout(0, _stored()))
    key = gl.arange(0, PAGE, gl.SliceLayout(0, _product()))
    zero = gl.zeros([_ROWS, PAGE], gl.float32, layout=_product())
    own = own_pieces(total_pieces, PROGRAMS)
    before = 0
    half = 0
    for first in range(0, own, 32):
        sizes = of_pieces(piece_size, first, own, PROGRAMS, 4)
        opens = of_pieces(piece_open, first, own, PROGRAMS, 4)
        for number in range(gl.minimum(own - first, 32)):
            tiles = (one_of(sizes, number, 4) + TOKENS - 1) // TOKENS
            opened = one_of(opens, number, 4)
            keys, values = half % HALVES, (half + 1) % HALVES
            values_phase = ((half + 1) // HALVES) & 1
            begin = (before + MINE) % 2
            mbarrier.wait(pages_full.index(keys), (half // HALVES) & 1)
            if opened != 0:
                mbarrier.wait(pages_full.index(values), values_phase)
                _silence(pages_of.index(values), PAGE)
            for i in range(begin, tiles, 2):
                tile = before + i
                at = tile % TILES
                mbarrier.wait(queries_full.index(at), (tile // TILES) & 1)
                # Through registers: the tensor cores would see what threads wrote only after a fence, and that waits
                # for the stores of the tile before.
                queries = ring.index(at).load(operand)
                entry = entry_of.index(tile % ENTRIES).load(of_rows).to(gl.uint32)
                stored_entry = entry_of.index(tile % ENTRIES).load(stored_rows).to(gl.uint32)
                logit = warpgroup_mma(
                    queries, pages_of.index(keys).permute((1, 0)), zero, use_acc=False, is_async=True
                )  # fmt: skip
                logit = warpgroup_mma_wait(0, deps=[logit])
                gl.thread_barrier()
                mbarrier.arrive(queries_empty.index(at))
                mbarrier.arrive(pages_empty.index(keys), pred=i + 2 >= tiles)
                if opened != 0:
                    last = (entry % PAGE).to(gl.int32)
                    logit = gl.where(key[None, :] <= last[:, None], logit, float("-inf"))
                most = gl.max(logit, axis=1) * scale_log2
                weight = gl.exp2(logit * scale_log2 - most[:, None])
                sum_of = gl.sum(weight, axis=1)
                mbarrier.wait(pages_full.index(values), values_phase)
                part = warpgroup_mma(
                    gl.convert_layout(weight.to(gl.bfloat16), operand), pages_of.index(values), zero, use_acc=False,
                    is_async=True,
                )  # fmt: skip
                to = 2 * ((entry // PAGE).to(gl.int64) * GROUP + member)
                gl.store(weights + to, most)
                gl.store(weights + to + 1, sum_of)
                part = warpgroup_mma_wait(0, deps=[part]).to(gl.bfloat16)
                at_rows = (stored_entry // PAGE).to(gl.int64) * GROUP + stored_member
                gl.store(parts + at_rows[:, None] * D + stored_column[None, :], _in_lines(part, _ROWS, D))
            # Also by those without a tile here, and only once the page came: else they could count twice for one
            # filling.
            mbarrier.wait(pages_full.index(values), values_phase)
            gl.thread_barrier()
            mbarrier.arrive(pages_empty.index(keys), pred=begin >= tiles)
            mbarrier.arrive(pages_empty.index(values))
            before += tiles
            half += 2


@gluon.jit(do_not_specialize=["page_rows", "key_row", "value_row"])
def attend_lists_hopper(
    query, lanes, piece_list, piece_size, piece_open, total_pieces, entries, page_rows, key_row, value_row,
    parts, weights, scale_log2,
    GROUP: gl.constexpr, KV_HEADS: gl.constexpr, PAGE: gl.constexpr, TOP: gl.constexpr, PIECE: gl.constexpr,
    TOKENS: gl.constexpr, PROGRAMS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `attend_lists`. `lanes` describes the cache as rows of D; a page's keys begin at row page * page_rows +
    key_row, its values at value_row. TOKENS * GROUP is ROWS. Column 32 a + 8 b + 2 u + e of a part is stored as column
    32 a + 8 u + 2 b + e, see `_in_lines`."""
    D: gl.constexpr = lanes.block_type.shape[1]
    pages_of = gl.allocate_shared_memory(gl.bfloat16, [HALVES, PAGE, D], lanes.layout)
    ring = gl.allocate_shared_memory(gl.bfloat16, [TILES, _ROWS, D], lanes.layout)
    entry_of = gl.allocate_shared_memory(gl.int32, [ENTRIES, _ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    pages_full = gl.allocate_shared_memory(gl.int64, [HALVES, 1], mbarrier.MBarrierLayout())
    pages_empty = gl.allocate_shared_memory(gl.int64, [HALVES, 1], mbarrier.MBarrierLayout())
    queries_full = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    queries_empty = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(HALVES):
        mbarrier.init(pages_full.index(i), count=1)
        mbarrier.init(pages_empty.index(i), count=2)
    for i in gl.static_range(TILES):
        mbarrier.init(queries_full.index(i), count=COPYING_THREADS)
        mbarrier.init(queries_empty.index(i), count=1)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (
                _attend_tiles,
                (
                    pages_of, pages_full, pages_empty, ring, entry_of, queries_full, queries_empty, piece_size,
                    piece_open, total_pieces, parts, weights, scale_log2, 0, GROUP, PAGE, TOKENS, PROGRAMS, D, PDL,
                ),
            ),
            (
                _attend_tiles,
                (
                    pages_of, pages_full, pages_empty, ring, entry_of, queries_full, queries_empty, piece_size,
                    piece_open, total_pieces, parts, weights, scale_log2, 1, GROUP, PAGE, TOKENS, PROGRAMS, D, PDL,
                ),
            ),
            (
                gather_queries,
                (
                    query, ring, entry_of, queries_full, queries_empty, piece_size, total_pieces, entries,
                    GROUP, PAGE, TOP, PIECE, TOKENS, PROGRAMS, D, PDL,
                ),
            ),
            (
                fetch_pages,
                (
                    lanes, pages_of, pages_full, pages_empty, piece_list, total_pieces, page_rows, key_row, value_row,
                    KV_HEADS, PAGE, PROGRAMS,
                ),
            ),
        ],
        [4, 4, 1],
        [208, 56, 24],
    )  # fmt: skip
