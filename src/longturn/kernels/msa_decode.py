"""MiniMax Sparse Attention for decode steps: two to four launches, each able to fill the chip with one request.

    scores   blocks of the context are dealt out to programs; also writes the new token's K, V and index key
    select   the rank of each block by counting the blocks that beat it, so no program ever sorts; a graph for
             short contexts leaves this launch out, each program of `attend` then does the count itself
    attend   the chosen tokens are dealt out to `splits` programs a key/value head, each a partial softmax
    merge    one program a query head; none if `splits` is 1

The query's own block is always chosen, so its score is never computed: `scores` reads only whole, older blocks.
Extents come from `positions` on the device (-1 marks a padded row), so that a captured graph serves any lengths up to
the extents it was captured with.
"""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from longturn.kernels.cache_write import write_token
from longturn.kernels.dependent import FRESH, launch_options, wait_then_release
from longturn.kernels.head_norm import norm_rope_heads
from longturn.kernels.msa_plan import DecodeRows, MsaNorms, MsaPlan, MsaScratch, MsaShape

_FORCED = tl.constexpr(1e30)
_ABSENT = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
_LOG2E = 1.4426950408889634


@triton.jit
def _scores(
    projected, positions, page_table, table_stride, cos, sin, index_query_norm, key_norm, index_key_norm,
    cache, page_stride, key_lane, value_lane, index_lane, scores, score_stride, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, HALF: tl.constexpr,
    CHUNKS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    position = tl.load(positions + row, cache_modifier=FRESH)
    own_block = position // PAGE  # -1 // PAGE is 0 or -1 by rounding; both give no block below
    table = page_table + row.to(tl.int64) * table_stride
    wait_then_release(PDL)
    if position < 0:
        return
    cos_row = cos + row * D
    sin_row = sin + row * D
    if chunk == CHUNKS - 1:
        page_new = tl.load(table + own_block).to(tl.int64) * page_stride
        write_token(
            projected, row, key_norm, index_key_norm, cos_row, sin_row, cache, page_new, position % PAGE,
            key_lane, value_lane, index_lane, eps, Q_HEADS, KV_HEADS, D, PAGE, HALF,
        )  # fmt: skip
    if chunk < own_block:
        key = tl.arange(0, PAGE)
        at = index_lane + key[:, None] * D + tl.arange(0, D)[None, :]
        head = tl.arange(0, 16)
        width: tl.constexpr = (Q_HEADS + 3 * KV_HEADS + 1) * D
        heads_at = projected + row.to(tl.int64) * width + (Q_HEADS + 2 * KV_HEADS + head) * D
        query = norm_rope_heads(heads_at, head < KV_HEADS, index_query_norm, cos_row, sin_row, eps, D, HALF)
        query = tl.trans(query.to(cache.dtype.element_ty))
        to = scores + (row * KV_HEADS + head).to(tl.int64) * score_stride
        for block in tl.range(chunk, own_block, CHUNKS, num_stages=STAGES):
            page = tl.load(table + block).to(tl.int64)
            keys = tl.load(cache + page * page_stride + at)
            best = tl.max(tl.dot(keys, query, input_precision="ieee"), axis=0)
            tl.store(to + block, best, mask=head < KV_HEADS)


@triton.jit
def _order_keys(base, block, count, INIT: tl.constexpr, LOCAL: tl.constexpr):
    """int64 keys of blocks, all different: the larger is chosen first. Forced blocks on top, NaN at the bottom, then
    absent ones.

    The score in an integer order above, the block's number, negated, below. Forced and absent blocks' scores are not
    read.
    """
    forced = (block < INIT) | (block >= count - LOCAL)
    value = tl.load(base + block, mask=block < count - LOCAL, other=float("-inf"), cache_modifier=FRESH)
    value = tl.where(forced, _FORCED, tl.where(value == value, value, float("-inf")))
    bits = value.to(tl.int32, bitcast=True)
    key = ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 32) - block
    return tl.where(block < count, key, _ABSENT)


