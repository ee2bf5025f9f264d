"""Router and experts of a layer inside the persistent kernel for one token (see one_token.py)."""

# Functions under gluon.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.runtime.jit import constexpr_function

from longturn.kernels.one_token_linear import hidden_form, staged
from longturn.kernels.one_token_parts import across, flat_shared, group_parts, over_lanes_8, rows_of, short_rows

E_BAR = gl.constexpr(20)
"""Barrier of the shared expert's gate and up; behind it one a chosen expert, then one a chosen expert's down
projection, then the shared one's."""
F_BAR = gl.constexpr(21)
G_BAR = gl.constexpr(25)


@constexpr_function
def short_form():
    """Registers of a group as [16, 512]: two rows a warp."""
    return gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])


@constexpr_function
def logits_form(warps):
    """Registers of 128 logits, all of them in every warp."""
    return gl.SliceLayout(0, gl.BlockedLayout([1, 4], [1, 32], [warps, 1], [1, 0]))


@gluon.jit
def _swiglu(gate, up, ALPHA: gl.constexpr, BETA: gl.constexpr, LIMIT: gl.constexpr):
    """As `moe_choice.swiglu_oai`."""
    gate = gl.minimum(gate, LIMIT)
    up = gl.minimum(gl.maximum(up, -LIMIT), LIMIT)
    return (up + BETA) * gate / (1.0 + gl.exp(-ALPHA * gate))


@gluon.jit
def _add_both(a, b, c, d):
    return a + c, b + d


@gluon.jit
def route(x, weight, router, xs, logits, program, eps):
    """This program's expert's logit, exact, and norm(x) into xs for the products that follow."""
    column = gl.arange(0, 2048, hidden_form())
    value = gl.load(x + column, cache_modifier=".cg").to(gl.float32)
    weighted = value * (gl.load(weight + column).to(gl.float32) + 1.0)
    square, dot = gl.reduce((value * value, weighted * gl.load(router + column)), 0, _add_both)
    scale = gl.rsqrt(square / 2048 + eps)
    gl.store(logits + program, dot * scale)
    xs._reinterpret(gl.bfloat16, [2, 2048], flat_shared(1)).index(0).store((weighted * scale).to(gl.bfloat16))


@gluon.jit
def shared_in(
    ring, bars, xs, sums, hidden, program, parity, ALPHA: gl.constexpr, BETA: gl.constexpr, LIMIT: gl.constexpr
):
    """Four of the shared expert's activations."""
    v = staged(xs, 2)
    mbarrier.wait(bars.index(E_BAR), parity)
    a = group_parts(ring.index(8), v, 2)
    b = group_parts(ring.index(9), v, 2)
    y = over_lanes_8(a, a, a, a, b, b, b, b)
    result = _swiglu(rows_of(sums, y, 0, 4, 2), rows_of(sums, y, 4, 4, 2), ALPHA, BETA, LIMIT)
    form: gl.constexpr = gl.SliceLayout(1, across(2))
    r = gl.arange(0, 4, gl.SliceLayout(1, form))[:, None]
    first = gl.arange(0, 4, gl.SliceLayout(0, form))[None, :] == 0
    gl.store(hidden + 2048 + program * 4 + r + first.to(gl.int32) * 0, result, mask=first & (r >= 0))


@gluon.jit
def dealt_experts():
    """Numbers of the experts as `logits_of_all` takes their biases."""
    return gl.arange(0, 128, gl.BlockedLayout([1], [32], [8], [0]))


@gluon.jit
def logits_of_all(logits, bias, sums):
    """The 128 logits and biases in every warp, read once: lines that every warp of every program asks for keep L2
    busy."""
    value = gl.load(logits + dealt_experts(), cache_modifier=".cg")
    view = sums._reinterpret(gl.float32, [2, 128], flat_shared(1))
    view.index(0).store(value)
    view.index(1).store(bias)
    gl.thread_barrier()
    return view.index(0).load(logits_form(8)), view.index(1).load(logits_form(8))


