"""The products of `moe_many_experts.py` for plain weights, whose tiles the card's copy engine brings.

One thread asks for a whole tile of weights by its coordinates, where pointers would take every thread many instructions
and registers. Tokens of the first product are gathered, and still come by pointers; the second one's are in order.
"""

# Functions under triton.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from longturn.kernels.dependent import wait_then_release
from longturn.kernels.moe_choice import swiglu_oai
from longturn.kernels.moe_many_experts import rows_of, tile_of


@triton.jit
def _in_rows(
    normed, w13, hidden, tile, expert, lists, start, size, tokens, first,
    TOP: tl.constexpr, K: tl.constexpr, INTER: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
    ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The tile's first ROWS rows of hidden = the activation of COLUMNS columns of gate and up from `first` on."""
    choice, ok = rows_of(expert, lists, start, size, tokens, ROWS)
    x_at = normed + (choice // TOP)[:, None].to(tl.int64) * K + tl.arange(0, BLOCK_K)[None, :]
    gate = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    up = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    line = expert * (2 * INTER) + first
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        value = tl.load(x_at + k, mask=ok[:, None], other=0.0)
        gate = tl.dot(value, tl.trans(w13.load([line, k])), gate, input_precision="ieee")
        up = tl.dot(value, tl.trans(w13.load([line + INTER, k])), up, input_precision="ieee")
    result = swiglu_oai(gate, up, ALPHA, BETA, LIMIT)
    to = tile.to(tl.int64) * TILE + tl.arange(0, ROWS)
    column = first + tl.arange(0, COLUMNS)
    tl.store(hidden + to[:, None] * INTER + column[None, :], result.to(hidden.dtype.element_ty), mask=ok[:, None])


@triton.jit(do_not_specialize=["tokens"])
def experts_in_copied(
    normed, w13, hidden, lists, counts, tokens,
    EXPERTS: tl.constexpr, TOP: tl.constexpr, K: tl.constexpr, INTER: tl.constexpr, TILE: tl.constexpr,
    LEAST: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, ALPHA: tl.constexpr,
    BETA: tl.constexpr, LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `experts_in` without a shared expert; w13 describes [E * 2 * INTER, K] in tiles [COLUMNS, BLOCK_K]."""
    first = tl.program_id(0) * COLUMNS
    tile = tl.program_id(1)
    wait_then_release(PDL)
    expert, start, size = tile_of(tile, 0, counts, 0, EXPERTS, TILE)
    if expert == EXPERTS:
        return
    if LEAST < TILE and size <= LEAST:
        _in_rows(
            normed, w13, hidden, tile, expert, lists, start, size, tokens, first,
            TOP, K, INTER, TILE, LEAST, COLUMNS, BLOCK_K, STAGES, ALPHA, BETA, LIMIT,
        )  # fmt: skip
    else:
        _in_rows(
            normed, w13, hidden, tile, expert, lists, start, size, tokens, first,
            TOP, K, INTER, TILE, TILE, COLUMNS, BLOCK_K, STAGES, ALPHA, BETA, LIMIT,
        )  # fmt: skip


@triton.jit
def _down_rows(
    hidden, w2, parts, tile, expert, lists, start, size, tokens, first,
    N: tl.constexpr, INTER: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """COLUMNS columns from `first` on of parts, `tokens` lines further on than the choices of the tile's first ROWS
    rows. Rows past `size` hold whatever was there, which no other row's sum reads."""
    choice, ok = rows_of(expert, lists, start, size, tokens, ROWS)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for k in tl.range(0, INTER, BLOCK_K, num_stages=STAGES):
        value, weight = hidden.load([tile * TILE, k]), w2.load([expert * N + first, k])
        total = tl.dot(value, tl.trans(weight), total, input_precision="ieee")
    at = (choice + tokens)[:, None].to(tl.int64) * N + (first + tl.arange(0, COLUMNS))[None, :]
    tl.store(parts + at, total.to(parts.dtype.element_ty), mask=ok[:, None])


@triton.jit(do_not_specialize=["tokens"])
def experts_down_copied(
    hidden, short_hidden, w2, parts, lists, counts, tokens,
    EXPERTS: tl.constexpr, N: tl.constexpr, INTER: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As `experts_down` without a shared expert. `hidden` describes [rows, INTER] in tiles [TILE, BLOCK_K],
    `short_hidden` the same in tiles [LEAST, BLOCK_K], w2 [E * N, INTER] in tiles [COLUMNS, BLOCK_K]."""
    first = tl.program_id(0) * COLUMNS
    tile = tl.program_id(1)
    wait_then_release(PDL)
    expert, start, size = tile_of(tile, 0, counts, 0, EXPERTS, TILE)
    if expert == EXPERTS:
        return
    if LEAST < TILE and size <= LEAST:
        _down_rows(
            short_hidden, w2, parts, tile, expert, lists, start, size, tokens, first,
            N, INTER, TILE, LEAST, COLUMNS, BLOCK_K, STAGES,
        )  # fmt: skip
    else:
        _down_rows(
            hidden, w2, parts, tile, expert, lists, start, size, tokens, first,
            N, INTER, TILE, TILE, COLUMNS, BLOCK_K, STAGES,
        )  # fmt: skip


def described(rows: Tensor, height: int, width: int) -> TensorDescriptor:
    """`rows` [R, C], contiguous, in tiles [height, width] for the copy engine."""
    return TensorDescriptor.from_tensor(rows, [height, width])
