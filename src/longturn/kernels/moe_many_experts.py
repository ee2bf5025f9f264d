"""The products of a mixture of experts for many tokens, over tiles of TILE tokens of one expert.

The first tiles of a launch are the shared expert's, which takes every token; the routed ones follow, expert by expert,
as many as their lists on the device make. Columns are the inner dimension of the grid: the programs that read one
tile's tokens run side by side, and so do those that read one expert's weights for its several tiles.
"""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from longturn.kernels.dependent import FRESH, wait_then_release
from longturn.kernels.moe_one import swiglu_oai


@triton.jit
def tile_of(tile, shared_tiles, counts, tokens, EXPERTS: tl.constexpr, TILE: tl.constexpr):
    """(expert, the tile's first row in its expert's list, rows that are there) of a tile; the expert is -1 for the
    shared one, and EXPERTS where there are fewer tiles. Every program works this out: the reads that it would take to
    look it up are a longer chain."""
    routed = tile - shared_tiles
    count = tl.load(counts + tl.arange(0, EXPERTS), cache_modifier=FRESH)
    tiles = (count + TILE - 1) // TILE
    done = tl.cumsum(tiles, axis=0) <= routed
    # One sum for both: how many experts' tiles come before, and how many tiles those are.
    before = tl.sum(tl.where(done, (tiles.to(tl.int64) << 32) + 1, 0), axis=0)
    expert = before.to(tl.int32)
    size = tl.sum(tl.where(tl.arange(0, EXPERTS) == expert, count, 0), axis=0)
    start = tl.where(routed >= 0, routed - (before >> 32).to(tl.int32), tile) * TILE
    return tl.where(routed >= 0, expert, -1), start, tl.where(routed >= 0, size, tokens) - start


@triton.jit
def rows_of(expert, lists, start, size, tokens, ROWS: tl.constexpr):
    """(choice, or token of the shared expert, of each of the tile's first ROWS rows, whether it is there)."""
    member = start + tl.arange(0, ROWS)
    ok = tl.arange(0, ROWS) < size
    at = lists + expert * tokens + member
    choice = tl.load(at, mask=ok & (expert >= 0), other=0, cache_modifier=FRESH)
    return tl.where(expert >= 0, choice, member), ok


