"""The products of a mixture of experts for many tokens on quantised weights, which are decoded in registers.

Tiles are those of `moe_many_experts.py`, but weights are the M side of the products and tokens the N side: codes pass
through registers on their way into the tensor cores anyway. Each tile of tokens decodes its expert's weights again, so
this pays while an expert has few tiles; with many, unpacking the layer once and reading plain weights costs less
(`reads_packed` in `moe_many.py`).
"""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from longturn.kernels.dependent import wait_then_release
from longturn.kernels.moe_many_experts import down_rows, in_rows, rows_of, tile_of
from longturn.kernels.moe_one import swiglu_oai
from longturn.kernels.small_linear import rows_dot


@triton.jit
def _in_packed(
    normed, words, scales, row_scales, matrix, hidden, tile, expert, lists, start, size, tokens, first,
    TOP: tl.constexpr, K: tl.constexpr, INTER: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr,
    PARTS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The tile's rows of hidden, columns `first` to `first` + COLUMNS - 1, with the weights of `matrix` (int64)."""
    if PARTS == 1:
        in_rows(
            normed, words + matrix * (2 * INTER * K), hidden, tile, expert, lists, start, size, tokens,
            first + tl.arange(0, COLUMNS), TOP, K, INTER, TILE, TILE, COLUMNS, BLOCK_K, STAGES, ALPHA, BETA, LIMIT,
        )  # fmt: skip
    else:
        index, ok = rows_of(expert, lists, start, size, tokens, TILE)
        token = index
        if TOP > 0:
            token = tl.where(expert >= 0, index // TOP, index)
        # Gate and up rows are one tile, as high as the tensor cores want it.
        both = tl.arange(0, 2 * COLUMNS)
        of = matrix * (2 * INTER) + first + both % COLUMNS + (both // COLUMNS) * INTER
        total = rows_dot(
            words, scales, row_scales, of, both >= 0, normed, token.to(tl.int64), ok, K, BLOCK_K, STAGES, PARTS, ASM
        )
        gate, up = tl.split(tl.permute(tl.reshape(total, [2, COLUMNS, TILE]), [1, 2, 0]))
        result = swiglu_oai(gate, up, ALPHA, BETA, LIMIT)
        to = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
        at = to[None, :] * INTER + (first + tl.arange(0, COLUMNS))[:, None]
        tl.store(hidden + at, result.to(hidden.dtype.element_ty), mask=ok[None, :])


@triton.jit(do_not_specialize=["tokens", "shared_tiles"])
def experts_in_packed(
    normed, words, scales, row_scales, shared_words, shared_scales, shared_row_scales, hidden,
    lists, counts, tokens, shared_tiles,
    EXPERTS: tl.constexpr, TOP: tl.constexpr, K: tl.constexpr, INTER: tl.constexpr, TILE: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, SHARED_BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr,
    PARTS: tl.constexpr, SHARED_PARTS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `experts_in`, with weights in the layout of `packed_weights`."""
    first = tl.program_id(0) * COLUMNS
    tile = tl.program_id(1)
    wait_then_release(PDL)
    expert, start, size = tile_of(tile, shared_tiles, counts, tokens, EXPERTS, TILE)
    if expert == EXPERTS:
        return
    if expert >= 0:
        _in_packed(
            normed, words, scales, row_scales, expert.to(tl.int64), hidden, tile, expert, lists, start,
            size, tokens, first, TOP, K, INTER, TILE, COLUMNS, BLOCK_K, STAGES, ALPHA, BETA, LIMIT, PARTS, ASM,
        )  # fmt: skip
    else:
        _in_packed(
            normed, shared_words, shared_scales, shared_row_scales, expert.to(tl.int64) * 0, hidden, tile,
            expert, lists, start, size, tokens, first,
            TOP, K, INTER, TILE, COLUMNS, SHARED_BLOCK_K, STAGES, ALPHA, BETA, LIMIT, SHARED_PARTS, ASM,
        )  # fmt: skip


@triton.jit
def _down_packed(
    hidden, words, scales, row_scales, matrix, parts, tile, expert, lists, start, size, tokens, before, first,
    N: tl.constexpr, INTER: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, PARTS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """COLUMNS columns from `first` on of the parts of the tile's rows, with the weights of `matrix` (int64)."""
    column = first + tl.arange(0, COLUMNS)
    if PARTS == 1:
        down_rows(
            hidden, words + matrix * (N * INTER), parts, tile, expert, lists, start, size, tokens, before,
            column, N, INTER, TILE, TILE, COLUMNS, BLOCK_K, STAGES, False,
        )  # fmt: skip
    else:
        index, ok = rows_of(expert, lists, start, size, tokens, TILE)
        row = tile.to(tl.int64) * TILE + tl.arange(0, TILE)
        total = rows_dot(
            words, scales, row_scales, matrix * N + column, column >= 0, hidden, row, ok,
            INTER, BLOCK_K, STAGES, PARTS, ASM,
        )  # fmt: skip
        at = (index + before)[None, :].to(tl.int64) * N + column[:, None]
        tl.store(parts + at, total.to(parts.dtype.element_ty), mask=ok[None, :])


@triton.jit(do_not_specialize=["tokens", "shared_tiles"])
def experts_down_packed(
    hidden, words, scales, row_scales, shared_words, shared_scales, shared_row_scales, parts,
    lists, counts, tokens, shared_tiles,
    EXPERTS: tl.constexpr, N: tl.constexpr, INTER: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr, SHARED_BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PARTS: tl.constexpr,
    SHARED_PARTS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `experts_down`, with weights in the layout of `packed_weights`."""
    first = tl.program_id(0) * COLUMNS
    tile = tl.program_id(1)
    wait_then_release(PDL)
    expert, start, size = tile_of(tile, shared_tiles, counts, tokens, EXPERTS, TILE)
    if expert == EXPERTS:
        return
    if expert >= 0:
        _down_packed(
            hidden, words, scales, row_scales, expert.to(tl.int64), parts, tile, expert, lists, start,
            size, tokens, tokens, first, N, INTER, TILE, COLUMNS, BLOCK_K, STAGES, PARTS, ASM,
        )  # fmt: skip
    else:
        _down_packed(
            hidden, shared_words, shared_scales, shared_row_scales, expert.to(tl.int64) * 0, parts, tile, expert,
            lists, start, size, tokens, tokens * 0, first,
            N, INTER, TILE, COLUMNS, SHARED_BLOCK_K, STAGES, SHARED_PARTS, ASM,
        )  # fmt: skip
