"""`attend_lists` for Hopper, in Gluon: the same parts as `msa_many_attend.attend_lists` over bf16 keys and values.

Triton moves pages and queries through registers on their way to shared memory, and every value that two layouts share
through shared memory and a barrier. Here pages come by bulk tensor copies and queries by asynchronous ones, two tiles
ahead; whatever a layout needs (a choice, the last key it sees) is read from memory in that layout; and a part is
stored as the tensor cores leave it, with its columns in their order, which `combine_parts` undoes. Triton's interpreter
cannot run Gluon; the Triton kernel is its twin in tests, and what other chips and types use.
"""

# Functions under gluon.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

RING = gl.constexpr(3)
"""Query tiles in shared memory: the one that is multiplied and two that are on their way. With a page's keys and values
they are 112 KiB, so that two programs share a multiprocessor."""


@gluon.jit
def _choice_at(entries, piece, start, count, line, spare, GROUP: gl.constexpr, PIECE: gl.constexpr):
    """The choice of each line of a tile, `spare` past the end of the piece."""
    of = start + line // GROUP
    return gl.load(entries + piece * PIECE + of, mask=of < count, other=spare, cache_modifier=".cg")


@gluon.jit
def _next_tile(piece_size, piece, start, count, later, total, TOKENS: gl.constexpr, PROGRAMS: gl.constexpr):
    """As in `msa_many_attend`."""
    over = start + TOKENS >= count
    piece = gl.where(over, piece + PROGRAMS, piece)
    start = gl.where(over, 0, start + TOKENS)
    count = gl.where(over, later, count)
    following = piece + PROGRAMS
    later = gl.load(piece_size + following, mask=following < total, other=0, cache_modifier=".cg")
    return piece, start, count, later


