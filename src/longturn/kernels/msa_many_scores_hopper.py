"""`block_scores` for Hopper, in Gluon: the same numbers as `msa_many_scores.block_scores` for bf16 index keys.

What Triton's pipeline leaves on the table there is overlap: a program waits for its product, then takes the maxima,
then starts the next copies. Here one program a multiprocessor divides its work among its warps:

    pages    one warp asks the copy engine for index queries and for pages of index keys, as many ahead as there is room
    scores   twice four warps multiply half of a tile's queries each by every page, and take the maxima

The two halves wait for pages and never for each other, so that one multiplies while the other takes maxima.
Queries are operands in registers: from shared memory they would take a third of what it can deliver, beside the keys
that both halves read. For a row that decodes beside a prompt the sides of the product are exchanged, so that its time
is that of a page's bytes. Triton's interpreter cannot run Gluon; the Triton kernel is its twin in tests, and what other
chips and types use.
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

from longturn.kernels.msa_many_attend_fetch import after_predecessor, before_successor, one_of

PART_ROWS = 64
"""Tokens times heads of one product."""
FEW_ROWS = 16
"""Tokens times heads of a tile whose queries are the narrow side of the product."""
_PARTS = gl.constexpr(4)
"""Of a tile's queries: two for each half of the warps that multiply."""
_ROWS = gl.constexpr(PART_ROWS)
_FEW = gl.constexpr(FEW_ROWS)
_COST = gl.constexpr(2)
"""Of a page for any other tile, in those of one of few rows."""


@gluon.jit
def _add(a, b):
    return a + b


