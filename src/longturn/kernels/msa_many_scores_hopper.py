"""`block_scores` for Hopper, in Gluon: the same numbers as `msa_many_scores.block_scores` for bf16 index keys.

What Triton's pipeline leaves on the table there is overlap: a program waits for its product, then takes the maxima,
then starts the next copies. Here a program holds two halves of 128 queries, and the product of one half runs while the
maxima of the other are taken; copies are bulk tensor copies, started by one thread. 256 queries a page also halve what
L2 must deliver, 3 TB/s in place of 6 at the tensor cores' rate. For a row that decodes beside a prompt the sides of the
product are exchanged, so that its time is that of a page's bytes. Triton's interpreter cannot run Gluon; the Triton
kernel is its twin in tests, and what other chips and types use.
"""

# Functions under gluon.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.runtime.jit import constexpr_function

HALF_ROWS = 128
FEW_ROWS = 16
"""Tokens times heads of a tile whose queries are the narrow side of the product."""
_ROWS = gl.constexpr(HALF_ROWS)
_FEW = gl.constexpr(FEW_ROWS)
_COST = gl.constexpr(2)
"""Of a page for any other tile, in those of one of few rows."""


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _copy_page(keys, page, index_rows, index_row, ready, pages_of, at, there):
    """Start copying a page's index keys [128, D] to stage `at`, if `there`."""
    bar = ready.index(at)
    mbarrier.expect(bar, keys.block_type.nbytes, pred=there)
    tma.async_copy_global_to_shared(keys, [page * index_rows + index_row, 0], bar, pages_of.index(at), pred=there)


@constexpr_function
def _lanes(WARPS):
    return gl.BlockedLayout([1], [32], [WARPS], [0])


@gluon.jit
def _numbers_from(table, block, end, WARPS: gl.constexpr):
    """Pages of 32 blocks from `block` on, one a lane.

    A load waits behind all pages that the copy engine was asked for before it: one a page, even one page ahead, would
    leave hardly more than one page on its way."""
    at = block + gl.arange(0, 32, _lanes(WARPS))
    return gl.load(table + at, mask=at < end, other=0)


@gluon.jit
def _page_of(numbers, of, WARPS: gl.constexpr):
    """The page of the block that is `of` blocks after a segment's first; `numbers` must be those of its 32."""
    return gl.sum(gl.where(gl.arange(0, 32, _lanes(WARPS)) == of % 32, numbers, 0), axis=0)