@triton.jit
def _select(
    positions, scores, score_stride, selected,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, TOP: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr,
    CANDIDATES: tl.constexpr, RIVALS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2)
    position = tl.load(positions + row, cache_modifier=FRESH)
    wait_then_release(PDL)
    count = tl.where(position >= 0, position // PAGE + 1, 0)
    to = selected + (row * KV_HEADS + head) * TOP
    if tile == 0:
        slot = tl.arange(0, TOP)
        tl.store(to + slot, tl.full([TOP], -1, tl.int32), mask=slot >= count)
    if tile * CANDIDATES < count:
        base = scores + (row * KV_HEADS + head).to(tl.int64) * score_stride
        mine = tile * CANDIDATES + tl.arange(0, CANDIDATES)
        key = _order_keys(base, mine, count, INIT, LOCAL)
        beaten = tl.zeros([CANDIDATES, RIVALS], dtype=tl.int32)
        for start in tl.range(0, count, RIVALS):
            rival = _order_keys(base, start + tl.arange(0, RIVALS), count, INIT, LOCAL)
            beaten += (rival[None, :] > key[:, None]).to(tl.int32)
        rank = tl.sum(beaten, axis=1)
        tl.store(to + rank, mine.to(tl.int32), mask=(rank < TOP) & (mine < count))


@triton.jit
def _attend(
    projected, positions, page_table, table_stride, cos, sin, query_norm, scores, score_stride, selected,
    cache, page_stride, key_lane, value_lane, partial, partial_max, partial_sum, out, scale_log2, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, HALF: tl.constexpr,
    TOP: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr, RANKED: tl.constexpr,
    SPLITS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    GROUP: tl.constexpr = Q_HEADS // KV_HEADS
    TILES_PER_BLOCK: tl.constexpr = PAGE // TILE
    TILES: tl.constexpr = TOP * TILES_PER_BLOCK // SPLITS
    member = tl.arange(0, 16)
    d = tl.arange(0, D)
    width: tl.constexpr = (Q_HEADS + 3 * KV_HEADS + 1) * D
    position = tl.load(positions + row, cache_modifier=FRESH)
    count = tl.where(position >= 0, position // PAGE + 1, 0)
    # The projection is at least two launches back, so it is complete before this kernel's wait (see dependent.py).
    heads_at = projected + row.to(tl.int64) * width + (kv_head * GROUP + member) * D
    query = norm_rope_heads(heads_at, member < GROUP, query_norm, cos + row * D, sin + row * D, eps, D, HALF)
    query = (query * scale_log2).to(cache.dtype.element_ty)
    table = page_table + row.to(tl.int64) * table_stride
    wait_then_release(PDL)
    if RANKED > 0:
        i = tl.arange(0, RANKED)
        base = scores + (row * KV_HEADS + kv_head).to(tl.int64) * score_stride
        key = _order_keys(base, i, count, INIT, LOCAL)
        rank = tl.sum((key[None, :] > key[:, None]).to(tl.int32), axis=1)
    token = tl.arange(0, TILE)
    lane = (kv_head * PAGE + token)[:, None] * D + d[None, :]
    top = tl.full([16], float("-inf"), tl.float32)
    denominator = tl.zeros([16], dtype=tl.float32)
    total = tl.zeros([16, D], dtype=tl.float32)
    for step in tl.range(0, TILES, num_stages=STAGES):
        tile = split * TILES + step
        order = tile // TILES_PER_BLOCK
        if RANKED > 0:
            block = tl.where(order < count, tl.sum(tl.where((rank == order) & (i < count), i, 0), axis=0), -1)
        else:
            block = tl.load(selected + (row * KV_HEADS + kv_head) * TOP + order, cache_modifier=FRESH)
        start = (tile % TILES_PER_BLOCK) * TILE
        at = block * PAGE + start + token
        ok = (block >= 0) & (at <= position)
        page = tl.load(table + block, mask=block >= 0, other=0).to(tl.int64) * page_stride
        k = tl.load(cache + page + key_lane + start * D + lane, mask=ok[:, None], other=0.0)
        v = tl.load(cache + page + value_lane + start * D + lane, mask=ok[:, None], other=0.0)
        logit = tl.dot(query, tl.trans(k), input_precision="ieee")
        logit = tl.where(ok[None, :], logit, float("-inf"))
        new_top = tl.maximum(top, tl.max(logit, axis=1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(logit - safe[:, None])
        shrink = tl.exp2(top - safe)
        denominator = denominator * shrink + tl.sum(weight, axis=1)
        total = total * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision="ieee")
        top = new_top
    mine = member < GROUP
    if SPLITS == 1:
        total = tl.where((denominator > 0.0)[:, None], total / denominator[:, None], 0.0)
        to = out + (row * Q_HEADS + kv_head * GROUP + member)[:, None] * D + d[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=mine[:, None])
    else:
        slot = ((row * SPLITS + split) * Q_HEADS + kv_head * GROUP + member).to(tl.int64)
        tl.store(partial + slot[:, None] * D + d[None, :], total, mask=mine[:, None])
        tl.store(partial_max + slot, top, mask=mine)
        tl.store(partial_sum + slot, denominator, mask=mine)


@triton.jit
def _merge(
    partial, partial_max, partial_sum, out,
    Q_HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    row = tl.program_id(1)
    wait_then_release(PDL)
    slot = (row * SPLITS + tl.arange(0, SPLITS)).to(tl.int64) * Q_HEADS + head
    d = tl.arange(0, D)
    part = tl.load(partial + slot[:, None] * D + d[None, :], cache_modifier=FRESH)
    top = tl.load(partial_max + slot, cache_modifier=FRESH)
    best = tl.max(top, axis=0)
    share = tl.exp2(top - tl.where(best == float("-inf"), 0.0, best))
    denominator = tl.sum(tl.load(partial_sum + slot, cache_modifier=FRESH) * share, axis=0)
    total = tl.sum(part * share[:, None], axis=0)
    # A padded row attends to nothing: it gets zeros, never NaN, since later kernels read every row of the bucket.
    total = tl.where(denominator > 0.0, total / denominator, 0.0)
    tl.store(out + (row * Q_HEADS + head) * D + d, total.to(out.dtype.element_ty))


def msa_decode(
    projected: Tensor, rows: DecodeRows, norms: MsaNorms, cache: Tensor, layer: int, out: Tensor,
    shape: MsaShape, plan: MsaPlan, scratch: MsaScratch, *, pdl: bool = False,
) -> None:  # fmt: skip
    """Sparse attention of one new token a row, into `out` [rows, q_heads * head_dim]; the token's K, V and index key
    are written to its page first.

    projected [rows, shape.projected_width] is the raw q | k | v | index_q | index_k projection; cache is the page-first
    allocation of one element type (bf16 or fp32), flat or of any shape.
    """
    n = projected.shape[0]
    layout = shape.layout
    heads = {"Q_HEADS": shape.q_heads, "D": layout.head_dim}
    page = {"KV_HEADS": layout.kv_heads, "PAGE": layout.page_tokens, "HALF": shape.rotary_dim // 2}
    more = {"PDL": pdl, **launch_options(pdl)}
    lanes = (layout.key_offset(layer), layout.value_offset(layer), layout.index_offset(layer))
    stride = rows.page_table.stride(0)
    forced = {"TOP": shape.top_blocks, "INIT": shape.init_blocks, "LOCAL": shape.local_blocks}
    _scores[(plan.chunks, n)](
        projected, rows.positions, rows.page_table, stride, rows.cos, rows.sin,
        norms.index_query, norms.key, norms.index_key, cache, layout.page_stride, *lanes,
        scratch.scores, shape.max_blocks, shape.eps, CHUNKS=plan.chunks, STAGES=plan.score_stages,
        num_warps=plan.score_warps, **heads, **page, **more,
    )  # fmt: skip
    fused = shape.max_blocks <= plan.fused_blocks
    if not fused:
        _select[(triton.cdiv(shape.max_blocks, plan.candidates), layout.kv_heads, n)](
            rows.positions, scratch.scores, shape.max_blocks, scratch.selected,
            KV_HEADS=layout.kv_heads, PAGE=layout.page_tokens, CANDIDATES=plan.candidates, RIVALS=plan.rivals,
            num_warps=4, **forced, **more,
        )  # fmt: skip
    _attend[(plan.splits, layout.kv_heads, n)](
        projected, rows.positions, rows.page_table, stride, rows.cos, rows.sin, norms.query,
        scratch.scores, shape.max_blocks, scratch.selected, cache, layout.page_stride, *lanes[:2],
        scratch.partial, scratch.partial_max, scratch.partial_sum, out, layout.head_dim**-0.5 * _LOG2E, shape.eps,
        RANKED=triton.next_power_of_2(shape.max_blocks) if fused else 0, SPLITS=plan.splits, TILE=plan.tile,
        STAGES=plan.stages, num_warps=plan.warps, **forced, **heads, **page, **more,
    )  # fmt: skip
    if plan.splits > 1:
        _merge[(shape.q_heads, n)](
            scratch.partial,
            scratch.partial_max,
            scratch.partial_sum,
            out,
            SPLITS=plan.splits,
            num_warps=2,
            **heads,
            **more,
        )
