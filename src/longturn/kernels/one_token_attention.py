"""Sparse attention of one token inside the persistent kernel (see one_token.py): the phases of msa_decode.py, with a
grid barrier where that has a launch."""

# Functions under gluon.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, mma_v2
from triton.runtime.jit import constexpr_function

from longturn.kernels.one_token_parts import PROGRAMS, head_rows, norm_rope

_PROGRAMS = gl.constexpr(PROGRAMS)
KEYS_BAR = gl.constexpr(30)
"""Barriers of two buffers of index keys."""


@constexpr_function
def _tokens_tile():
    """Shared layout of 64 tokens' 128 numbers."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@gluon.jit
def write_token(
    qkv, cache, page_at, slot, gains, turns, eps, program,
    Q: gl.constexpr, KV: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Store the token's keys, values and index key into the page whose layer begins at `page_at` (int64): each is the
    work of one of the last three programs."""
    form: gl.constexpr = head_rows()
    r = gl.arange(0, 8, gl.SliceLayout(1, form))
    d = gl.arange(0, 128, gl.SliceLayout(0, form))
    at = cache + page_at + ((r * 128 + slot) * 128)[:, None] + d[None, :]
    ok = (r < KV)[:, None] & (d >= 0)[None, :]
    if program == _PROGRAMS - 3:
        k = norm_rope(qkv + Q * 128, gains, 1, turns, 0, eps, 8, KV, HALF, 1)
        gl.store(at, k.to(gl.bfloat16), mask=ok)
    elif program == _PROGRAMS - 2:
        v = gl.load(qkv + (Q + KV) * 128 + r[:, None] * 128 + d[None, :], mask=ok, other=0.0, cache_modifier=".cg")
        gl.store(at + KV * 128 * 128, v.to(gl.bfloat16), mask=ok)
    elif program == _PROGRAMS - 1:
        index = norm_rope(qkv + (Q + 3 * KV) * 128, gains, 3, turns, 0, eps, 8, 1, HALF, 1)
        gl.store(at + 2 * KV * 128 * 128, index.to(gl.bfloat16), mask=(r < 1)[:, None] & (d >= 0)[None, :])


@gluon.jit
def keys_tile(ring, buffer, half: gl.constexpr):
    """Half of a block of index keys [64, 128] in groups 8.. of the ring, two buffers of two halves."""
    return ring.index(8 + 2 * buffer + half)._reinterpret(gl.bfloat16, [64, 128], _tokens_tile())


@gluon.jit
def score_blocks(
    qkv, gains, turns, eps, ring, bars, free: gl.constexpr, scores, program, own, turn,
    Q: gl.constexpr, KV: gl.constexpr, HALF: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """Scores of this program's blocks below `own`, whose keys come in two buffers by turns; barrier `free` and the next
    say that one has been read. `turn`: layers done in this launch."""
    form: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[8, 1], instr_shape=[16, 8])
    query = norm_rope(qkv + (Q + 2 * KV) * 128, gains, 2, turns, 0, eps, 8, KV, HALF, 1).to(gl.bfloat16)
    query = gl.convert_layout(query.permute((1, 0)), gl.DotOperandLayout(1, form, 2))
    head = gl.arange(0, 8, gl.SliceLayout(0, form))
    zero = gl.full([64, 8], 0.0, gl.float32, form)
    blocks = (own - program + _PROGRAMS - 1) // _PROGRAMS
    for n in range(blocks):
        buffer = n & 1
        held = gl.where(buffer == 0, (blocks + 1) // 2, blocks // 2) * turn + (n >> 1)
        mbarrier.wait(bars.index(KEYS_BAR + buffer), held & 1)
        dots = mma_v2(keys_tile(ring, buffer, 0).load(gl.DotOperandLayout(0, form, 2)), query, zero)
        more = mma_v2(keys_tile(ring, buffer, 1).load(gl.DotOperandLayout(0, form, 2)), query, zero)
        best = gl.max(gl.maximum(dots, more), axis=0)
        gl.store(scores + head * BLOCKS + program + n * _PROGRAMS, best, mask=head < KV)
        gl.thread_barrier()
        mbarrier.arrive(bars.index(free + buffer))


@constexpr_function
def _attend_form():
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 8], instr_shape=[16, 8])


@gluon.jit
def queries(qkv, gains, turns, eps, scale_log2, kv_head, Q: gl.constexpr, KV: gl.constexpr, HALF: gl.constexpr):
    """The query heads of a key/value head as an operand of `attend`."""
    GROUP: gl.constexpr = Q // KV
    query = norm_rope(qkv + kv_head * (GROUP * 128), gains, 0, turns, 0, eps, 16, GROUP, HALF, 1) * scale_log2
    return gl.convert_layout(query.to(gl.bfloat16), gl.DotOperandLayout(0, _attend_form(), 2))


