"""Sparse attention of several rows inside the persistent kernel (see one_token_rows.py)."""

# Functions under gluon.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, mma_v2
from triton.runtime.jit import constexpr_function

from longturn.kernels.one_token_parts import PROGRAMS, _partner, head_rows, norm_rope, turned
from longturn.kernels.one_token_rows_parts import SLOTS

_PROGRAMS = gl.constexpr(PROGRAMS)
KEYS_BAR = gl.constexpr(2 * SLOTS.value + 3)
"""Barriers of two buffers of a block's index keys; behind them two that say that one has been read."""
KEYS_FREE = gl.constexpr(2 * SLOTS.value + 5)


@constexpr_function
def tokens_tile():
    """Shared layout of a block's 128 tokens of 128 numbers."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def block_tile(side, buffer):
    """One of two tiles [128, 128] of the side's shared memory."""
    return side._reinterpret(gl.bfloat16, [2, 128, 128], tokens_tile()).index(buffer)


@gluon.jit
def own_block(positions, row: gl.constexpr, R: gl.constexpr):
    """The block of a row's new token; 0 of a padded row, or of none."""
    if row < R:
        position = gl.load(positions + row, cache_modifier=".cg")
        block = gl.where(position < 0, 0, position // 128)
    else:
        block = 0
    return block


@gluon.jit
def older_blocks(positions, R: gl.constexpr):
    """Blocks below the own one, those of the rows one after the other: where rows 1, 2 and 3 begin, and how many there
    are in all."""
    first = own_block(positions, 0, R)
    second = first + own_block(positions, 1, R)
    third = second + own_block(positions, 2, R)
    return first, second, third, third + own_block(positions, 3, R)


@gluon.jit
def row_and_block(number, first, second, third):
    """Of block `number` of `older_blocks`."""
    row = (number >= first).to(gl.int32) + (number >= second).to(gl.int32) + (number >= third).to(gl.int32)
    begin = gl.where(row == 0, 0, gl.where(row == 1, first, gl.where(row == 2, second, third)))
    return row, number - begin


@gluon.jit
def new_place(positions, page_table, table_stride, page_stride, program, R: gl.constexpr):
    """Which row's new token this program stores a part of, and where in the cache its page's slot is, less the layer's
    offset (int64); -1 if it stores none."""
    row = (_PROGRAMS - 1 - program) // 3
    position = gl.load(positions + gl.minimum(row, R - 1), cache_modifier=".cg")
    at = page_table + gl.minimum(row, R - 1) * table_stride + gl.maximum(position, 0) // 128
    place = gl.load(at, cache_modifier=".cg").to(gl.int64) * page_stride + (position % 128) * 128
    return gl.minimum(row, R - 1), gl.where((row < R) & (position >= 0), place, -1)


@gluon.jit
def _kind(program):
    """What a program stores of a new token: 0 its keys, 1 its values, 2 its index key."""
    return (_PROGRAMS - 1 - program) % 3


@gluon.jit
def _new_mask(place, program, KV: gl.constexpr):
    r = gl.arange(0, 8, gl.SliceLayout(1, head_rows()))
    d = gl.arange(0, 128, gl.SliceLayout(0, head_rows()))
    return ((r < gl.where(_kind(program) == 2, 1, KV)) & (place >= 0))[:, None] & (d >= 0)[None, :]


@gluon.jit
def new_heads(
    qkv, row, place, program, Q: gl.constexpr, KV: gl.constexpr, HALF: gl.constexpr, WIDTH: gl.constexpr
):  # fmt: skip
    """The heads that `new_tokens` stores, raw, and each column's partner: loads that other work may hide."""
    kind = _kind(program)
    r = gl.arange(0, 8, gl.SliceLayout(1, head_rows()))
    d = gl.arange(0, 128, gl.SliceLayout(0, head_rows()))
    ok = _new_mask(place, program, KV)
    at = qkv + row * WIDTH + gl.where(kind == 0, Q, gl.where(kind == 1, Q + KV, Q + 3 * KV)) * 128 + r[:, None] * 128
    x = gl.load(at + d[None, :], mask=ok, other=0.0, cache_modifier=".cg")
    return x, gl.load(at + _partner(d, HALF)[None, :], mask=ok, other=0.0, cache_modifier=".cg")


@gluon.jit
def new_tokens(
    x, y, cache, row, place, layer_at, gains, turns, eps, program, KV: gl.constexpr, R: gl.constexpr
):  # fmt: skip
    """Store each row's new keys, values and index key into its page: each is the work of one of the last programs.
    `row` and `place`: see `new_place`; x and y: see `new_heads`."""
    kind = _kind(program)
    r = gl.arange(0, 8, gl.SliceLayout(1, head_rows()))
    d = gl.arange(0, 128, gl.SliceLayout(0, head_rows()))
    key = turned(x, y, gains, gl.where(kind == 2, 3, 1), turns, row, eps, R)
    lane = gl.where(kind == 0, 0, gl.where(kind == 1, KV, 2 * KV)) * (128 * 128)
    to = cache + place + layer_at + lane + r[:, None] * (128 * 128)
    made = gl.where(kind == 1, x, key).to(gl.bfloat16)
    gl.store(to + d[None, :], made, mask=_new_mask(place, program, KV))


@gluon.jit
def _share(begin, program):
    """How many of this program's blocks lie below number `begin` of `older_blocks`."""
    return (gl.maximum(begin - program, 0) + _PROGRAMS - 1) // _PROGRAMS


@gluon.jit
def score_rows(
    qkv, gains, turns, eps, side, bars, scores, program, first, second, third, total, turn,
    Q: gl.constexpr, KV: gl.constexpr, HALF: gl.constexpr, WIDTH: gl.constexpr, R: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Scores of this program's share of all rows' older blocks, row by row, whose keys come in two buffers by turns.
    `turn`: layers done in this launch."""
    form: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[8, 1], instr_shape=[16, 8])
    head = gl.arange(0, 8, gl.SliceLayout(0, form))
    zero = gl.full([128, 8], 0.0, gl.float32, form)
    blocks = _share(total, program)
    begin = 0
    for row in range(R):
        end = gl.where(row == 0, first, gl.where(row == 1, second, gl.where(row == 2, third, total)))
        begins_at = _share(begin, program)
        ends_at = _share(end, program)
        if begins_at < ends_at:
            at = qkv + row * WIDTH + (Q + 2 * KV) * 128
            query = norm_rope(at, gains, 2, turns, row, eps, 8, KV, HALF, R).to(gl.bfloat16)
            query = gl.convert_layout(query.permute((1, 0)), gl.DotOperandLayout(1, form, 2))
            to = scores + (row * KV + head) * BLOCKS + program - begin
            for n in range(begins_at, ends_at):
                buffer = n & 1
                held = gl.where(buffer == 0, (blocks + 1) // 2, blocks // 2) * turn + (n >> 1)
                mbarrier.wait(bars.index(KEYS_BAR + buffer), held & 1)
                keys = block_tile(side, buffer).load(gl.DotOperandLayout(0, form, 2))
                gl.store(to + n * _PROGRAMS, gl.max(mma_v2(keys, query, zero), axis=0), mask=head < KV)
                mbarrier.arrive(bars.index(KEYS_FREE + buffer))
        begin = end


@constexpr_function
def _attend_form():
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 8], instr_shape=[16, 8])


@gluon.jit
def queries_of_row(
    qkv, gains, turns, eps, scale_log2, row, kv_head,
    Q: gl.constexpr, KV: gl.constexpr, HALF: gl.constexpr, WIDTH: gl.constexpr, R: gl.constexpr,
):  # fmt: skip
    """The query heads of a row's key/value head as an operand of `attend_row`."""
    GROUP: gl.constexpr = Q // KV
    at = qkv + row * WIDTH + kv_head * (GROUP * 128)
    query = norm_rope(at, gains, 0, turns, row, eps, 16, GROUP, HALF, R) * scale_log2
    return gl.convert_layout(query.to(gl.bfloat16), gl.DotOperandLayout(0, _attend_form(), 2))


@gluon.jit
def _copy(side, buffer: gl.constexpr, layer_at, chosen, page_stride, position):
    """Start the keys (or values, with another `layer_at`) of a chosen block of one head on their way to a tile."""
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    t = gl.arange(0, 128, gl.SliceLayout(1, copied))
    c = gl.arange(0, 128, gl.SliceLayout(0, copied))
    page = gl.where(chosen < 0, 0, chosen >> 32)
    # Tokens past the last may hold anything, NaN too: they become zeros.
    ok = (t <= _last_token(chosen, position))[:, None] & (c >= 0)[None, :]
    at = layer_at + page * page_stride + t[:, None] * 128 + c[None, :]
    async_copy.async_copy_global_to_shared(block_tile(side, buffer), at, mask=ok, cache_modifier=".cg")
    async_copy.commit_group()


@gluon.jit
def _last_token(chosen, position):
    """Last token of a chosen block (page * 2**32 + block) that the row attends to, from the block's first on; -1 of no
    block."""
    return gl.where(chosen < 0, -1, position - (chosen & 0xFFFFFFFF).to(gl.int32) * 128)


@gluon.jit
def _logits(query, side, buffer: gl.constexpr, chosen, position):
    form: gl.constexpr = _attend_form()
    zero = gl.full([16, 128], 0.0, gl.float32, form)
    keys = block_tile(side, buffer).permute((1, 0)).load(gl.DotOperandLayout(1, form, 2))
    token = gl.arange(0, 128, gl.SliceLayout(0, form))
    return gl.where((token <= _last_token(chosen, position))[None, :], mma_v2(query, keys, zero), float("-inf"))


@gluon.jit
def _weigh(weight, side, buffer: gl.constexpr, total):
    form: gl.constexpr = _attend_form()
    weight = gl.convert_layout(weight.to(gl.bfloat16), gl.DotOperandLayout(0, form, 2))
    return mma_v2(weight, block_tile(side, buffer).load(gl.DotOperandLayout(1, form, 2)), total)


@gluon.jit
def attend_row(
    query, cache, page_stride, layer_at, chosen, also, row, kv_head, position, side, partial, partial_max, partial_sum,
    split, Q: gl.constexpr, KV: gl.constexpr, SPLITS: gl.constexpr, TWO: gl.constexpr,
):  # fmt: skip
    """Partial attention of one group of query heads over block `chosen` and, if TWO, block `also`."""
    GROUP: gl.constexpr = Q // KV
    form: gl.constexpr = _attend_form()
    keys_at = cache + layer_at + kv_head * (128 * 128)
    values_at = keys_at + KV * 128 * 128
    _copy(side, 0, keys_at, chosen, page_stride, position)
    if TWO:
        _copy(side, 1, keys_at, also, page_stride, position)
    else:
        _copy(side, 1, values_at, chosen, page_stride, position)
    async_copy.wait_group(1)
    gl.thread_barrier()
    logit = _logits(query, side, 0, chosen, position)
    top = gl.max(logit, axis=1)
    if TWO:
        gl.thread_barrier()
        _copy(side, 0, values_at, chosen, page_stride, position)
        async_copy.wait_group(1)
        gl.thread_barrier()
        more = _logits(query, side, 1, also, position)
        gl.thread_barrier()
        _copy(side, 1, values_at, also, page_stride, position)
        top = gl.maximum(top, gl.max(more, axis=1))
    safe = gl.where(top == float("-inf"), 0.0, top)[:, None]
    weight = gl.exp2(logit - safe)
    denominator = gl.sum(weight, axis=1)
    total = gl.full([16, 128], 0.0, gl.float32, form)
    if TWO:
        heavier = gl.exp2(more - safe)
        denominator += gl.sum(heavier, axis=1)
        async_copy.wait_group(1)
        gl.thread_barrier()
        total = _weigh(weight, side, 0, total)
        async_copy.wait_group(0)
        gl.thread_barrier()
        total = _weigh(heavier, side, 1, total)
    else:
        async_copy.wait_group(0)
        gl.thread_barrier()
        total = _weigh(weight, side, 1, total)
    member = gl.arange(0, 16, gl.SliceLayout(1, form))
    d = gl.arange(0, 128, gl.SliceLayout(0, form))
    slot = (row * Q + kv_head * GROUP + member) * SPLITS + split
    mine = member < GROUP
    gl.store(partial + (slot * 128)[:, None] + d[None, :], total, mask=mine[:, None] & (d >= 0)[None, :])
    gl.store(partial_max + slot, top, mask=mine)
    gl.store(partial_sum + slot, denominator, mask=mine)


@gluon.jit
def merge_rows(
    partial, partial_max, partial_sum, attention, program, Q: gl.constexpr, SPLITS: gl.constexpr, R: gl.constexpr
):  # fmt: skip
    """A program's columns of the attention of all rows, from all splits' parts."""
    COLUMNS: gl.constexpr = R * Q * 128 // _PROGRAMS
    form: gl.constexpr = gl.BlockedLayout([1, 4], [128 // COLUMNS, COLUMNS // 4], [8, 1], [1, 0])
    head = program * COLUMNS // 128
    begin = program * COLUMNS % 128
    s = gl.arange(0, SPLITS, gl.SliceLayout(1, form))
    c = gl.arange(0, COLUMNS, gl.SliceLayout(0, form))
    part = gl.load(partial + (head * SPLITS + s)[:, None] * 128 + begin + c[None, :], cache_modifier=".cg")
    top = gl.load(partial_max + head * SPLITS + s, cache_modifier=".cg")
    # All of the head's maxima and sums in every warp.
    lane: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0]))
    every = head * SPLITS + gl.arange(0, SPLITS, lane)
    top_of_all = gl.load(partial_max + every, cache_modifier=".cg")
    sum_of_all = gl.load(partial_sum + every, cache_modifier=".cg")
    best = gl.max(top_of_all, axis=0)
    safe = gl.where(best == float("-inf"), 0.0, best)
    denominator = gl.sum(sum_of_all * gl.exp2(top_of_all - safe), axis=0)
    total = gl.sum(part * gl.exp2(top - safe)[:, None], axis=0)
    # A padded row attends to nothing: it gets zeros.
    total = gl.where(denominator > 0.0, total / denominator, 0.0)
    gl.store(attention + program * COLUMNS + c, total.to(gl.bfloat16))