@gluon.jit(do_not_specialize=["counters", "tile_count", "index_rows", "index_row"])
def block_scores_hopper(
    queries, few_queries, keys, positions, rows, page_table, table_stride, tiles, tile_count, index_rows, index_row,
    scores, score_stride, counts, counters, total_pieces,
    KV_HEADS: gl.constexpr, PAGE: gl.constexpr, SPAN: gl.constexpr, TOKENS: gl.constexpr, PROGRAMS: gl.constexpr,
    STAGES: gl.constexpr, TURN: gl.constexpr, CLEAR: gl.constexpr, PDL: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """As `block_scores`; `queries` describes the index queries [T * KV_HEADS, D] in tiles of HALF_ROWS, `few_queries`
    in tiles of FEW_ROWS, `keys` the cache as rows of D, where a page's index keys begin at row page * index_rows +
    index_row. TOKENS * KV_HEADS is 2 * HALF_ROWS. TURN pages are a turn of the loop."""
    gl.static_assert(STAGES % TURN == 0 and STAGES % 2 == 0)
    program = gl.program_id(0)
    line_layout: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    product: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, PAGE, 16]
    )
    of_rows: gl.constexpr = gl.SliceLayout(1, product)
    few_product: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, _FEW, 16]
    )
    D: gl.constexpr = keys.block_type.shape[1]
    # What the step began with is older than the kernel before.
    number = gl.arange(0, SPAN, layout=line_layout)
    real = number < tile_count
    firsts = gl.load(tiles + 2 * number, mask=real, other=0, cache_modifier=".cg")
    sizes = gl.load(tiles + 2 * number + 1, mask=real, other=0, cache_modifier=".cg")
    last = gl.load(positions + firsts + sizes - 1, mask=sizes > 0, other=0, cache_modifier=".cg")
    blocks_of = last // PAGE
    parts = (sizes + TOKENS - 1) // TOKENS
    costs = gl.where(sizes * KV_HEADS <= _FEW, 1, _COST)
    work = blocks_of * parts * costs
    ends = gl.associative_scan(work, 0, _add)
    total = gl.sum(work, axis=0).to(gl.int64)
    at = (program * total // PROGRAMS).to(gl.int32)
    stop = ((program + 1) * total // PROGRAMS).to(gl.int32)

    shared: gl.constexpr = keys.layout
    query_of = gl.allocate_shared_memory(gl.bfloat16, [2, _ROWS, D], shared)
    few_of = gl.allocate_shared_memory(gl.bfloat16, [_FEW, D], shared)
    pages_of = gl.allocate_shared_memory(gl.bfloat16, [STAGES, PAGE, D], shared)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    asked = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
    mbarrier.init(asked.index(0), count=1)
    fence_async_shared()
    gl.thread_barrier()
    taken = 0
    segment = 0
    row = gl.arange(0, _ROWS, layout=of_rows)
    zero = gl.zeros([_ROWS, PAGE], gl.float32, layout=product)
    few_row = gl.arange(0, _FEW, layout=gl.SliceLayout(0, few_product))
    few_zero = gl.zeros([PAGE, _FEW], gl.float32, layout=few_product)
    if PDL:
        gl.inline_asm_elementwise("griddepcontrol.wait; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // dummy $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    if program == 0:
        gl.store(total_pieces, 0)
    clear = gl.arange(0, CLEAR, layout=line_layout)
    for start in range(program * CLEAR, counters, PROGRAMS * CLEAR):
        gl.store(counts + start + clear, clear * 0, mask=start + clear < counters)
    while at < stop:
        tile = gl.sum((ends <= at).to(gl.int32), axis=0)
        blocks = gl.sum(gl.where(number == tile, blocks_of, 0), axis=0)
        cost = gl.sum(gl.where(number == tile, costs, 0), axis=0)
        unit = at - gl.sum(gl.where(number == tile, ends - work, 0), axis=0)
        skipped = unit // (blocks * cost) * TOKENS
        within = unit % (blocks * cost)
        # A block belongs to the program that the first unit of its cost falls to.
        begin = (within + cost - 1) // cost
        end = gl.minimum((within + stop - at + cost - 1) // cost, blocks)
        at += gl.minimum(blocks * cost - within, stop - at)
        first = gl.load(tiles + 2 * tile, cache_modifier=".cg") + skipped
        count = (gl.load(tiles + 2 * tile + 1, cache_modifier=".cg") - skipped) * KV_HEADS
        table = page_table + gl.load(rows + first, cache_modifier=".cg").to(gl.int64) * table_stride
        line = first * KV_HEADS
        # The products of the segment before have been waited for by every warp.
        gl.thread_barrier()
        few = cost == 1
        mbarrier.expect(asked.index(0), few_queries.block_type.nbytes, pred=few)
        mbarrier.expect(asked.index(0), 2 * queries.block_type.nbytes, pred=cost > 1)
        tma.async_copy_global_to_shared(few_queries, [line, 0], asked.index(0), few_of, pred=few)
        tma.async_copy_global_to_shared(queries, [line, 0], asked.index(0), query_of.index(0), pred=cost > 1)
        tma.async_copy_global_to_shared(queries, [line + _ROWS, 0], asked.index(0), query_of.index(1), pred=cost > 1)
        numbers = _numbers_from(table, begin, end, num_warps)
        later = _numbers_from(table, begin + 32, end, num_warps)
        for i in gl.static_range(STAGES):
            page = _page_of(numbers, i, num_warps)
            _copy_page(keys, page, index_rows, index_row, ready, pages_of, (taken + i) % STAGES, begin + i < end)
        to = scores + (line + row).to(gl.int64) * score_stride
        mask = row < count
        other_to = to + _ROWS * score_stride
        other_mask = row + _ROWS < count
        mbarrier.wait(asked.index(0), segment & 1)
        segment += 1
        # A product in flight must not cross the loop's edge: the compiler would move its registers, and so wait for it.
        for block in range(gl.where(few, end, begin), end, TURN):
            # Pages to ask for in this turn: STAGES is a multiple of TURN, so that they are of the same 32.
            of = block - begin + STAGES
            if of % 32 == 0:
                numbers = later
                later = _numbers_from(table, block + STAGES + 32, end, num_warps)
            mbarrier.wait(ready.index(taken % STAGES), (taken // STAGES) & 1)
            one = warpgroup_mma(
                query_of.index(0), pages_of.index(taken % STAGES).permute((1, 0)), zero, use_acc=False, is_async=True
            )
            for i in gl.static_range(TURN):
                here = (taken + i) % STAGES
                other = warpgroup_mma(
                    query_of.index(1), pages_of.index(here).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                page = _page_of(numbers, of + i, num_warps)
                done = warpgroup_mma_wait(1, deps=[one])
                gl.store(to + block + i, gl.max(done, axis=1), mask=mask & (block + i < end))
                if i + 1 < TURN:
                    following = taken + i + 1
                    mbarrier.wait(ready.index(following % STAGES), (following // STAGES) & 1, pred=block + i + 1 < end)
                    one = warpgroup_mma(
                        query_of.index(0), pages_of.index(following % STAGES).permute((1, 0)), zero, use_acc=False,
                        is_async=True,
                    )  # fmt: skip
                    done = warpgroup_mma_wait(1, deps=[other])
                else:
                    done = warpgroup_mma_wait(0, deps=[other])
                gl.thread_barrier()
                _copy_page(keys, page, index_rows, index_row, ready, pages_of, here, block + i + STAGES < end)
                gl.store(other_to + block + i, gl.max(done, axis=1), mask=other_mask & (block + i < end))
            taken += gl.minimum(TURN, end - block)
        few_to = scores + (line + few_row).to(gl.int64) * score_stride
        few_mask = few_row < count
        for block in range(gl.where(few, begin, end), end, 2):
            of = block - begin + STAGES
            if of % 32 == 0:
                numbers = later
                later = _numbers_from(table, block + STAGES + 32, end, num_warps)
            here, beside = taken % STAGES, (taken + 1) % STAGES
            there = block + 1 < end
            mbarrier.wait(ready.index(here), (taken // STAGES) & 1)
            one = warpgroup_mma(pages_of.index(here), few_of.permute((1, 0)), few_zero, use_acc=False, is_async=True)
            mbarrier.wait(ready.index(beside), ((taken + 1) // STAGES) & 1, pred=there)
            other = warpgroup_mma(
                pages_of.index(beside), few_of.permute((1, 0)), few_zero, use_acc=False, is_async=True
            )  # fmt: skip
            ahead = block + STAGES
            page, next_page = _page_of(numbers, of, num_warps), _page_of(numbers, of + 1, num_warps)
            done = warpgroup_mma_wait(1, deps=[one])
            gl.thread_barrier()
            _copy_page(keys, page, index_rows, index_row, ready, pages_of, here, ahead < end)
            gl.store(few_to + block, gl.max(done, axis=0), mask=few_mask)
            done = warpgroup_mma_wait(0, deps=[other])
            gl.thread_barrier()
            _copy_page(keys, next_page, index_rows, index_row, ready, pages_of, beside, ahead + 1 < end)
            gl.store(few_to + block + 1, gl.max(done, axis=0), mask=few_mask & there)
            taken += gl.minimum(2, end - block)