@constexpr_function
def _spread(SPAN, WARPS):
    """Each warp has all of SPAN numbers, so that nothing passes between warps."""
    return gl.BlockedLayout([SPAN // 32], [32], [WARPS], [0])


@gluon.jit
def _deal(
    positions, tiles, tile_count,
    KV_HEADS: gl.constexpr, PAGE: gl.constexpr, SPAN: gl.constexpr, TOKENS: gl.constexpr, PROGRAMS: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Blocks of each query tile, what a block costs, where the tile's work begins and ends, and this program's share of
    all work, from `at` to `stop`. What the step began with is older than the kernel before."""
    program = gl.program_id(0)
    number = gl.arange(0, SPAN, layout=_spread(SPAN, WARPS))
    real = number < tile_count
    firsts = gl.load(tiles + 2 * number, mask=real, other=0, cache_modifier=".cg")
    sizes = gl.load(tiles + 2 * number + 1, mask=real, other=0, cache_modifier=".cg")
    last = gl.load(positions + firsts + sizes - 1, mask=sizes > 0, other=0, cache_modifier=".cg")
    blocks = last // PAGE
    costs = gl.where(sizes * KV_HEADS <= _FEW, 1, _COST)
    work = blocks * ((sizes + TOKENS - 1) // TOKENS) * costs
    ends = gl.associative_scan(work, 0, _add)
    total = gl.sum(work, axis=0).to(gl.int64)
    at = (program * total // PROGRAMS).to(gl.int32)
    stop = ((program + 1) * total // PROGRAMS).to(gl.int32)
    return blocks, costs, ends - work, ends, at, stop


@gluon.jit
def _segment(
    blocks_of, costs, begins, ends, at, stop, tiles,
    TOKENS: gl.constexpr, SPAN: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Of the share's next segment, which is of one part of a tile: whether its rows are few, its blocks begin .. end -
    1, its first token, how many more tokens the tile has from there on, and where the next one begins."""
    number = gl.arange(0, SPAN, layout=_spread(SPAN, WARPS))
    tile = gl.sum((ends <= at).to(gl.int32), axis=0)
    blocks = gl.sum(gl.where(number == tile, blocks_of, 0), axis=0)
    cost = gl.sum(gl.where(number == tile, costs, 0), axis=0)
    unit = at - gl.sum(gl.where(number == tile, begins, 0), axis=0)
    skipped = unit // (blocks * cost) * TOKENS
    within = unit % (blocks * cost)
    # A block belongs to the program that the first unit of its cost falls to.
    begin = (within + cost - 1) // cost
    end = gl.minimum((within + stop - at + cost - 1) // cost, blocks)
    first = gl.load(tiles + 2 * tile, cache_modifier=".cg") + skipped
    count = gl.load(tiles + 2 * tile + 1, cache_modifier=".cg") - skipped
    return cost == 1, begin, end, first, count, at + gl.minimum(blocks * cost - within, stop - at)


@constexpr_function
def _lanes(WARPS):
    return gl.BlockedLayout([1], [32], [WARPS], [0])


@gluon.jit
def _numbers_from(table, block, end):
    """Pages of 32 blocks from `block` on, one a lane.

    A load waits behind all pages that the copy engine was asked for before it: one a page, even one page ahead, would
    leave hardly more than one page on its way."""
    at = block + gl.arange(0, 32, _lanes(1))
    return gl.load(table + at, mask=at < end, other=0)


@gluon.jit
def _fetch(
    queries, few_queries, keys, query_of, few_of, asked, answered, pages_of, full, empty,
    positions, rows, page_table, table_stride, tiles, tile_count, index_rows, index_row,
    KV_HEADS: gl.constexpr, PAGE: gl.constexpr, SPAN: gl.constexpr, TOKENS: gl.constexpr, PROGRAMS: gl.constexpr,
    STAGES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """What one warp does: queries of each segment, and after them its pages."""
    blocks, costs, begins, ends, at, stop = _deal(
        positions, tiles, tile_count, KV_HEADS, PAGE, SPAN, TOKENS, PROGRAMS, 1
    )
    after_predecessor(PDL)
    taken = 0
    segment = 0
    while at < stop:
        few, begin, end, first, _, at = _segment(blocks, costs, begins, ends, at, stop, tiles, TOKENS, SPAN, 1)
        table = page_table + gl.load(rows + first, cache_modifier=".cg").to(gl.int64) * table_stride
        numbers = _numbers_from(table, begin, end)
        line = first * KV_HEADS
        mbarrier.wait(answered.index(0), (segment & 1) ^ 1)
        mbarrier.expect(asked.index(0), few_queries.block_type.nbytes, pred=few)
        mbarrier.expect(asked.index(0), _PARTS * queries.block_type.nbytes, pred=few == 0)
        tma.async_copy_global_to_shared(few_queries, [line, 0], asked.index(0), few_of, pred=few)
        for part in gl.static_range(_PARTS):
            tma.async_copy_global_to_shared(
                queries, [line + part * _ROWS, 0], asked.index(0), query_of.index(part), pred=few == 0
            )
        for start in range(begin, end, 32):
            later = _numbers_from(table, start + 32, end)
            for of in range(gl.minimum(end - start, 32)):
                page = one_of(numbers, of, 1)
                stage = taken % STAGES
                mbarrier.wait(empty.index(stage), ((taken // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(stage), keys.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    keys, [page * index_rows + index_row, 0], full.index(stage), pages_of.index(stage)
                )
                taken += 1
            numbers = later
        segment += 1


@constexpr_function
def _product(PAGE):
    """How four warps hold the product of a part's queries and a page's keys."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PAGE, 16])


@constexpr_function
def _few_product():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, FEW_ROWS, 16])


@gluon.jit
def _multiply(query, keys, PAGE: gl.constexpr):
    zero = gl.zeros([_ROWS, PAGE], gl.float32, layout=_product(PAGE))
    return warpgroup_mma(query, keys.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _score_pages(
    one_query, other_query, pages_of, full, empty, taken, to, other_to, mask, other_mask, begin, end,
    PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Scores of two parts' queries in blocks begin .. end - 1."""
    for block in range(begin, end):
        stage = taken % STAGES
        mbarrier.wait(full.index(stage), (taken // STAGES) & 1)
        one = _multiply(one_query, pages_of.index(stage), PAGE)
        other = _multiply(other_query, pages_of.index(stage), PAGE)
        done = warpgroup_mma_wait(1, deps=[one])
        gl.store(to + block, gl.max(done, axis=1), mask=mask)
        done = warpgroup_mma_wait(0, deps=[other])
        mbarrier.arrive(empty.index(stage))
        gl.store(other_to + block, gl.max(done, axis=1), mask=other_mask)
        taken += 1
    return taken


@gluon.jit
def _score_few(
    few_of, pages_of, full, empty, taken, to, mask, begin, end,
    HALF: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Scores of few queries in every other block of begin .. end - 1; the other half has those between."""
    zero = gl.zeros([PAGE, _FEW], gl.float32, layout=_few_product())
    for block in range(begin, end):
        stage = taken % STAGES
        mbarrier.wait(full.index(stage), (taken // STAGES) & 1)
        if (block - begin) % 2 == HALF:
            product = warpgroup_mma(
                pages_of.index(stage), few_of.permute((1, 0)), zero, use_acc=False, is_async=True
            )  # fmt: skip
            done = warpgroup_mma_wait(0, deps=[product])
            gl.store(to + block, gl.max(done, axis=0), mask=mask)
        mbarrier.arrive(empty.index(stage))
        taken += 1
    return taken


@gluon.jit
def _score(
    query_of, few_of, asked, answered, pages_of, full, empty, positions, tiles, tile_count, scores, score_stride,
    counts, counters, total_pieces,
    HALF: gl.constexpr, KV_HEADS: gl.constexpr, PAGE: gl.constexpr, SPAN: gl.constexpr, TOKENS: gl.constexpr,
    PROGRAMS: gl.constexpr, STAGES: gl.constexpr, CLEAR: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """What four warps do: half HALF of every tile's queries, or every other page where rows are few."""
    blocks, costs, begins, ends, at, stop = _deal(
        positions, tiles, tile_count, KV_HEADS, PAGE, SPAN, TOKENS, PROGRAMS, 4
    )
    after_predecessor(PDL)
    if HALF == 0:
        before_successor(PDL)
        program = gl.program_id(0)
        if program == 0:
            gl.store(total_pieces, 0)
        clear = gl.arange(0, CLEAR, layout=_lanes(4))
        for start in range(program * CLEAR, counters, PROGRAMS * CLEAR):
            gl.store(counts + start + clear, clear * 0, mask=start + clear < counters)
    operand: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=_product(PAGE), k_width=2)
    row = 2 * HALF * _ROWS + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, _product(PAGE)))
    few_row = gl.arange(0, _FEW, layout=gl.SliceLayout(0, _few_product()))
    taken = 0
    segment = 0
    while at < stop:
        few, begin, end, first, count, at = _segment(blocks, costs, begins, ends, at, stop, tiles, TOKENS, SPAN, 4)
        line, count = first * KV_HEADS, count * KV_HEADS
        mbarrier.wait(asked.index(0), segment & 1)
        segment += 1
        if few:
            few_to = scores + (line + few_row).to(gl.int64) * score_stride
            taken = _score_few(
                few_of, pages_of, full, empty, taken, few_to, few_row < count, begin, end, HALF, PAGE, STAGES
            )
            mbarrier.arrive(answered.index(0))
        else:
            one_query = query_of.index(2 * HALF).load(operand)
            other_query = query_of.index(2 * HALF + 1).load(operand)
            # A barrier does not wait for loads on their way: what the copy engine writes next could overtake them.
            fence_async_shared()
            mbarrier.arrive(answered.index(0))
            to = scores + (line + row).to(gl.int64) * score_stride
            other_to = to + _ROWS * score_stride
            taken = _score_pages(
                one_query, other_query, pages_of, full, empty, taken, to, other_to, row < count, row + _ROWS < count,
                begin, end, PAGE, STAGES,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["counters", "tile_count", "index_rows", "index_row"])
def block_scores_hopper(
    queries, few_queries, keys, positions, rows, page_table, table_stride, tiles, tile_count, index_rows, index_row,
    scores, score_stride, counts, counters, total_pieces,
    KV_HEADS: gl.constexpr, PAGE: gl.constexpr, SPAN: gl.constexpr, TOKENS: gl.constexpr, PROGRAMS: gl.constexpr,
    STAGES: gl.constexpr, CLEAR: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """As `block_scores`; `queries` describes the index queries [T * KV_HEADS, D] in tiles of PART_ROWS, `few_queries`
    in tiles of FEW_ROWS, `keys` the cache as rows of D, where a page's index keys begin at row page * index_rows +
    index_row. TOKENS * KV_HEADS is 4 * PART_ROWS, SPAN at least 32."""
    D: gl.constexpr = keys.block_type.shape[1]
    query_of = gl.allocate_shared_memory(gl.bfloat16, [_PARTS, _ROWS, D], keys.layout)
    few_of = gl.allocate_shared_memory(gl.bfloat16, [_FEW, D], keys.layout)
    pages_of = gl.allocate_shared_memory(gl.bfloat16, [STAGES, PAGE, D], keys.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    asked = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    answered = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    mbarrier.init(asked.index(0), count=1)
    mbarrier.init(answered.index(0), count=2)
    fence_async_shared()
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (
                _score,
                (
                    query_of, few_of, asked, answered, pages_of, full, empty, positions, tiles, tile_count, scores,
                    score_stride, counts, counters, total_pieces, 0, KV_HEADS, PAGE, SPAN, TOKENS, PROGRAMS, STAGES,
                    CLEAR, PDL,
                ),
            ),
            (
                _score,
                (
                    query_of, few_of, asked, answered, pages_of, full, empty, positions, tiles, tile_count, scores,
                    score_stride, counts, counters, total_pieces, 1, KV_HEADS, PAGE, SPAN, TOKENS, PROGRAMS, STAGES,
                    CLEAR, PDL,
                ),
            ),
            (
                _fetch,
                (
                    queries, few_queries, keys, query_of, few_of, asked, answered, pages_of, full, empty, positions,
                    rows, page_table, table_stride, tiles, tile_count, index_rows, index_row, KV_HEADS, PAGE, SPAN,
                    TOKENS, PROGRAMS, STAGES, PDL,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )  # fmt: skip