@gluon.jit
def attend(
    query, cache, page_stride, layer_at, chosen, half, kv_head, position, ring, partial, partial_max, partial_sum,
    split, Q: gl.constexpr, KV: gl.constexpr, SPLITS: gl.constexpr,
):  # fmt: skip
    """Partial attention of one group of query heads over 64 tokens: half of block `chosen` (see `select_blocks`)."""
    GROUP: gl.constexpr = Q // KV
    COLUMNS: gl.constexpr = Q * 128 // _PROGRAMS
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    form: gl.constexpr = _attend_form()
    block = gl.where(chosen < 0, -1, (chosen & 0xFFFFFFFF).to(gl.int32))
    page = gl.where(chosen < 0, 0, chosen >> 32)
    t = gl.arange(0, 64, gl.SliceLayout(1, copied))
    c = gl.arange(0, 128, gl.SliceLayout(0, copied))
    first_token = block * 128 + half * 64
    last = gl.where(block < 0, -1, position - first_token)
    # Tokens past the last may hold anything, NaN too: they become zeros.
    ok = (t <= last)[:, None] & (c >= 0)[None, :]
    at = cache + page * page_stride + layer_at + (kv_head * 128 + half * 64) * 128 + t[:, None] * 128 + c[None, :]
    k_tile = ring.index(10)._reinterpret(gl.bfloat16, [64, 128], _tokens_tile())
    v_tile = ring.index(11)._reinterpret(gl.bfloat16, [64, 128], _tokens_tile())
    async_copy.async_copy_global_to_shared(k_tile, at, mask=ok, cache_modifier=".cg")
    async_copy.commit_group()
    async_copy.async_copy_global_to_shared(v_tile, at + KV * 128 * 128, mask=ok, cache_modifier=".cg")
    async_copy.commit_group()
    async_copy.wait_group(1)
    gl.thread_barrier()
    zero = gl.full([16, 64], 0.0, gl.float32, form)
    logit = mma_v2(query, k_tile.permute((1, 0)).load(gl.DotOperandLayout(1, form, 2)), zero)
    token = gl.arange(0, 64, gl.SliceLayout(0, form))
    logit = gl.where((token <= last)[None, :], logit, float("-inf"))
    top = gl.max(logit, axis=1)
    safe = gl.where(top == float("-inf"), 0.0, top)
    weight = gl.exp2(logit - safe[:, None])
    denominator = gl.sum(weight, axis=1)
    weight = gl.convert_layout(weight.to(gl.bfloat16), gl.DotOperandLayout(0, form, 2))
    async_copy.wait_group(0)
    gl.thread_barrier()
    empty = gl.full([16, 128], 0.0, gl.float32, form)
    total = mma_v2(weight, v_tile.load(gl.DotOperandLayout(1, form, 2)), empty)
    member = gl.arange(0, 16, gl.SliceLayout(1, form))
    d = gl.arange(0, 128, gl.SliceLayout(0, form))
    head = kv_head * GROUP + member
    slot = head * SPLITS + split
    mine = member < GROUP
    # As `merge` reads them: a program's columns of all splits together.
    to = partial + head[:, None] * (SPLITS * 128) + ((d // COLUMNS) * SPLITS + split)[None, :] * COLUMNS
    gl.store(to + (d % COLUMNS)[None, :], total, mask=mine[:, None] & (d >= 0)[None, :])
    gl.store(partial_max + slot, top, mask=mine)
    gl.store(partial_sum + slot, denominator, mask=mine)


@gluon.jit
def merge(partial, partial_max, partial_sum, attention, program, Q: gl.constexpr, SPLITS: gl.constexpr):
    """A program's columns of the attention from all splits' parts."""
    COLUMNS: gl.constexpr = Q * 128 // _PROGRAMS
    form: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [8, 1], [1, 0])
    head = program // (128 // COLUMNS)
    s = gl.arange(0, SPLITS, gl.SliceLayout(1, form))
    c = gl.arange(0, COLUMNS, gl.SliceLayout(0, form))
    at = partial + program * (SPLITS * COLUMNS) + s[:, None] * COLUMNS + c[None, :]
    part = gl.load(at, cache_modifier=".cg")
    top = gl.load(partial_max + head * SPLITS + s, cache_modifier=".cg")
    # All of one head's maxima and sums in every warp.
    lane: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 1], [1, 32], [8, 1], [1, 0]))
    every = head * SPLITS + gl.arange(0, SPLITS, lane)
    top_of_all = gl.load(partial_max + every, cache_modifier=".cg")
    share_of_all = gl.load(partial_sum + every, cache_modifier=".cg")
    best = gl.max(top_of_all, axis=0)
    safe = gl.where(best == float("-inf"), 0.0, best)
    denominator = gl.sum(share_of_all * gl.exp2(top_of_all - safe), axis=0)
    total = gl.sum(part * gl.exp2(top - safe)[:, None], axis=0)
    # A padded row attends to nothing: it gets zeros.
    total = gl.where(denominator > 0.0, total / denominator, 0.0)
    gl.store(attention + program * COLUMNS + c, total.to(gl.bfloat16))
