"""The warp of the persistent kernel that fetches weights and index keys (see one_token.py).

The copy engine takes a request only when it has room, so that asking costs as long as the bytes take: a warp that
computes must not wait for that. This one goes through all groups of all layers in the order of their use, and waits
where a group's last contents are still being read. FREE_* are the barriers by which the other warps say so, once a
layer each (index keys: once a block).
"""

# Functions under gluon.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from longturn.kernels.one_token_attention import KEYS_BAR, keys_tile
from longturn.kernels.one_token_experts import E_BAR, F_BAR, G_BAR, choose, logits_form
from longturn.kernels.one_token_linear import A_GROUPS, D_BAR, D_GROUPS
from longturn.kernels.one_token_parts import GROUP_BYTES, PROGRAMS, fetch, wait_alone

_PROGRAMS = gl.constexpr(PROGRAMS)
_PAIR_BYTES = gl.constexpr(2 * GROUP_BYTES)
FREE_PROJECTION, FREE_KEYS, FREE_SHARED, FREE_ROUTED, FREE_DOWN = (gl.constexpr(n) for n in (32, 33, 35, 36, 37))
"""FREE_KEYS: two, one a buffer."""
BARS = 38


@gluon.jit
def _pair(lines, line, ring, first: gl.constexpr, bar):
    """Four rows of an expert's gate and of its up."""
    mbarrier.expect(bar, _PAIR_BYTES)
    tma.async_copy_global_to_shared(lines, [line, 0], bar, ring.index(first))
    tma.async_copy_global_to_shared(lines, [line + 512 * 32, 0], bar, ring.index(first + 1))


@gluon.jit
def _keys(keys, row, ring, bars, buffer):
    bar = bars.index(KEYS_BAR + buffer)
    mbarrier.expect(bar, _PAIR_BYTES)
    tma.async_copy_global_to_shared(keys, [row, 0], bar, keys_tile(ring, buffer, 0))
    tma.async_copy_global_to_shared(keys, [row + 64, 0], bar, keys_tile(ring, buffer, 1))


@gluon.jit
def fetch_all(
    lines, keys, table, biases, page_table, logits, counter, ring, bars, first, last, own, page_stride,
    KV: gl.constexpr, ROWS: gl.constexpr, BARRIERS: gl.constexpr, BEFORE_ROUTED: gl.constexpr,
    OUT_AHEAD: gl.constexpr, IN_AHEAD: gl.constexpr,
):  # fmt: skip
    """All layers. BARRIERS: of the grid in a layer; BEFORE_ROUTED: those before the router's logits are there.
    OUT_AHEAD, IN_AHEAD: see `OneTokenPlan`."""
    program = gl.program_id(0)
    experts = gl.arange(0, 128, logits_form(1))
    blocks = gl.maximum(own - program + _PROGRAMS - 1, 0) // _PROGRAMS
    page_rows = page_stride // 128
    line = gl.load(table + first * 8).to(gl.int32)
    line += program * (ROWS * 32)
    for g in gl.static_range(A_GROUPS):
        fetch(lines, line + min(4 * g, ROWS - 4) * 32, ring, g, bars.index(g))
    shared_down = gl.load(table + first * 8 + 5).to(gl.int32)
    fetch(lines, shared_down + program * 128, ring, 12, bars.index(G_BAR + 4))
    turn = 0
    for layer in range(first, last):
        parity = turn & 1
        row = table + layer * 8
        out_line = gl.load(row + 1).to(gl.int32) + program * (16 * 64)
        shared_line = gl.load(row + 2).to(gl.int32) + program * 128
        in_line = gl.load(row + 3).to(gl.int32) + program * 128
        down_line = gl.load(row + 4).to(gl.int32) + program * 128
        index_row = ((gl.load(row + 7) + 2 * KV * 128 * 128) // 128).to(gl.int32)
        bias = gl.load(biases + layer * 128 + experts)
        page = gl.load(page_table + program, mask=blocks > 0, other=0, cache_modifier=".cg")
        mbarrier.wait(bars.index(FREE_PROJECTION), parity)
        for n in range(blocks):
            following = program + (n + 1) * _PROGRAMS
            page_next = gl.load(page_table + following, mask=following < own, other=0, cache_modifier=".cg")
            buffer = n & 1
            held = gl.where(buffer == 0, (blocks + 1) // 2, blocks // 2) * turn + (n >> 1)
            mbarrier.wait(bars.index(FREE_KEYS + buffer), (held - 1) & 1, pred=n > 1)
            _keys(keys, page * page_rows + index_row, ring, bars, buffer)
            page = page_next
        for g in gl.static_range(D_GROUPS):
            if g >= OUT_AHEAD:
                mbarrier.wait(bars.index(D_BAR + g - OUT_AHEAD), parity)
            fetch(lines, out_line + g * 128, ring, g, bars.index(D_BAR + g))
        mbarrier.wait(bars.index(D_BAR + D_GROUPS - 1), parity)
        # The first buffer of keys is where the shared expert's weights go.
        mbarrier.wait(bars.index(FREE_KEYS), ((blocks + 1) // 2 * (turn + 1) - 1) & 1, pred=blocks > 0)
        _pair(lines, shared_line, ring, 8, bars.index(E_BAR))
        next_row = table + gl.minimum(layer + 1, last - 1) * 8
        line = gl.load(next_row).to(gl.int32) + program * (ROWS * 32)
        shared_down = gl.load(next_row + 5).to(gl.int32) + program * 128
        wait_alone(counter, (turn * BARRIERS + BEFORE_ROUTED) * _PROGRAMS)
        e_0, e_1, e_2, e_3, _, _, _, _ = choose(gl.load(logits + experts, cache_modifier=".cg"), bias, 1.0)
        _pair(lines, in_line + e_0 * (1024 * 32), ring, 0, bars.index(F_BAR))
        _pair(lines, in_line + e_1 * (1024 * 32), ring, 2, bars.index(F_BAR + 1))
        _pair(lines, in_line + e_2 * (1024 * 32), ring, 4, bars.index(F_BAR + 2))
        _pair(lines, in_line + e_3 * (1024 * 32), ring, 6, bars.index(F_BAR + 3))
        mbarrier.wait(bars.index(FREE_SHARED), parity)
        mbarrier.wait(bars.index(F_BAR + 2), parity)
        fetch(lines, down_line + e_0 * (2048 * 8), ring, 8, bars.index(G_BAR))
        fetch(lines, down_line + e_1 * (2048 * 8), ring, 9, bars.index(G_BAR + 1))
        mbarrier.wait(bars.index(G_BAR), parity)
        fetch(lines, down_line + e_2 * (2048 * 8), ring, 10, bars.index(G_BAR + 2))
        mbarrier.wait(bars.index(G_BAR + 1), parity)
        fetch(lines, down_line + e_3 * (2048 * 8), ring, 11, bars.index(G_BAR + 3))
        if layer + 1 < last:
            mbarrier.wait(bars.index(FREE_ROUTED), parity)
            mbarrier.wait(bars.index(G_BAR + 2), parity)
            for g in gl.static_range(A_GROUPS):
                if g == 8:
                    mbarrier.wait(bars.index(FREE_DOWN), parity)
                if g >= IN_AHEAD:
                    mbarrier.wait(bars.index(g - IN_AHEAD), 1 - parity)
                fetch(lines, line + min(4 * g, ROWS - 4) * 32, ring, g, bars.index(g))
            fetch(lines, shared_down, ring, 12, bars.index(G_BAR + 4))
        turn += 1  # noqa: SIM113  Triton has no enumerate
