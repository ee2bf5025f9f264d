"""Full causal attention over a paged cache, for decode steps and for steps of many tokens.

    _rotate_and_cache   queries normalised (or not) and rotated; K and V of all new tokens written to their pages
    _attend             a program takes a tile of queries, all heads that share a key/value head, and every SPLITS-th
                        tile of keys: prompts take one split, decodes as many as fill the chip
    _merge              the splits' parts; none with one split

Serves the dense layers of MiniMax-M3 and the Llama and Qwen families. Extents come from the device, so one captured
graph serves any lengths.
"""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from longturn.kernels.dependent import FRESH, launch_options, wait_then_release
from longturn.kernels.many_tokens import TILE_TOKENS, ManyTokens
from longturn.kernels.msa_plan import DecodeRows
from longturn.kernels.pages import PageLayout

_LOG2E = 1.4426950408889634


@triton.jit
def _rope(heads_at, ok, norm_weight, cos_row, sin_row, eps, D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr):
    """Heads at pointers [H], fp32 [H, D]: y = x * cos + partner * sin, partner HALF columns away; normalised first if
    NORM, by Gemma's rule."""
    d = tl.arange(0, D)
    partner = tl.where(d < HALF, d + HALF, tl.where(d < 2 * HALF, d - HALF, d))
    x = tl.load(heads_at[:, None] + d[None, :], mask=ok[:, None], other=0.0, cache_modifier=FRESH).to(tl.float32)
    y = tl.load(heads_at[:, None] + partner[None, :], mask=ok[:, None], other=0.0, cache_modifier=FRESH).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + eps)[:, None]
        x = x * scale * (tl.load(norm_weight + d).to(tl.float32) + 1.0)[None, :]
        y = y * scale * (tl.load(norm_weight + partner).to(tl.float32) + 1.0)[None, :]
    cos = tl.load(cos_row + d, cache_modifier=FRESH)[None, :]
    return x * cos + y * tl.load(sin_row + d, cache_modifier=FRESH)[None, :]


