"""Which blocks one token attends to, inside the persistent kernel (see one_token.py).

As in msa_decode_choose.py nobody sorts: a block's rank is the number of blocks that beat it. The own block, which is
always chosen, has no score and takes no part.
"""

# Functions under gluon.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from longturn.kernels.one_token_parts import PROGRAMS, flat_shared

_PROGRAMS = gl.constexpr(PROGRAMS)
_ABSENT = gl.constexpr(-0x7FFFFFFFFFFFFFFF)


@gluon.jit
def _order_keys(value, block, own):
    """int64 keys of scores, all different: the larger is chosen first, among equals the earlier block. NaN at the
    bottom, then blocks from `own` on. As `msa_decode_choose.order_keys`."""
    value = gl.where(value == value, value, float("-inf"))
    bits = value.to(gl.int32, bitcast=True)
    key = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(gl.int64) << 32) - block
    return gl.where(block < own, key, _ABSENT)


@gluon.jit
def select_blocks(
    scores, table, selected, own, program, xs, KV: gl.constexpr, TOP: gl.constexpr, BLOCKS: gl.constexpr
):  # fmt: skip
    """The best TOP - 1 of the blocks below `own` and their pages, int64 [KV, TOP - 1] (page * 2**32 + block), -1 where
    there are fewer. A program ranks BLOCKS / 32 candidates of one head against all; scores go through xs."""
    form: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [8, 1], [1, 0])
    row: gl.constexpr = gl.BlockedLayout([4], [32], [8], [0])
    CANDIDATES: gl.constexpr = BLOCKS // (_PROGRAMS // KV)
    STAGED: gl.constexpr = 1024 if BLOCKS > 1024 else BLOCKS
    held = xs._reinterpret(gl.float32, [STAGED // 256, 256], flat_shared(1))
    whole = xs._reinterpret(gl.float32, [STAGED], flat_shared(1))
    head = program % KV
    base = scores + head * BLOCKS
    to = selected + head * TOP
    if program < KV:
        slot = gl.arange(0, TOP, gl.SliceLayout(0, form))
        gl.store(
            to + slot, gl.full([TOP], -1, gl.int64, gl.SliceLayout(0, form)), mask=(slot >= own) & (slot < TOP - 1)
        )
    first = (program // KV) * CANDIDATES
    if first < own:
        mine = first + gl.arange(0, CANDIDATES, gl.SliceLayout(1, form))
        page = gl.load(table + mine, mask=mine < own, other=0, cache_modifier=".cg").to(gl.int64)
        key = _order_keys(gl.load(base + mine, mask=mine < own, other=0.0, cache_modifier=".cg"), mine, own)
        rank = gl.full([CANDIDATES], 0, gl.int32, gl.SliceLayout(1, form))
        for start in range(0, own, STAGED):
            column = start + gl.arange(0, STAGED, row)
            gl.thread_barrier()
            whole.store(gl.load(base + column, mask=column < own, other=0.0, cache_modifier=".cg"))
            gl.thread_barrier()
            for i in range((gl.minimum(own - start, STAGED) + 255) // 256):
                other = start + i * 256 + gl.arange(0, 256, gl.SliceLayout(0, form))
                rival = _order_keys(held.index(i).load(gl.SliceLayout(0, form)), other, own)
                rank += gl.sum((rival[None, :] > key[:, None]).to(gl.int32), axis=1)
        gl.store(to + rank, (page << 32) + mine, mask=(rank < TOP - 1) & (mine < own))


@gluon.jit
def ranked_block(scores, table, own, head, rank_wanted, BLOCKS: gl.constexpr):
    """The block of a rank for a head among those below `own`, at most BLOCKS; -1 if there are fewer."""
    form: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [8, 1], [1, 0])
    rival = gl.arange(0, BLOCKS, gl.SliceLayout(0, form))
    mine = gl.arange(0, BLOCKS, gl.SliceLayout(1, form))
    base = scores + head * BLOCKS
    value = gl.load(base + rival, mask=rival < own, other=0.0, cache_modifier=".cg")
    page = gl.load(table + mine, mask=mine < own, other=0, cache_modifier=".cg")
    key_of_rival = _order_keys(value, rival, own)
    key = gl.convert_layout(key_of_rival, gl.SliceLayout(1, form))
    rank = gl.sum((key_of_rival[None, :] > key[:, None]).to(gl.int32), axis=1)
    wanted = (rank == rank_wanted) & (mine < own)
    return gl.sum(gl.where(wanted, (page.to(gl.int64) << 32) + mine + 1, 0), axis=0) - 1