@gluon.jit
def choose(logits, bias, scaling):
    """The four experts of a token by the rules of `moe_choice.top_of`, and their shares, as scalars, from logits in
    `logits_form`."""
    i = gl.arange(0, 128, logits_form(gl.num_warps()))
    score = 1.0 / (1.0 + gl.exp(-logits))
    choice = score + bias
    choice = gl.where(choice == choice, choice, float("-inf"))
    bits = choice.to(gl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    e_0, s_0, ordered = _best(ordered, score, i)
    e_1, s_1, ordered = _best(ordered, score, i)
    e_2, s_2, ordered = _best(ordered, score, i)
    e_3, s_3, ordered = _best(ordered, score, i)
    by = scaling / (s_0 + s_1 + s_2 + s_3)
    return e_0, e_1, e_2, e_3, s_0 * by, s_1 * by, s_2 * by, s_3 * by


@gluon.jit
def _best(ordered, score, i):
    best = gl.max(ordered, axis=0)
    first = gl.min(gl.where(ordered == best, i, 127), axis=0)
    share = gl.sum(gl.where(i == first, score, 0.0), axis=0)
    return first, share, gl.where(i == first, -0x80000000, ordered)


@gluon.jit
def routed_in(
    ring, bars, xs, sums, hidden, program, parity, ALPHA: gl.constexpr, BETA: gl.constexpr, LIMIT: gl.constexpr
):
    """Four activations of each chosen expert; of expert s group 2 s holds the gate, the next one up."""
    v = staged(xs, 2)
    mbarrier.wait(bars.index(F_BAR), parity)
    a = group_parts(ring.index(0), v, 2)
    e = group_parts(ring.index(1), v, 2)
    mbarrier.wait(bars.index(F_BAR + 1), parity)
    b = group_parts(ring.index(2), v, 2)
    f = group_parts(ring.index(3), v, 2)
    mbarrier.wait(bars.index(F_BAR + 2), parity)
    c = group_parts(ring.index(4), v, 2)
    g = group_parts(ring.index(5), v, 2)
    mbarrier.wait(bars.index(F_BAR + 3), parity)
    d = group_parts(ring.index(6), v, 2)
    h = group_parts(ring.index(7), v, 2)
    y = over_lanes_8(a, b, c, d, e, f, g, h)
    result = _swiglu(rows_of(sums, y, 0, 4, 2), rows_of(sums, y, 4, 4, 2), ALPHA, BETA, LIMIT)
    form: gl.constexpr = gl.SliceLayout(1, across(2))
    r = gl.arange(0, 4, gl.SliceLayout(1, form))[:, None]
    slot = gl.arange(0, 4, gl.SliceLayout(0, form))[None, :]
    gl.store(hidden + slot * 512 + program * 4 + r, result)


@gluon.jit
def down(hidden, x, ring, bars, xs, program, parity, share_0, share_1, share_2, share_3):
    """x += weighted sum of the experts and the shared one, this program's 16 rows."""
    c = gl.arange(0, 2048, hidden_form())
    slot = c // 512
    share = gl.where(slot == 0, share_0, gl.where(slot == 1, share_1, gl.where(slot == 2, share_2, share_3)))
    value = gl.load(hidden + c, cache_modifier=".cg") * share
    more: gl.constexpr = gl.BlockedLayout([2], [32], [8], [0])
    extra = gl.load(hidden + 2048 + gl.arange(0, 512, more), cache_modifier=".cg")
    form: gl.constexpr = short_form()
    to = x + program * 16 + gl.arange(0, 16, gl.SliceLayout(1, form))
    old = gl.load(to, cache_modifier=".cg").to(gl.float32)
    rows = xs._reinterpret(gl.bfloat16, [8, 512], flat_shared(1))
    rows.index(4).store(extra.to(gl.bfloat16))
    xs._reinterpret(gl.bfloat16, [2, 2048], flat_shared(1)).index(0).store(value.to(gl.bfloat16))
    total = gl.full([16, 512], 0.0, gl.float32, form)
    for s in gl.static_range(5):
        # The shared expert's weights came first.
        h = rows.index((s + 4) % 5).load(gl.SliceLayout(0, form)).to(gl.float32)
        mbarrier.wait(bars.index(G_BAR + (s + 4) % 5), parity)
        w = ring.index(8 + (s + 4) % 5)._reinterpret(gl.bfloat16, [16, 512], short_rows()).load(form)
        total += w.to(gl.float32) * h[None, :]
    gl.store(to, (old + gl.sum(total, axis=1)).to(gl.bfloat16))
