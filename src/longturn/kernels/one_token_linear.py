"""The two projections of a layer inside the persistent kernel for one token (see one_token.py)."""

# Functions under gluon.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.runtime.jit import constexpr_function

from longturn.kernels.one_token_parts import (
    across,
    flat_shared,
    group_parts,
    over_lanes_8,
    over_lanes_16,
    rows_of,
    warp_segments,
)

A_GROUPS = gl.constexpr(12)
D_GROUPS = gl.constexpr(8)
D_BAR = gl.constexpr(12)
"""First barrier of the output projection's groups; the projection's are 0 to 11."""


@constexpr_function
def hidden_form():
    """Registers of the hidden state [2048]: 8 numbers a thread, once in the program."""
    return gl.BlockedLayout([8], [32], [8], [0])


@gluon.jit
def staged(xs, S: gl.constexpr):
    """The numbers in xs (bf16 [4, 1024]) as `group_parts` takes them: fp32 [S, 1024]."""
    return xs.slice(0, S, 0).load(gl.SliceLayout(0, warp_segments(S))).to(gl.float32)


@gluon.jit
def _arrived(ring, bars, pieces, parity, group: gl.constexpr, bar: gl.constexpr, S: gl.constexpr):
    mbarrier.wait(bars.index(bar), parity)
    return group_parts(ring.index(group), pieces, S)


@gluon.jit
def project(x, weight, ring, bars, xs, sums, out, program, parity, eps, ROWS: gl.constexpr):
    """This program's ROWS rows of norm(x) times the projection, fp32. Group g holds rows 4 g.., the last group the last
    four."""
    value = gl.load(x + gl.arange(0, 2048, hidden_form()), cache_modifier=".cg").to(gl.float32)
    normed = (value * (weight + 1.0)).to(gl.bfloat16)
    xs._reinterpret(gl.bfloat16, [2, 2048], flat_shared(1)).index(0).store(normed)
    scale = gl.rsqrt(gl.sum(value * value, axis=0) / 2048 + eps)
    v = staged(xs, 2)
    a = _arrived(ring, bars, v, parity, 0, 0, 2)
    b = _arrived(ring, bars, v, parity, 1, 1, 2)
    c = _arrived(ring, bars, v, parity, 2, 2, 2)
    d = _arrived(ring, bars, v, parity, 3, 3, 2)
    e = _arrived(ring, bars, v, parity, 4, 4, 2)
    f = _arrived(ring, bars, v, parity, 5, 5, 2)
    g = _arrived(ring, bars, v, parity, 6, 6, 2)
    h = _arrived(ring, bars, v, parity, 7, 7, 2)
    i = _arrived(ring, bars, v, parity, 8, 8, 2)
    j = _arrived(ring, bars, v, parity, 9, 9, 2)
    k = _arrived(ring, bars, v, parity, 10, 10, 2)
    m = _arrived(ring, bars, v, parity, 11, 11, 2)
    y = rows_of(sums, over_lanes_16(a, b, c, d, e, f, g, h, i, j, k, m, m, m, m, m), 0, 16, 2)
    form: gl.constexpr = gl.SliceLayout(1, across(2))
    r = gl.arange(0, 4, gl.SliceLayout(1, form))[:, None]
    group = gl.arange(0, 16, gl.SliceLayout(0, form))[None, :]
    row = gl.where(group < A_GROUPS - 1, 4 * group, ROWS - 4) + r
    gl.store(out + program * ROWS + row, y * scale, mask=(group < A_GROUPS) & (r >= 0))


@gluon.jit
def project_out(attention, x, ring, bars, xs, sums, program, parity):
    """x += output projection of the attention, this program's 16 rows, two a group."""
    column = gl.arange(0, 4096, hidden_form())
    xs._reinterpret(gl.bfloat16, [4096], flat_shared(1)).store(gl.load(attention + column, cache_modifier=".cg"))
    form: gl.constexpr = gl.SliceLayout(1, across(4))
    r = gl.arange(0, 2, gl.SliceLayout(1, form))[:, None]
    group = gl.arange(0, 8, gl.SliceLayout(0, form))[None, :]
    to = x + program * 16 + group * 2 + r
    old = gl.load(to, cache_modifier=".cg").to(gl.float32)
    v = staged(xs, 4)
    a = _arrived(ring, bars, v, parity, 0, D_BAR, 4)
    b = _arrived(ring, bars, v, parity, 1, D_BAR + 1, 4)
    c = _arrived(ring, bars, v, parity, 2, D_BAR + 2, 4)
    d = _arrived(ring, bars, v, parity, 3, D_BAR + 3, 4)
    e = _arrived(ring, bars, v, parity, 4, D_BAR + 4, 4)
    f = _arrived(ring, bars, v, parity, 5, D_BAR + 5, 4)
    g = _arrived(ring, bars, v, parity, 6, D_BAR + 6, 4)
    h = _arrived(ring, bars, v, parity, 7, D_BAR + 7, 4)
    y = rows_of(sums, over_lanes_8(a, b, c, d, e, f, g, h), 0, 8, 4)
    gl.store(to, (old + y).to(gl.bfloat16))