@triton.jit
def _rotate_and_cache(
    projected, width, positions, rows, page_table, table_stride, cos, sin, query_norm, key_norm, query,
    cache, page_stride, key_lane, value_lane, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    PAGE: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, DECODE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    kv_head = tl.program_id(1)
    wait_then_release(PDL)
    position = tl.load(positions + token, cache_modifier=FRESH)
    if position < 0:
        return
    start = projected + token.to(tl.int64) * width
    cos_row = cos + token.to(tl.int64) * D
    sin_row = sin + token.to(tl.int64) * D
    d = tl.arange(0, D)
    member = tl.arange(0, HEADS)
    head = kv_head * GROUP + member
    q = _rope(start + head * D, member < GROUP, query_norm, cos_row, sin_row, eps, D, HALF, NORM)
    to = query + (token.to(tl.int64) * Q_HEADS + head)[:, None] * D + d[None, :]
    tl.store(to, q.to(query.dtype.element_ty), mask=(member < GROUP)[:, None])
    one = tl.arange(0, 1)
    k_at = start + (Q_HEADS + kv_head + one) * D
    k = _rope(k_at, one >= 0, key_norm, cos_row, sin_row, eps, D, HALF, NORM)
    v = tl.load(start + (Q_HEADS + KV_HEADS + kv_head) * D + d, cache_modifier=FRESH)
    if DECODE:
        row = token
    else:
        row = tl.load(rows + token, cache_modifier=FRESH)
    page = tl.load(page_table + row.to(tl.int64) * table_stride + position // PAGE, cache_modifier=FRESH)
    at = page.to(tl.int64) * page_stride + (kv_head * PAGE + position % PAGE) * D + d
    tl.store(cache + key_lane + at[None, :], k.to(cache.dtype.element_ty))
    tl.store(cache + value_lane + at, v.to(cache.dtype.element_ty))


@triton.jit
def _accumulate(logit, v, top, denominator, total):
    """One more tile of keys in a running base-2 softmax; a query that has seen nothing yet keeps -inf and zeros."""
    new_top = tl.maximum(top, tl.max(logit, axis=1))
    safe = tl.where(new_top == float("-inf"), 0.0, new_top)
    weight = tl.exp2(logit - safe[:, None])
    shrink = tl.exp2(top - safe)
    denominator = denominator * shrink + tl.sum(weight, axis=1)
    total = tl.dot(weight.to(v.dtype), v, total * shrink[:, None], input_precision="ieee")
    return new_top, denominator, total


@triton.jit
def _attend(
    query, positions, rows, page_table, table_stride, tiles, cache, page_stride, key_lane, value_lane,
    partial, partial_max, partial_sum, out, scale_log2,
    Q_HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr,
    LINES: tl.constexpr, KEYS: tl.constexpr, SUBTILES: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr,
    DECODE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    tile = tl.program_id(2)
    wait_then_release(PDL)
    if DECODE:
        first = tile
        row = tile
        count = (tl.load(positions + tile, cache_modifier=FRESH) >= 0).to(tl.int32)
    else:
        part = tile % SUBTILES
        first = tl.load(tiles + 2 * (tile // SUBTILES), cache_modifier=FRESH) + part * TOKENS
        count = tl.load(tiles + 2 * (tile // SUBTILES) + 1, cache_modifier=FRESH) - part * TOKENS
        count = tl.minimum(tl.maximum(count, 0), TOKENS)
        row = tl.load(rows + first, mask=count > 0, other=0, cache_modifier=FRESH)
    if (count == 0) & (DECODE == 0):
        return
    line = tl.arange(0, LINES)
    token = line // GROUP
    ok = (token < count) & (token < TOKENS)
    d = tl.arange(0, D)
    position = tl.load(positions + first + token, mask=ok, other=-1, cache_modifier=FRESH)
    last = tl.max(position, axis=0)
    slot = (first + token).to(tl.int64) * Q_HEADS + kv_head * GROUP + line % GROUP
    q = tl.load(query + slot[:, None] * D + d[None, :], mask=ok[:, None], other=0.0, cache_modifier=FRESH)
    table = page_table + row.to(tl.int64) * table_stride
    key = tl.arange(0, KEYS)
    lane = (kv_head * PAGE + key)[:, None] * D + d[None, :]
    top = tl.full([LINES], float("-inf"), tl.float32)
    denominator = tl.zeros([LINES], dtype=tl.float32)
    total = tl.zeros([LINES, D], dtype=tl.float32)
    # Key tiles that every query sees whole, then those that some query sees in part or that end past the last token.
    whole = (tl.min(tl.where(ok, position, 0x7FFFFFFF), axis=0) + 1) // KEYS
    whole = tl.where(last < 0, 0, whole)
    for step in tl.range(split, whole, SPLITS, num_stages=STAGES):
        page = tl.load(table + step * KEYS // PAGE).to(tl.int64) * page_stride + (step * KEYS % PAGE) * D
        k = tl.load(cache + page + key_lane + lane)
        v = tl.load(cache + page + value_lane + lane)
        logit = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        top, denominator, total = _accumulate(logit, v, top, denominator, total)
    rest = whole + (split - whole % SPLITS + SPLITS) % SPLITS
    for step in tl.range(rest, last // KEYS + 1, SPLITS, num_stages=1):
        at = step * KEYS + key
        page = tl.load(table + step * KEYS // PAGE).to(tl.int64) * page_stride + (step * KEYS % PAGE) * D
        k = tl.load(cache + page + key_lane + lane)
        # A slot past the row's last token may hold anything, and 0 * NaN is NaN.
        v = tl.load(cache + page + value_lane + lane, mask=(at <= last)[:, None], other=0.0)
        logit = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        logit = tl.where(at[None, :] <= position[:, None], logit, float("-inf"))
        top, denominator, total = _accumulate(logit, v, top, denominator, total)
    mine = (token < count) & (token < TOKENS)
    if DECODE:
        mine = line < GROUP  # a padded row gets zeros, never NaN, since later kernels read every row
    if SPLITS == 1:
        total = tl.where((denominator > 0.0)[:, None], total / denominator[:, None], 0.0)
        tl.store(out + slot[:, None] * D + d[None, :], total.to(out.dtype.element_ty), mask=mine[:, None])
    else:
        tokens_at = ((first + token).to(tl.int64) * SPLITS + split) * Q_HEADS + kv_head * GROUP + line % GROUP
        tl.store(partial + tokens_at[:, None] * D + d[None, :], total, mask=mine[:, None])
        tl.store(partial_max + tokens_at, top, mask=mine)
        tl.store(partial_sum + tokens_at, denominator, mask=mine)


@triton.jit
def _merge(
    positions, partial, partial_max, partial_sum, out,
    Q_HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    token = tl.program_id(1)
    wait_then_release(PDL)
    there = tl.load(positions + token, cache_modifier=FRESH) >= 0
    slot = (token.to(tl.int64) * SPLITS + tl.arange(0, SPLITS)) * Q_HEADS + head
    live = (tl.arange(0, SPLITS) >= 0) & there
    d = tl.arange(0, D)
    top = tl.load(partial_max + slot, mask=live, other=float("-inf"), cache_modifier=FRESH)
    part = tl.load(partial + slot[:, None] * D + d[None, :], mask=live[:, None], other=0.0, cache_modifier=FRESH)
    best = tl.max(top, axis=0)
    share = tl.exp2(top - tl.where(best == float("-inf"), 0.0, best))
    denominator = tl.sum(tl.load(partial_sum + slot, mask=live, other=0.0, cache_modifier=FRESH) * share, axis=0)
    total = tl.sum(part * share[:, None], axis=0)
    total = tl.where(denominator > 0.0, total / denominator, 0.0)
    tl.store(out + (token.to(tl.int64) * Q_HEADS + head) * D + d, total.to(out.dtype.element_ty))


@dataclass(frozen=True)
class DenseShape:
    """What the kernels are specialised for; head counts may be any, their ratio too."""

    q_heads: int
    layout: PageLayout
    rotary_dim: int
    eps: float = 1e-6

    @property
    def projected_width(self) -> int:
        """Columns of the fused q | k | v projection."""
        return (self.q_heads + 2 * self.layout.kv_heads) * self.layout.head_dim


@dataclass(frozen=True)
class DensePlan:
    """Tokens of a query tile (a divisor of TILE_TOKENS), keys of a step, programs along the context."""

    tokens: int
    splits: int
    keys: int = 64
    warps: int = 4
    stages: int = 2

    @staticmethod
    def decode(rows: int, shape: DenseShape) -> DensePlan:
        """A plan for decode steps of `rows` rows on a chip of 132 multiprocessors."""
        splits = triton.cdiv(264, rows * shape.layout.kv_heads)
        return DensePlan(tokens=1, splits=min(64, triton.next_power_of_2(splits)), stages=3)

    @staticmethod
    def many(tokens: int, shape: DenseShape) -> DensePlan:
        """A plan for a bucket of `tokens` tokens."""
        group = triton.next_power_of_2(shape.q_heads // shape.layout.kv_heads)
        tile = max(1, min(TILE_TOKENS, 128 // group))
        programs = triton.cdiv(tokens, tile) * shape.layout.kv_heads
        return DensePlan(tile, splits=min(16, triton.next_power_of_2(triton.cdiv(132, programs))), warps=8, stages=3)


@dataclass(frozen=True)
class DenseScratch:
    """Flat buffers, shared by all layers and every smaller bucket."""

    query: Tensor
    """[T, q_heads, d] of the cache's type."""
    partial: Tensor
    """fp32 [T, splits, q_heads, d], and its maximum and sum without the last dimension."""
    partial_max: Tensor
    partial_sum: Tensor

    @staticmethod
    def allocate(tokens: int, splits: int, shape: DenseShape, like: Tensor) -> DenseScratch:
        """Uninitialised buffers for `tokens` tokens in `splits` splits; any plan whose tokens times splits fit."""
        heads = tokens * splits * shape.q_heads if splits > 1 else 1
        d = shape.layout.head_dim
        return DenseScratch(
            like.new_empty(tokens * shape.q_heads * d),
            *(torch.empty(n, dtype=torch.float32, device=like.device) for n in (heads * d, heads, heads)),
        )


def dense_many_tokens(
    projected: Tensor, step: ManyTokens, norms: tuple[Tensor, Tensor] | None, cache: Tensor, layer: int, out: Tensor,
    shape: DenseShape, plan: DensePlan, scratch: DenseScratch, *, pdl: bool = False,
) -> None:  # fmt: skip
    """Attention of T tokens into `out` [T, q_heads * d], after all their K and V are in their pages. Rows of padding
    are left as they are with one split and are 0 with more.

    projected [T, at least shape.projected_width] is the raw q | k | v projection; norms are the raw Gemma weights [d]
    of query and key, or None.
    """
    tables = (step.page_table, step.page_table.stride(0))
    _dense(projected, step.positions, step.rows, *tables, step.tiles, step.cos, step.sin, norms, cache, layer, out,
           shape, plan, scratch, pdl)  # fmt: skip


def dense_decode(
    projected: Tensor, rows: DecodeRows, norms: tuple[Tensor, Tensor] | None, cache: Tensor, layer: int, out: Tensor,
    shape: DenseShape, plan: DensePlan, scratch: DenseScratch, *, pdl: bool = False,
) -> None:  # fmt: skip
    """The same for one new token a row; padded rows give zeros."""
    tables = (rows.page_table, rows.page_table.stride(0))
    _dense(projected, rows.positions, None, *tables, None, rows.cos, rows.sin, norms, cache, layer, out, shape, plan,
           scratch, pdl)  # fmt: skip


def _dense(
    projected: Tensor, positions: Tensor, rows: Tensor | None, page_table: Tensor, stride: int, tiles: Tensor | None,
    cos: Tensor, sin: Tensor, norms: tuple[Tensor, Tensor] | None, cache: Tensor, layer: int, out: Tensor,
    shape: DenseShape, plan: DensePlan, scratch: DenseScratch, pdl: bool,
) -> None:  # fmt: skip
    tokens = projected.shape[0]
    layout = shape.layout
    kv, d, group = layout.kv_heads, layout.head_dim, shape.q_heads // layout.kv_heads
    lanes = (layout.key_offset(layer), layout.value_offset(layer))
    decode = rows is None
    # Absent arguments still have to be tensors.
    row_arg = positions if rows is None else rows
    tile_arg = positions if tiles is None else tiles
    query_norm, key_norm = norms or (cos, cos)
    more = {"DECODE": decode, "PDL": pdl, **launch_options(pdl)}
    _rotate_and_cache[(tokens, kv)](
        projected, projected.stride(0), positions, row_arg, page_table, stride, cos, sin, query_norm, key_norm,
        scratch.query, cache, layout.page_stride, *lanes, shape.eps,
        Q_HEADS=shape.q_heads, KV_HEADS=kv, GROUP=group, HEADS=triton.next_power_of_2(group), D=d,
        PAGE=layout.page_tokens, HALF=shape.rotary_dim // 2, NORM=norms is not None, num_warps=4, **more,
    )  # fmt: skip
    subtiles = TILE_TOKENS // plan.tokens
    count = tokens if tiles is None else tiles.shape[0] * subtiles
    _attend[(plan.splits, kv, count)](
        scratch.query, positions, row_arg, page_table, stride, tile_arg, cache, layout.page_stride, *lanes,
        scratch.partial, scratch.partial_max, scratch.partial_sum, out, d**-0.5 * _LOG2E,
        Q_HEADS=shape.q_heads, GROUP=group, D=d, PAGE=layout.page_tokens, TOKENS=plan.tokens,
        LINES=max(16, triton.next_power_of_2(plan.tokens * group)), KEYS=plan.keys, SUBTILES=subtiles,
        SPLITS=plan.splits, STAGES=plan.stages, num_warps=plan.warps, **more,
    )  # fmt: skip
    if plan.splits > 1:
        merge = {"PDL": pdl, **launch_options(pdl)}
        _merge[(shape.q_heads, tokens)](
            positions, scratch.partial, scratch.partial_max, scratch.partial_sum, out,
            Q_HEADS=shape.q_heads, D=d, SPLITS=plan.splits, num_warps=2, **merge,
        )  # fmt: skip
