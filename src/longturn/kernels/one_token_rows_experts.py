"""Router and experts of a layer inside the persistent kernel for several rows (see one_token_rows.py).

All tokens are multiplied by all experts that any of them chose, which costs the tensor cores nothing; a token's share
of an expert that it did not choose is 0, and its activations there become 0.
"""

# Functions under gluon.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mma_v2
from triton.runtime.jit import constexpr_function

from longturn.kernels.one_token_experts import _add_both, _swiglu
from longturn.kernels.one_token_parts import flat_shared
from longturn.kernels.one_token_rows_parts import (
    SIDE,
    SLOTS,
    X_AT,
    operand,
    pairs_form,
    release,
    rows_form,
    rows_tile,
    slices_in_rows,
    slices_of_tokens,
    sum_pairs,
    sum_rows,
    taken,
    times_pairs,
    times_rows,
    tokens_form,
    zeros,
)

_SLOT = gl.constexpr(4 * 512)
"""Activations of one expert, of four tokens."""
_CHOSEN_AT = gl.constexpr(5)
"""Which 512 bytes of `sums` say which experts are chosen: `sum_pairs` leaves them alone."""
CHOSEN = gl.constexpr(2 * SLOTS.value + 8)
"""Barrier that says so."""


@constexpr_function
def _tokens_experts():
    """Registers of a number for each of 4 tokens and 128 experts: a token a warp."""
    return gl.BlockedLayout([1, 4], [1, 32], [4, 2], [1, 0])


@constexpr_function
def _experts_form(warps):
    """Registers of a number for each of 128 experts, all of them in every warp."""
    return gl.SliceLayout(0, gl.BlockedLayout([1, 4], [1, 32], [warps, 1], [1, 0]))


@gluon.jit
def route_rows(x, weight, router, side, logits, program, eps, R: gl.constexpr):
    """This program's expert's logits, exact, and norm(x) in the side's shared memory for the products that follow.
    weight and router: fp32 [2048]."""
    form: gl.constexpr = tokens_form()
    t = gl.arange(0, 4, gl.SliceLayout(1, form))
    c = gl.arange(0, 2048, gl.SliceLayout(0, form))
    ok = (t < R)[:, None] & (c >= 0)[None, :]
    value = gl.load(x + t[:, None] * 2048 + c[None, :], mask=ok, other=0.0, cache_modifier=".cg").to(gl.float32)
    weighted = value * (weight + 1.0)[None, :]
    square, dot = gl.reduce((value * value, weighted * router[None, :]), 1, _add_both)
    scale = gl.rsqrt(square / 2048 + eps)
    gl.store(logits + t * 128 + program, dot * scale, mask=t < R)
    staged = side._reinterpret(gl.bfloat16, [SIDE, 4, 2048], slices_of_tokens(4)).index(X_AT)
    staged.store((weighted * scale[:, None]).to(gl.bfloat16))


@gluon.jit
def present_rows(positions, R: gl.constexpr):
    """Which of 4 rows there are, as `choose_rows` takes it."""
    t = gl.arange(0, 4, gl.SliceLayout(1, _tokens_experts()))
    return gl.load(positions + t, mask=t < R, other=-1, cache_modifier=".cg") >= 0


