"""The kernels of `moe_few_tokens`; what each is for is said in moe_few.py."""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Tuples that grow are constants to the compiler, a change of type to mypy.
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from longturn.kernels.dependent import FRESH, release_then_wait, wait_then_release
from longturn.kernels.moe_choice import swiglu_oai, top_in_warps
from longturn.kernels.small_linear import rows_dot


@triton.jit
def _logits(tile, value, gain, eps, K: tl.constexpr):
    """Rows `tile` [R, K] of the router times the norm of one token, fp32 [R]."""
    wide = value.to(tl.float32)
    y = tl.sum(tile * (wide * gain)[None, :], axis=1)
    return y * tl.rsqrt(tl.sum(wide * wide, axis=0) / K + eps)


@triton.jit
def _router(
    x, norm_weight, weight, logits, tokens, eps,
    EXPERTS: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Logits of four tokens and ROWS experts: where there are many tokens, each of them reading the router's weights
    from L2 would take longer than the products."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(1) * 4
    column = tl.arange(0, K)
    tile = tl.load(weight + row[:, None] * K + column[None, :])
    gain = tl.load(norm_weight + column).to(tl.float32) + 1.0
    last = tokens - 1
    wait_then_release(PDL)
    first = tl.load(x + tl.minimum(token, last).to(tl.int64) * K + column, cache_modifier=FRESH)
    second = tl.load(x + tl.minimum(token + 1, last).to(tl.int64) * K + column, cache_modifier=FRESH)
    third = tl.load(x + tl.minimum(token + 2, last).to(tl.int64) * K + column, cache_modifier=FRESH)
    fourth = tl.load(x + tl.minimum(token + 3, last).to(tl.int64) * K + column, cache_modifier=FRESH)
    to = logits + token * EXPERTS + row
    tl.store(to, _logits(tile, first, gain, eps, K))
    tl.store(to + EXPERTS, _logits(tile, second, gain, eps, K), mask=token + 1 < tokens)
    tl.store(to + 2 * EXPERTS, _logits(tile, third, gain, eps, K), mask=token + 2 < tokens)
    tl.store(to + 3 * EXPERTS, _logits(tile, fourth, gain, eps, K), mask=token + 3 < tokens)


@triton.jit
def _router_wide(
    x, norm_weight, weight, logits, tokens, eps,
    EXPERTS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Logits of TOKENS tokens and one expert, whose weights a program holds for all of them; rows of several BLOCKs."""
    expert = tl.program_id(0)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, BLOCK)
    tiles, gains = (), ()
    for k in tl.static_range(0, K, BLOCK):
        tiles = tiles + (tl.load(weight + expert * K + k + column),)  # noqa: RUF005
        gains = gains + (tl.load(norm_weight + k + column),)  # noqa: RUF005
    wait_then_release(PDL)
    row = x + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * K + column[None, :]
    total = tl.zeros([TOKENS, BLOCK], dtype=tl.float32)
    square = tl.zeros([TOKENS, BLOCK], dtype=tl.float32)
    for k in tl.static_range(0, K, BLOCK):
        value = tl.load(row + k, cache_modifier=FRESH).to(tl.float32)
        square += value * value
        gain = gains[k // BLOCK].to(tl.float32) + 1.0
        total += value * (tiles[k // BLOCK] * gain)[None, :]
    y = tl.sum(total, axis=1) * tl.rsqrt(tl.sum(square, axis=1) / K + eps)
    tl.store(logits + token * EXPERTS + expert, y, mask=token < tokens)


@triton.jit
def _choose(
    logits, bias, positions, x, norm_weight, normed, experts, shares, counters, scaling_factor, eps,
    EXPERTS: tl.constexpr, TOP: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr, WARPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    column = tl.arange(0, BLOCK_K)
    gains, values = (), ()
    for k in tl.static_range(0, K, BLOCK_K):
        gains = gains + (tl.load(norm_weight + k + column),)  # noqa: RUF005
    wait_then_release(PDL)
    square = tl.zeros([BLOCK_K], dtype=tl.float32)
    for k in tl.static_range(0, K, BLOCK_K):
        value = tl.load(x + token.to(tl.int64) * K + k + column, cache_modifier=FRESH)
        wide = value.to(tl.float32)
        square += wide * wide
        values = values + (value,)  # noqa: RUF005
    scale = tl.rsqrt(tl.sum(square, axis=0) / K + eps)
    for k in tl.static_range(0, K, BLOCK_K):
        value = values[k // BLOCK_K].to(tl.float32) * scale * (gains[k // BLOCK_K].to(tl.float32) + 1.0)
        tl.store(normed + token.to(tl.int64) * K + k + column, value.to(normed.dtype.element_ty))
    if TOP > 0:
        expert = top_in_warps(logits + token * EXPERTS, bias, EXPERTS, TOP, WARPS)
        share = tl.sigmoid(tl.load(logits + token * EXPERTS + expert, cache_modifier=FRESH))
        share = share * (scaling_factor / tl.sum(share, axis=0))
        present = tl.load(positions + token) >= 0  # a padded row chooses nothing, so it costs no expert's bytes
        rank = tl.arange(0, TOP)
        tl.store(experts + token * TOP + rank, tl.where(present, expert, -1))
        tl.store(shares + token * TOP + rank, tl.where(present, share, 0.0))
        if token == 0:
            tl.store(counters + tl.arange(0, 4), tl.zeros([4], dtype=tl.int32))


@triton.jit
def _pairs_of(experts, slot, PAIRS: tl.constexpr, SPAN: tl.constexpr):
    """The expert of pair `slot`, whether this pair is its first, its pairs' flags [SPAN], their ranks, and how many."""
    i = tl.arange(0, SPAN)
    all_experts = tl.load(experts + i, mask=i < PAIRS, other=-1, cache_modifier=FRESH)
    expert = tl.load(experts + slot, cache_modifier=FRESH)
    match = all_experts == expert
    leads = (expert >= 0) & (tl.sum((match & (i < slot)).to(tl.int32), axis=0) == 0)
    rank = tl.cumsum(match.to(tl.int32), axis=0) - 1
    return expert, leads, match, rank, tl.sum(match.to(tl.int32), axis=0)


@triton.jit
def _pick(match, rank, want, SPAN: tl.constexpr):
    """Index of the pair with each wanted rank."""
    i = tl.arange(0, SPAN)
    hit = match[None, :] & (rank[None, :] == want[:, None])
    return tl.sum(tl.where(hit, i[None, :], 0), axis=1)


@triton.jit
def _in_tile(
    normed, words, scales, row_scales, expert, hidden, token, to, ok, row, inter,
    K: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr, PARTS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The activations of rows `row`.. of one expert (int64) for one tile of tokens, into rows `to` of `hidden`."""
    if PARTS == 1:
        of = row + tl.arange(0, ROWS)
        column = tl.arange(0, BLOCK_K)
        gate_at = words + (expert * 2 * inter + of)[:, None] * K + column[None, :]
        up_at = gate_at + inter.to(tl.int64) * K
        x_at = normed + token[:, None].to(tl.int64) * K + column[None, :]
        gate = tl.zeros([TILE, ROWS], dtype=tl.float32)
        up = tl.zeros([TILE, ROWS], dtype=tl.float32)
        for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            value = tl.load(x_at + k, mask=ok[:, None], other=0.0)
            gate = tl.dot(value, tl.trans(tl.load(gate_at + k)), gate, input_precision="ieee")
            up = tl.dot(value, tl.trans(tl.load(up_at + k)), up, input_precision="ieee")
        result = swiglu_oai(gate, up, ALPHA, BETA, LIMIT)
        at = to[:, None].to(tl.int64) * inter + of[None, :]
        tl.store(hidden + at, result.to(hidden.dtype.element_ty), mask=ok[:, None])
    else:
        # Gate and up rows are one tile, as high as the tensor cores want it.
        both = tl.arange(0, 2 * ROWS)
        of = expert * 2 * inter + row + both % ROWS + (both // ROWS) * inter
        total = rows_dot(
            words, scales, row_scales, of, both >= 0, normed, token.to(tl.int64), ok, K, BLOCK_K, STAGES, PARTS, ASM
        )
        gate, up = tl.split(tl.permute(tl.reshape(total, [2, ROWS, TILE]), [1, 2, 0]))
        result = swiglu_oai(gate, up, ALPHA, BETA, LIMIT)
        at = to[None, :].to(tl.int64) * inter + (row + tl.arange(0, ROWS))[:, None]
        tl.store(hidden + at, result.to(hidden.dtype.element_ty), mask=ok[None, :])


@triton.jit
def _experts_in(
    normed, experts, words, scales, row_scales, shared_words, shared_scales, shared_row_scales, hidden, tokens, inter,
    PAIRS: tl.constexpr, SPAN: tl.constexpr, TOP: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
    SHARED_BLOCK_K: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr, PDL: tl.constexpr,
    PARTS: tl.constexpr, SHARED_PARTS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS
    slot = tl.program_id(1)
    member = tl.arange(0, TILE)
    wait_then_release(PDL)
    if slot >= PAIRS:
        token = (slot - PAIRS) * TILE + member
        _in_tile(
            normed, shared_words, shared_scales, shared_row_scales, 0, hidden, token, PAIRS + token, token < tokens,
            row, inter, K, SHARED_BLOCK_K, ROWS, TILE, STAGES, ALPHA, BETA, LIMIT, SHARED_PARTS, ASM,
        )  # fmt: skip
    else:
        expert, leads, match, rank, count = _pairs_of(experts, slot, PAIRS, SPAN)
        if leads:
            for start in range(0, count, TILE):
                pair = _pick(match, rank, start + member, SPAN)
                _in_tile(
                    normed, words, scales, row_scales, expert.to(tl.int64), hidden, pair // TOP, pair,
                    start + member < count, row, inter,
                    K, BLOCK_K, ROWS, TILE, STAGES, ALPHA, BETA, LIMIT, PARTS, ASM,
                )  # fmt: skip


@triton.jit
def _down_tile(
    hidden, words, scales, row_scales, expert, out, index, ok, row, width,
    INTER: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr, TILE: tl.constexpr,
    STAGES: tl.constexpr, PARTS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Rows `row` (int64) of one expert's down projection for rows `index` of `hidden`, into the same rows of `out`; and
    the TURNS - 1 tiles of rows behind them."""
    of = expert * width + row
    if PARTS == 1:
        # One loop over all tiles, so that the pipeline runs on where a tile ends: an expert's rows can be short.
        PIECES: tl.constexpr = INTER // BLOCK
        total = tl.zeros([TILE, ROWS], dtype=tl.float32)
        w_at = words + of[:, None] * INTER + tl.arange(0, BLOCK)[None, :]
        h_at = hidden + index[:, None].to(tl.int64) * INTER + tl.arange(0, BLOCK)[None, :]
        to = out + index[:, None].to(tl.int64) * width + row[None, :]
        for step in tl.range(0, TURNS * PIECES, num_stages=STAGES):
            piece, first = step, 0
            if TURNS > 1:
                piece, first = step % PIECES, step // PIECES * ROWS
            value = tl.load(h_at + piece * BLOCK, mask=ok[:, None], other=0.0)
            tile = tl.load(w_at + first * INTER + piece * BLOCK)
            total = tl.dot(value, tl.trans(tile), total, input_precision="ieee")
            if TURNS > 1 and piece == PIECES - 1:
                tl.store(to + first, total, mask=ok[:, None])
                total = tl.zeros([TILE, ROWS], dtype=tl.float32)
        if TURNS == 1:
            tl.store(to, total, mask=ok[:, None])
    else:
        total = rows_dot(
            words, scales, row_scales, of, row >= 0, hidden, index.to(tl.int64), ok, INTER, BLOCK, STAGES, PARTS, ASM
        )
        tl.store(out + index[None, :].to(tl.int64) * width + row[:, None], total, mask=ok[None, :])


@triton.jit
def _experts_down(
    hidden, experts, words, scales, row_scales, shared_words, shared_scales, shared_row_scales, out, tokens, width,
    PAIRS: tl.constexpr, SPAN: tl.constexpr, INTER: tl.constexpr, BLOCK: tl.constexpr,
    SHARED_BLOCK: tl.constexpr, ROWS: tl.constexpr, TURNS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr, PARTS: tl.constexpr, SHARED_PARTS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * (ROWS * TURNS) + tl.arange(0, ROWS)).to(tl.int64)
    slot = tl.program_id(1)
    member = tl.arange(0, TILE)
    if slot >= PAIRS:
        wait_then_release(PDL)
        token = (slot - PAIRS) * TILE + member
        _down_tile(
            hidden, shared_words, shared_scales, shared_row_scales, 0, out, PAIRS + token, token < tokens, row, width,
            INTER, SHARED_BLOCK, ROWS, TURNS, TILE, STAGES, SHARED_PARTS, ASM,
        )  # fmt: skip
    else:
        # The choices are two launches old, complete before this kernel could start.
        expert, leads, match, rank, count = _pairs_of(experts, slot, PAIRS, SPAN)
        wait_then_release(PDL)
        if leads:
            for start in range(0, count, TILE):
                pair = _pick(match, rank, start + member, SPAN)
                _down_tile(
                    hidden, words, scales, row_scales, expert.to(tl.int64), out, pair, start + member < count, row,
                    width, INTER, BLOCK, ROWS, TURNS, TILE, STAGES, PARTS, ASM,
                )  # fmt: skip


@triton.jit
def _combined(
    parts, experts, shares, x, token, column, width, TOP: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Columns of a token's new x, fp32: the old one, the shared expert's part and the weighted routed ones."""
    total = tl.load(parts + (PAIRS + token).to(tl.int64) * width + column, cache_modifier=FRESH)
    for k in tl.static_range(TOP):
        pair = token * TOP + k
        there = tl.load(experts + pair, cache_modifier=FRESH) >= 0
        # Nobody wrote the part of an expert that is not there; a load that waited to know would take twice as long.
        part = tl.load(parts + pair.to(tl.int64) * width + column, cache_modifier=FRESH)
        total += tl.where(there, part * tl.load(shares + pair, cache_modifier=FRESH), 0.0)
    return tl.load(x + token.to(tl.int64) * width + column, cache_modifier=FRESH).to(tl.float32) + total


@triton.jit
def _combine(
    parts, experts, shares, x, width, TOP: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    release_then_wait(PDL)
    value = _combined(parts, experts, shares, x, token, column, width, TOP, PAIRS)
    tl.store(x + token.to(tl.int64) * width + column, value.to(x.dtype.element_ty))


@triton.jit
def _combine_norm(
    parts, experts, shares, x, norm_weight, normed, eps,
    TOP: tl.constexpr, PAIRS: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`_combine`, and the normalisation that the next projection would begin with."""
    token = tl.program_id(0)
    row = token.to(tl.int64) * K
    column = tl.arange(0, BLOCK)
    gains, values = (), ()
    for k in tl.static_range(0, K, BLOCK):
        gains = gains + (tl.load(norm_weight + k + column),)  # noqa: RUF005
    release_then_wait(PDL)
    square = tl.zeros([BLOCK], dtype=tl.float32)
    for k in tl.static_range(0, K, BLOCK):
        value = _combined(parts, experts, shares, x, token, k + column, K, TOP, PAIRS).to(x.dtype.element_ty)
        wide = value.to(tl.float32)
        square += wide * wide
        values = values + (value,)  # noqa: RUF005
    scale = tl.rsqrt(tl.sum(square, axis=0) / K + eps)
    # Stores after all loads: one between them would keep the compiler from asking for the next block's parts.
    for k in tl.static_range(0, K, BLOCK):
        tl.store(x + row + k + column, values[k // BLOCK])
        value = values[k // BLOCK].to(tl.float32) * scale * (gains[k // BLOCK].to(tl.float32) + 1.0)
        tl.store(normed + row + k + column, value.to(normed.dtype.element_ty))