@triton.jit
def in_rows(
    normed, base, hidden, tile, expert, lists, start, size, tokens, column,
    TOP: tl.constexpr, K: tl.constexpr, INTER: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The tile's first ROWS rows of hidden = the activation of columns `column` of gate and up."""
    index, ok = rows_of(expert, lists, start, size, tokens, ROWS)
    token = index
    if TOP > 0:
        token = tl.where(expert >= 0, index // TOP, index)
    to = tile.to(tl.int64) * TILE + tl.arange(0, ROWS)
    k_at = tl.arange(0, BLOCK_K)
    x_at = normed + token[:, None].to(tl.int64) * K + k_at[None, :]
    gate_at = base + column[:, None] * K + k_at[None, :]
    up_at = base + (column + INTER)[:, None] * K + k_at[None, :]
    gate = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    up = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        value = tl.load(x_at + k, mask=ok[:, None], other=0.0)
        gate = tl.dot(value, tl.trans(tl.load(gate_at + k)), gate, input_precision="ieee")
        up = tl.dot(value, tl.trans(tl.load(up_at + k)), up, input_precision="ieee")
    result = swiglu_oai(gate, up, ALPHA, BETA, LIMIT)
    tl.store(hidden + to[:, None] * INTER + column[None, :], result.to(hidden.dtype.element_ty), mask=ok[:, None])


@triton.jit(do_not_specialize=["tokens", "shared_tiles"])
def experts_in(
    normed, w13, shared_w13, hidden, lists, counts, tokens, shared_tiles,
    EXPERTS: tl.constexpr, TOP: tl.constexpr, K: tl.constexpr, INTER: tl.constexpr, TILE: tl.constexpr,
    LEAST: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, ALPHA: tl.constexpr,
    BETA: tl.constexpr, LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """hidden [tiles * TILE, INTER] = the activation of gate and up. The grid is (INTER / COLUMNS, tiles).

    A tile with at most LEAST tokens (LEAST below TILE) is computed as one of LEAST rows: an expert's last tile is half
    empty on average.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tile = tl.program_id(1)
    wait_then_release(PDL)
    expert, start, size = tile_of(tile, shared_tiles, counts, tokens, EXPERTS, TILE)
    if expert == EXPERTS:
        return
    base = shared_w13
    if expert >= 0:
        base = w13 + expert.to(tl.int64) * (2 * INTER * K)
    if LEAST < TILE and size <= LEAST:
        in_rows(
            normed, base, hidden, tile, expert, lists, start, size, tokens, column,
            TOP, K, INTER, TILE, LEAST, COLUMNS, BLOCK_K, STAGES, ALPHA, BETA, LIMIT,
        )  # fmt: skip
    else:
        in_rows(
            normed, base, hidden, tile, expert, lists, start, size, tokens, column,
            TOP, K, INTER, TILE, TILE, COLUMNS, BLOCK_K, STAGES, ALPHA, BETA, LIMIT,
        )  # fmt: skip


@triton.jit
def down_rows(
    hidden, base, parts, tile, expert, lists, start, size, tokens, before, column,
    N: tl.constexpr, INTER: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Columns `column` of parts, `before` lines further on than the choices of the tile's first ROWS rows, once the
    kernel before is done if PDL."""
    index, ok = rows_of(expert, lists, start, size, tokens, ROWS)
    line = index + before
    wait_then_release(PDL)
    row = tile.to(tl.int64) * TILE + tl.arange(0, ROWS)
    k_at = tl.arange(0, BLOCK_K)
    h_at = hidden + row[:, None] * INTER + k_at[None, :]
    w_at = base + column[:, None] * INTER + k_at[None, :]
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for k in tl.range(0, INTER, BLOCK_K, num_stages=STAGES):
        value = tl.load(h_at + k, mask=ok[:, None], other=0.0)
        total = tl.dot(value, tl.trans(tl.load(w_at + k)), total, input_precision="ieee")
    at = line[:, None].to(tl.int64) * N + column[None, :]
    tl.store(parts + at, total.to(parts.dtype.element_ty), mask=ok[:, None])


@triton.jit(do_not_specialize=["tokens", "shared_tiles"])
def experts_down(
    hidden, w2, shared_w2, parts, lists, counts, tokens, shared_tiles,
    EXPERTS: tl.constexpr, N: tl.constexpr, INTER: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """parts [T + T * choices, N]: the shared expert's output of each token, then each choice's.

    The grid is (N / COLUMNS, tiles).
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    tile = tl.program_id(1)
    # The lists are older than the kernel before.
    expert, start, size = tile_of(tile, shared_tiles, counts, tokens, EXPERTS, TILE)
    if expert == EXPERTS:
        wait_then_release(PDL)
        return
    base = shared_w2
    before = 0
    if expert >= 0:
        base = w2 + expert.to(tl.int64) * (N * INTER)
        before = tokens
    if LEAST < TILE and size <= LEAST:
        down_rows(
            hidden, base, parts, tile, expert, lists, start, size, tokens, before, column,
            N, INTER, TILE, LEAST, COLUMNS, BLOCK_K, STAGES, PDL,
        )  # fmt: skip
    else:
        down_rows(
            hidden, base, parts, tile, expert, lists, start, size, tokens, before, column,
            N, INTER, TILE, TILE, COLUMNS, BLOCK_K, STAGES, PDL,
        )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def combine_experts(
    parts, experts, shares, x, next_norm, normed, tokens, eps,
    TOP: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x += shared + weighted routed parts, in a fixed order; and with NORM normed = norm(x) for the next layer, its
    statistics those of x as rounded. The grid is (T, N / BLOCK), with NORM (T)."""
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = token.to(tl.int64) * N
    # All but the parts is older than the kernel before.
    before = tl.load(x + row + column, cache_modifier=FRESH).to(tl.float32)
    wait_then_release(PDL)
    square = tl.zeros([BLOCK], dtype=tl.float32)
    BLOCKS: tl.constexpr = N // BLOCK if NORM else 1
    for i in tl.static_range(BLOCKS):
        at = row + i * BLOCK + column
        if i > 0:
            before = tl.load(x + at, cache_modifier=FRESH).to(tl.float32)
        total = before + tl.load(parts + at, cache_modifier=FRESH).to(tl.float32)
        for k in tl.static_range(TOP):
            choice = token * TOP + k
            there = tl.load(experts + choice, cache_modifier=FRESH) >= 0
            part_at = parts + (tokens + choice).to(tl.int64) * N + i * BLOCK + column
            part = tl.load(part_at, mask=there & (column >= 0), other=0.0, cache_modifier=FRESH).to(tl.float32)
            total += part * tl.load(shares + choice, cache_modifier=FRESH)
        rounded = total.to(x.dtype.element_ty)
        tl.store(x + at, rounded)
        if NORM:
            wide = rounded.to(tl.float32)
            square += wide * wide
    if NORM:
        scale = tl.rsqrt(tl.sum(square, axis=0) / N + eps)
        for i in tl.static_range(BLOCKS):
            at = i * BLOCK + column
            if BLOCKS > 1:
                wide = tl.load(x + row + at, cache_modifier=FRESH).to(tl.float32)
            result = wide * scale * (tl.load(next_norm + at).to(tl.float32) + 1.0)
            tl.store(normed + row + at, result.to(normed.dtype.element_ty))