@gluon.jit
def choose_rows(logits, biases, present, scaling, sums, side, R: gl.constexpr):
    """By the rules of `moe_choice.top_of`: each token's shares, 0 where it did not choose, into the side's shared
    memory (where norm(x) was, which all warps hold by now), and for each expert whether any token chose it into `sums`,
    for `chosen_by_any`. biases [128] in shared memory; rows that are not `present` choose nothing."""
    form: gl.constexpr = _tokens_experts()
    i = gl.arange(0, 128, gl.SliceLayout(0, form))[None, :]
    t = gl.arange(0, 4, gl.SliceLayout(1, form))
    ok = (t < R)[:, None] & (i >= 0)
    score = gl.load(logits + t[:, None] * 128 + i, mask=ok, other=0.0, cache_modifier=".cg")
    score = 1.0 / (1.0 + gl.exp(-score))
    choice = score + biases.load(gl.SliceLayout(0, form))[None, :]
    choice = gl.where(choice == choice, choice, float("-inf"))
    bits = choice.to(gl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    chosen = gl.full([4, 128], 0, gl.int32, form)
    for _ in gl.static_range(4):
        best = gl.max(ordered, axis=1)[:, None]
        hit = i == gl.min(gl.where(ordered == best, i, 127), axis=1)[:, None]
        chosen = gl.where(hit & present[:, None], 1, chosen)
        ordered = gl.where(hit, -0x80000000, ordered)
    share = gl.where(chosen > 0, score, 0.0)
    share = gl.where(chosen > 0, share * (scaling / gl.sum(share, axis=1))[:, None], 0.0)
    side._reinterpret(gl.float32, [SIDE * 8, 128, 4], flat_shared(2)).index(X_AT * 8).permute((1, 0)).store(share)
    sums._reinterpret(gl.int32, [16, 128], flat_shared(1)).index(_CHOSEN_AT).store(gl.max(chosen, axis=0))


@gluon.jit
def chosen_by_any(sums):
    """What `choose_rows` found, int32 [128], in every warp."""
    return sums._reinterpret(gl.int32, [16, 128], flat_shared(1)).index(_CHOSEN_AT).load(_experts_form(gl.num_warps()))


@gluon.jit
def following(any_chose, last):
    """The first expert after `last` that any token chose; 128 if there is none."""
    i = gl.arange(0, 128, _experts_form(gl.num_warps()))
    return gl.min(gl.where((any_chose > 0) & (i > last), i, 128), axis=0)


@gluon.jit
def _keep(hidden, h, slot, program):
    form: gl.constexpr = pairs_form()
    r = gl.arange(0, 4, gl.SliceLayout(1, form))[:, None]
    t = gl.arange(0, 4, gl.SliceLayout(0, form))[None, :]
    gl.store(hidden + slot * _SLOT + t * 512 + program * 4 + r, h.to(gl.bfloat16))


@gluon.jit
def shared_in_rows(
    ring, bars, x_0, x_1, sums, hidden, program, number,
    ALPHA: gl.constexpr, BETA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """Four of the shared expert's activations of each token, in slot 0."""
    gate, up = sum_pairs(sums, 0, times_pairs(ring, bars, number, x_0, x_1))
    release(bars, number)
    _keep(hidden, _swiglu(gate, up, ALPHA, BETA, LIMIT), 0, program)


@gluon.jit
def routed_in_rows(
    ring, bars, x_0, x_1, sums, side, any_chose, hidden, program, number,
    ALPHA: gl.constexpr, BETA: gl.constexpr, LIMIT: gl.constexpr,
):  # fmt: skip
    """Four activations of each chosen expert and token, times the token's share (`choose_rows`), in slots from 1 on;
    how many slots are filled."""
    count = 1
    expert = following(any_chose, -1)
    while expert < 128:
        gate, up = sum_pairs(sums, count & 1, times_pairs(ring, bars, number, x_0, x_1))
        release(bars, number)
        share = side._reinterpret(gl.float32, [SIDE * 1024, 4], flat_shared(1)).index(X_AT * 1024 + expert)
        share = share.load(gl.SliceLayout(0, pairs_form()))[None, :]
        h = gl.where(share != 0.0, _swiglu(gate, up, ALPHA, BETA, LIMIT) * share, 0.0)
        _keep(hidden, h, count, program)
        number += 1
        count += 1
        expert = following(any_chose, expert)
    return count


@gluon.jit
def down_rows(hidden, x, ring, side, bars, sums, program, number, count, R: gl.constexpr):
    """x += sum of the experts in `count` slots, this program's 16 rows of R tokens."""
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    r = gl.arange(0, 16, gl.SliceLayout(1, copied))
    c = gl.arange(0, 512, gl.SliceLayout(0, copied))
    view = side._reinterpret(gl.bfloat16, [SIDE, 16, 512], slices_in_rows())
    for piece in gl.static_range(SIDE):
        if piece * 4 < count:
            row = piece * 16 + r
            ok = (row < count * 4)[:, None] & (c >= 0)[None, :]
            at = hidden + row[:, None] * 512 + c[None, :]
            async_copy.async_copy_global_to_shared(view.index(piece), at, mask=ok, cache_modifier=".cg")
    async_copy.commit_group()
    m = gl.arange(0, 16, gl.SliceLayout(1, rows_form()))[:, None]
    token = gl.arange(0, 4, gl.SliceLayout(0, rows_form()))[None, :]
    to = x + token * 2048 + program * 16 + m
    mine = (token < R) & (m >= 0)
    old = gl.load(to, mask=mine, other=0.0, cache_modifier=".cg").to(gl.float32)
    async_copy.wait_group(0)
    gl.thread_barrier()
    even = zeros()
    odd = zeros()
    for pair in range(count // 2):
        even, odd = times_rows(ring, taken(bars, number), operand(side, pair), even, odd)
        fence_async_shared()
        release(bars, number)
        number += 1
    if count % 2 == 1:
        # What lies in place of a second slot reaches columns of `even` that nobody reads.
        even = mma_v2(rows_tile(ring, taken(bars, number)), operand(side, count // 2), even)
        fence_async_shared()
        release(bars, number)
    y = sum_rows(sums, 0, even, odd)
    gl.store(to, (old + y).to(gl.bfloat16), mask=mine)