@gluon.jit
def _copy_queries(into, query, choice, line, column, GROUP: gl.constexpr, TOP: gl.constexpr, D: gl.constexpr):
    """Start copying the queries of a tile, as one group of copies."""
    row = (choice // TOP) * GROUP + line % GROUP
    at = query + row.to(gl.int64)[:, None] * D + column[None, :]
    async_copy.async_copy_global_to_shared(into, at, cache_modifier=".cg")
    async_copy.commit_group()


@gluon.jit(do_not_specialize=["pages", "spare", "page_rows", "key_row", "value_row"])
def attend_lists_hopper(
    query, lanes, piece_list, piece_size, total_pieces, entries, lasts, pages, spare, page_rows, key_row, value_row,
    parts, weights, scale_log2,
    GROUP: gl.constexpr, PAGE: gl.constexpr, TOP: gl.constexpr, PIECE: gl.constexpr, TOKENS: gl.constexpr,
    PROGRAMS: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """As `attend_lists`. `lanes` describes the cache as rows of D; a page's keys begin at row page * page_rows +
    key_row, its values at value_row. TOKENS * GROUP is 16 * num_warps. Column 8 j + 2 u + e of a part is stored as
    column 32 u + 2 j + e, which is where a thread has it."""
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    D: gl.constexpr = lanes.block_type.shape[1]
    ROWS: gl.constexpr = TOKENS * GROUP
    product: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, 128, 16]
    )
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=product, k_width=2)
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [num_warps, 1], [1, 0])
    stored: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0]],
        lane_bases=[[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[64, 128],
    )  # fmt: skip
    copied_line = gl.arange(0, ROWS, layout=gl.SliceLayout(1, copied))
    copied_column = gl.arange(0, D, layout=gl.SliceLayout(0, copied))
    line = gl.arange(0, ROWS, layout=gl.SliceLayout(1, product))
    key = gl.arange(0, PAGE, layout=gl.SliceLayout(0, product))
    stored_line = gl.arange(0, ROWS, layout=gl.SliceLayout(1, stored))
    stored_column = gl.arange(0, D, layout=gl.SliceLayout(0, stored))
    zero = gl.zeros([ROWS, PAGE], gl.float32, layout=product)

    page_of = gl.allocate_shared_memory(gl.bfloat16, [2, PAGE, D], lanes.layout)
    ring = gl.allocate_shared_memory(gl.bfloat16, [RING, ROWS, D], lanes.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(ready.index(0), count=1)
    fence_async_shared()
    gl.thread_barrier()

    total = gl.load(total_pieces, cache_modifier=".cg")
    ahead = gl.program_id(0)
    start = 0
    count = gl.load(piece_size + ahead, mask=ahead < total, other=0, cache_modifier=".cg")
    later = gl.load(piece_size + ahead + PROGRAMS, mask=ahead + PROGRAMS < total, other=0, cache_modifier=".cg")
    for i in gl.static_range(2):
        choice = _choice_at(entries, ahead, start, count, copied_line, spare, GROUP, PIECE)
        _copy_queries(ring.index(i), query, choice, copied_line, copied_column, GROUP, TOP, D)
        ahead, start, count, later = _next_tile(piece_size, ahead, start, count, later, total, TOKENS, PROGRAMS)
    choice = _choice_at(entries, ahead, start, count, copied_line, spare, GROUP, PIECE)
    taken = 0
    for piece in range(gl.program_id(0), total, PROGRAMS):
        counter = gl.load(piece_list + piece, cache_modifier=".cg")
        here = gl.load(piece_size + piece, cache_modifier=".cg")
        row = counter % pages * page_rows + counter // pages * PAGE
        # The products over the page before have been waited for by every warp.
        gl.thread_barrier()
        mbarrier.expect(ready.index(0), 2 * lanes.block_type.nbytes)
        tma.async_copy_global_to_shared(lanes, [row + key_row, 0], ready.index(0), page_of.index(0))
        tma.async_copy_global_to_shared(lanes, [row + value_row, 0], ready.index(0), page_of.index(1))
        mbarrier.wait(ready.index(0), (piece // PROGRAMS) & 1)
        for begin in range(0, here, TOKENS):
            of = begin + line // GROUP
            last = gl.load(lasts + piece * PIECE + of, mask=of < here, other=PAGE - 1, cache_modifier=".cg")
            to = _choice_at(entries, piece, begin, here, line, spare, GROUP, PIECE) * GROUP + line % GROUP
            stored_to = _choice_at(entries, piece, begin, here, stored_line, spare, GROUP, PIECE).to(gl.int64) * GROUP
            async_copy.wait_group(1)
            fence_async_shared()
            gl.thread_barrier()
            logit = warpgroup_mma(
                ring.index(taken % RING), page_of.index(0).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            # Its slot held the tile before, whose product every warp waited for ahead of the barrier.
            _copy_queries(ring.index((taken + 2) % RING), query, choice, copied_line, copied_column, GROUP, TOP, D)
            taken += 1
            ahead, start, count, later = _next_tile(piece_size, ahead, start, count, later, total, TOKENS, PROGRAMS)
            choice = _choice_at(entries, ahead, start, count, copied_line, spare, GROUP, PIECE)
            logit = warpgroup_mma_wait(0, deps=[logit])
            logit = gl.where(key[None, :] <= last[:, None], logit, float("-inf"))
            most = gl.max(logit, axis=1) * scale_log2
            weight = gl.exp2(logit * scale_log2 - most[:, None])
            sum_of = gl.sum(weight, axis=1)
            part = warpgroup_mma(
                gl.convert_layout(weight.to(gl.bfloat16), operand), page_of.index(1), zero, use_acc=False,
                is_async=True,
            )  # fmt: skip
            gl.store(weights + 2 * to.to(gl.int64), most)
            gl.store(weights + 2 * to.to(gl.int64) + 1, sum_of)
            part = warpgroup_mma_wait(0, deps=[part]).to(gl.bfloat16)
            part = part.reshape([ROWS, D // 8, 4, 2]).permute((0, 2, 1, 3)).reshape([ROWS, D])
            at = parts + (stored_to + stored_line % GROUP)[:, None] * D + stored_column[None, :]
            gl.store(at, gl.convert_layout(part, stored, assert_trivial=True))
    async_copy.wait_group(0)
