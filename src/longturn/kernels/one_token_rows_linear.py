"""The two projections of a layer inside the persistent kernel for several rows (see one_token_rows.py)."""

# Functions under gluon.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from longturn.kernels.one_token_rows_parts import (
    SIDE,
    SLOTS,
    X_AT,
    operand,
    release,
    rows_form,
    slices_of_tokens,
    sum_rows,
    taken,
    times_rows,
    tokens_form,
    zeros,
)

SIDE_BAR = gl.constexpr(2 * SLOTS.value)
"""Barriers of the projection's last two units, which lie in the side's shared memory; behind them the one that says
that they have been read."""
FREE_PROJECTION = gl.constexpr(2 * SLOTS.value + 2)


@gluon.jit
def project_rows(
    x, weight, ring, side, bars, sums, out, program, number, parity, eps, R: gl.constexpr, ROWS: gl.constexpr,
    WIDTH: gl.constexpr,
):  # fmt: skip
    """This program's ROWS rows of norm(x) times the projection, fp32, of R tokens: 16 rows in two units, from unit
    `number` on, 16 more in two, and in two of the side's the last 16, of which some are computed twice."""
    form: gl.constexpr = tokens_form()
    t = gl.arange(0, 4, gl.SliceLayout(1, form))
    c = gl.arange(0, 2048, gl.SliceLayout(0, form))
    ok = (t < R)[:, None] & (c >= 0)[None, :]
    value = gl.load(x + t[:, None] * 2048 + c[None, :], mask=ok, other=0.0, cache_modifier=".cg").to(gl.float32)
    staged = side._reinterpret(gl.bfloat16, [SIDE, 4, 2048], slices_of_tokens(4)).index(X_AT)
    staged.store((value * (weight + 1.0)[None, :]).to(gl.bfloat16))
    scale = gl.rsqrt(gl.sum(value * value, axis=1) / 2048 + eps)
    scale = gl.convert_layout(scale, gl.SliceLayout(0, rows_form()))[None, :]
    gl.thread_barrier()
    x_0 = operand(side, 2 * X_AT)
    x_1 = operand(side, 2 * X_AT + 1)
    m = gl.arange(0, 16, gl.SliceLayout(1, rows_form()))[:, None]
    token = gl.arange(0, 4, gl.SliceLayout(0, rows_form()))[None, :]
    for part in gl.static_range(3):
        if part < 2:
            even, odd = times_rows(ring, taken(bars, number + 2 * part), x_0, zeros(), zeros())
            even, odd = times_rows(ring, taken(bars, number + 2 * part + 1), x_1, even, odd)
        else:
            mbarrier.wait(bars.index(SIDE_BAR), parity)
            even, odd = times_rows(side, 0, x_0, zeros(), zeros())
            mbarrier.wait(bars.index(SIDE_BAR + 1), parity)
            even, odd = times_rows(side, 2, x_1, even, odd)
        y = sum_rows(sums, part % 2, even, odd) * scale
        if part < 2:
            release(bars, number + 2 * part)
            release(bars, number + 2 * part + 1)
        else:
            mbarrier.arrive(bars.index(FREE_PROJECTION))
        row = program * ROWS + min(16 * part, ROWS - 16) + m
        gl.store(out + token * WIDTH + row, y, mask=(token < R) & (m >= 0))


@gluon.jit
def project_out_rows(attention, x, ring, side, bars, sums, program, number, R: gl.constexpr):
    """x += output projection of the attention, this program's 16 rows of R tokens."""
    form: gl.constexpr = tokens_form()
    t = gl.arange(0, 4, gl.SliceLayout(1, form))
    c = gl.arange(0, 4096, gl.SliceLayout(0, form))
    ok = (t < R)[:, None] & (c >= 0)[None, :]
    value = gl.load(attention + t[:, None] * 4096 + c[None, :], mask=ok, other=0.0, cache_modifier=".cg")
    m = gl.arange(0, 16, gl.SliceLayout(1, rows_form()))[:, None]
    token = gl.arange(0, 4, gl.SliceLayout(0, rows_form()))[None, :]
    to = x + token * 2048 + program * 16 + m
    mine = (token < R) & (m >= 0)
    old = gl.load(to, mask=mine, other=0.0, cache_modifier=".cg").to(gl.float32)
    side._reinterpret(gl.bfloat16, [2, 4, 4096], slices_of_tokens(8)).index(0).store(value)
    gl.thread_barrier()
    even = zeros()
    odd = zeros()
    for pair in gl.static_range(4):
        even, odd = times_rows(ring, taken(bars, number + pair), operand(side, pair), even, odd)
        if pair == 1:
            fence_async_shared()
            release(bars, number)
            release(bars, number + 1)
    y = sum_rows(sums, 0, even, odd)
    release(bars, number + 2)
    release(bars, number + 3)
    gl.store(to, (old + y).to(gl.bfloat16), mask=mine)
