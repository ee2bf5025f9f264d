"""x of the kernel that streams the experts of a few tokens (moe_stream.py): on its way to shared memory, and from
there as an operand of products.

A room holds one part of a turn: of each slice the columns that its words' part meets, in the words' order. For several
tokens it has a row for each; for one token there is one row alone, and what belongs to other groups than a column's own
is masked when it is read.
"""

# Functions under gluon.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Tuples that grow are constants to the compiler, a change of type to mypy.
# mypy: disable-error-code="assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from longturn.kernels.moe_stream_parts import TOKENS, S, W, flat, right_form, row_form, x_form

ONE, SEVERAL, SHARED = (gl.constexpr(kind) for kind in range(3))
"""Kinds of tiles: of an expert of NVFP4 with so many tokens, or of the shared one in MXFP8."""


@gluon.jit
def own_group():
    """For x of one token [S, W, TOKENS]: all bits where a word is of a column's group, none elsewhere."""
    w = gl.arange(0, W, gl.SliceLayout(0, gl.SliceLayout(2, right_form())))
    n = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(1, right_form())))
    own = gl.where(w[None, :, None] // 4 == n[None, None, :], -1, 0).to(gl.int16)
    return own.broadcast_to(S, W, TOKENS)


@gluon.jit
def x_operand(room, number, own, KIND: gl.constexpr):
    """The operand of a part of a turn."""
    if KIND == ONE:
        value = room._reinterpret(gl.float16, [8 * room.shape[0], S, 1, W], flat(3)).index(number)
        value = value.permute((0, 2, 1)).load(right_form()).broadcast_to(S, W, TOKENS)
        return gl.inline_asm_elementwise(
            "and.b32 $0, $1, $2;", "=r,r,r", [value, own], dtype=gl.float16, is_pure=True, pack=2
        )
    else:
        return room.index(number).permute((0, 2, 1)).load(right_form())


@gluon.jit
def lay_out_row(x, row, room, K: gl.constexpr):
    """Copy row `row` of x [*, K] to its room, for KIND ONE."""
    form: gl.constexpr = row_form()
    part = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, form)))[:, None, None]
    s = gl.arange(0, S, gl.SliceLayout(0, gl.SliceLayout(2, form)))[None, :, None]
    w = gl.arange(0, W, gl.SliceLayout(0, gl.SliceLayout(1, form)))[None, None, :]
    column = part * 4 + s // 2 * 256 + w // 8 * 64 + s % 2 * 32 + w % 8 // 4 * 16 + w % 4
    at = x + row.to(gl.int64) * K + gl.max_contiguous(gl.multiple_of(column, [4, 4, 4]), [1, 1, 4])
    values = ()
    for turn in gl.static_range(K // 1024):
        values = values + (gl.load(at + turn * 1024, cache_modifier=".cg"),)  # noqa: RUF005
    gl.thread_barrier()
    to = room._reinterpret(gl.float16, [2 * room.shape[0], 4, S, W], flat(3))
    for turn in gl.static_range(K // 1024):
        to.index(turn).store(values[turn])
    gl.thread_barrier()


@gluon.jit
def lay_out(x, row, ok, room, K: gl.constexpr, PARTS: gl.constexpr):
    """Copy rows `row` [TOKENS] of x [*, K] to their room, zeros where not `ok`."""
    form: gl.constexpr = x_form()
    s = gl.arange(0, S, gl.SliceLayout(1, gl.SliceLayout(2, form)))[:, None, None]
    w = gl.arange(0, W, gl.SliceLayout(0, gl.SliceLayout(1, form)))[None, None, :]
    if PARTS == 2:
        column = s // 2 * 128 + w // 8 * 32 + s % 2 * 8 + w % 8
        column = gl.max_contiguous(gl.multiple_of(column, [8, 8, 8]), [1, 1, 8])
    else:
        column = s // 2 * 256 + w // 8 * 64 + s % 2 * 32 + w % 8 // 4 * 16 + w % 4
        column = gl.max_contiguous(gl.multiple_of(column, [4, 4, 4]), [1, 1, 4])
    there = ok[None, :, None] & (w >= 0) & (s >= 0)
    at = x + row.to(gl.int64)[None, :, None] * K + column
    gl.thread_barrier()
    for begin in gl.static_range(0, K // 256, 12):
        values = ()
        for i in gl.static_range(begin, min(begin + 12, K // 256)):
            to = i // PARTS * (256 * PARTS) + i % PARTS * (16 if PARTS == 2 else 4)
            values = values + (gl.load(at + to, mask=there, other=0.0, cache_modifier=".cg"),)  # noqa: RUF005
        for i in gl.static_range(begin, min(begin + 12, K // 256)):
            room.index(i).store(values[i - begin])
    gl.thread_barrier()
