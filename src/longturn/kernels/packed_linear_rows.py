"""An MXFP8 matrix times two to eight tokens, y = residual + W x: a program a multiprocessor, which all its rows of W
pass in one stream.

What other kernels for several tokens lack at these extents is warps: tiles of 64 rows leave a multiprocessor four of
them, or none, and smaller tiles read x more often than W. Here a program has an even share of the rows, a few tiles of
16, and eight warps or more, each with its own slice of every turn's columns for all of these tiles, so that x comes to
a multiprocessor once and to its registers once. Words and x go through a ring in shared memory, from which a lane takes
16 bytes of a row at a time: a lane's words may be any of the row's, as long as x is laid out likewise. The first turns'
words are on their way before the program waits for its predecessor. The warps' sums meet in shared memory.

Written in Gluon, which Triton's interpreter does not run: `_row_tiles` (small_linear.py) is the form that it checks.
"""

# Functions under gluon.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# Tuples that grow are constants to the compiler, a change of type to mypy.
# mypy: disable-error-code="assignment, misc"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from longturn.kernels.dependent_gluon import wait_then_release
from longturn.kernels.packed_linear import by_group, product_layout
from longturn.kernels.packed_weights import GROUP, SCALE_BITS, PackedWeight, WeightFormat

_MOST_TOKENS = 8
TOKENS = gl.constexpr(_MOST_TOKENS)
"""Columns of the tensor cores' tile."""
PARTS = gl.constexpr(int(WeightFormat.MXFP8))
GROUP_WORDS = gl.constexpr(GROUP[WeightFormat.MXFP8] // int(WeightFormat.MXFP8))
R = gl.constexpr(16)
"""Rows of a tile."""
W = gl.constexpr(32)
"""Words of a row that a warp takes at a time: 16 bytes in each of the four lanes of a row."""
SCALE_STEP, SCALE_BASE = (gl.constexpr(0x10001 * bits) for bits in SCALE_BITS[WeightFormat.MXFP8])
# Two words and the fp16 factor of both, twice: first parts of both words, then second parts.
_PAIR_ASM = gl.constexpr("""{
.reg .b32 a, b;
.reg .b16 l, h;
prmt.b32 a, $4, 0, 0x3120;
mov.b32 {l, h}, a;
cvt.rn.f16x2.e4m3x2 a, l;
cvt.rn.f16x2.e4m3x2 b, h;
mul.rn.f16x2 a, a, $5;
mul.rn.f16x2 b, b, $5;
mov.b32 {$0, $1}, a;
mov.b32 {$2, $3}, b;
}""")
_PROGRAMS = 132
"""Multiprocessors of an H200 or H100 SXM; on a card with fewer, some programs wait for a place, no harm else."""
_SHARED_BYTES = 224 * 1024
"""Of a program on compute capability 9.0, with a little to spare."""
_MOST_TILES, _MOST_STAGES = 5, 4


@gluon.constexpr_function
def _pairs(linear):
    """Where pairs of words lie, [slices, rows, pairs], of a layout whose registers hold words that are neighbours."""

    def halved(bases):
        return [[s, r, w // 2] for s, r, w in bases]

    assert linear.reg_bases[0] == [0, 0, 1]
    slices, rows, words = linear.shape
    return gl.DistributedLinearLayout(
        halved(linear.reg_bases[1:]), halved(linear.lane_bases), halved(linear.warp_bases), halved(linear.block_bases),
        [slices, rows, words // 2],
    )  # fmt: skip


@gluon.jit
def _ask_scales(scales, rooms, first, tiles, K: gl.constexpr, S: gl.constexpr, TILES: gl.constexpr, T: gl.constexpr):
    """Ask for all scales of the program's tiles in `rooms`, one a tile, [turns (T, a power of two), R, bytes of a
    turn]."""
    BYTES: gl.constexpr = S * W // GROUP_WORDS
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 1, 16], [2, 16, 1], [gl.num_warps(), 1, 1] if BYTES == 16 else [gl.num_warps() // 2, 1, 2], [2, 1, 0]
    )
    turn = gl.arange(0, T, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    r = gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    b = gl.arange(0, BYTES, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    ALL: gl.constexpr = K // PARTS // GROUP_WORDS
    turn_b = gl.max_contiguous(gl.multiple_of((turn * BYTES)[:, None, None] + b[None, None, :], [1, 1, 16]), [1, 1, 16])
    for t in gl.static_range(TILES):
        row = (gl.minimum(first + t, tiles - 1) * R + r).to(gl.int64)
        at = scales + (row * ALL)[None, :, None] + turn_b
        async_copy.async_copy_global_to_shared(rooms[t], at, mask=(turn < ALL // BYTES)[:, None, None])


@gluon.jit
def _ask_words(words, rooms, turn, first, tiles, K: gl.constexpr, S: gl.constexpr, TILES: gl.constexpr):
    """Ask for the words (pairs) of one turn in its `rooms`, one a tile, [S, R, W / 2]."""
    # 256 bytes of two rows, whose pieces lie side by side on the chip: eight lanes meet all banks.
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [4, 2, 4], [S // 4, gl.num_warps() * 4 // S, 1], [2, 1, 0])
    s = gl.arange(0, S, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    r = gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    w = gl.arange(0, W // 2, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    column = turn * (S * W // 2) + (s * (W // 2))[:, None, None] + w[None, None, :]
    for t in gl.static_range(TILES):
        row = (gl.minimum(first + t, tiles - 1) * R + r).to(gl.int64)
        at = words + (row * (K // PARTS // 2))[None, :, None] + column
        async_copy.async_copy_global_to_shared(rooms[t], at, eviction_policy="evict_first")


@gluon.jit
def _ask_tokens(x, rooms, turn, tokens, K: gl.constexpr, S: gl.constexpr):
    """Ask for the columns of x of one turn in its `rooms`, one a part, [S, TOKENS, W]; the last token stands again
    where there are fewer than TOKENS."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 8, 4], [gl.num_warps(), 1, 1], [2, 1, 0])
    s = gl.arange(0, S, gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    t = gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    w = gl.arange(0, W, gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    column = (w // GROUP_WORDS) * (GROUP_WORDS * PARTS) + w % GROUP_WORDS
    column = gl.max_contiguous(gl.multiple_of(column, 8), 8)
    row = gl.minimum(t, tokens - 1).to(gl.int64) * K + turn * (S * W * PARTS)
    at = x + row[None, :, None] + (s * (W * PARTS))[:, None, None] + column[None, None, :]
    for j in gl.static_range(PARTS):
        async_copy.async_copy_global_to_shared(rooms[j], at + j * GROUP_WORDS)


@gluon.jit
def _take(total, pairs, scale, first_value, second_value, S: gl.constexpr, LEFT: gl.constexpr):
    """Add products of pairs of words [S, R, W / 2] with their scales, and of both parts of x [S, W, TOKENS]."""
    PER: gl.constexpr = GROUP_WORDS // 2
    factor = scale.to(gl.int32) * SCALE_STEP + SCALE_BASE
    factor = gl.expand_dims(factor, 3).broadcast_to(S, R, W // GROUP_WORDS, PER)
    factor = gl.convert_layout(gl.reshape(factor, [S, R, W // 2]), pairs.type.layout, assert_trivial=True)
    four: gl.constexpr = (gl.float16, gl.float16, gl.float16, gl.float16)
    parts = gl.inline_asm_elementwise(_PAIR_ASM, "=&h,=&h,=&h,=&h,r,r", [pairs, factor], four, is_pure=True, pack=1)
    weight = gl.convert_layout(gl.reshape(gl.join(parts[0], parts[1]), [S, R, W]), LEFT, assert_trivial=True)
    total = mma_v2(weight, first_value, total)
    weight = gl.convert_layout(gl.reshape(gl.join(parts[2], parts[3]), [S, R, W]), LEFT, assert_trivial=True)
    return mma_v2(weight, second_value, total)


@gluon.jit
def _outputs(tile, tiles, tokens, LAYOUT: gl.constexpr):
    """Rows [R] of a tile, the places [R, TOKENS] of its y, and which of them there are."""
    of = tile * R + gl.arange(0, R, gl.SliceLayout(1, LAYOUT))
    t = gl.arange(0, TOKENS, gl.SliceLayout(0, LAYOUT))
    to = t[None, :].to(gl.int64) * (tiles * R) + of[:, None]
    return of, to, (t[None, :] < tokens) & (of[:, None] < tiles * R)


@gluon.jit(do_not_specialize=["tokens", "tiles"])
def _ring_linear(
    x, words, scales, row_scales, residual, out, tokens, tiles,
    K: gl.constexpr, TILES: gl.constexpr, STAGES: gl.constexpr, T: gl.constexpr,
    RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    S: gl.constexpr = gl.num_warps()
    TURNS: gl.constexpr = K // (S * W * PARTS)
    BYTES: gl.constexpr = S * W // GROUP_WORDS
    product: gl.constexpr = product_layout(S, 1)
    left: gl.constexpr = gl.DotOperandLayout(0, product, 8)
    right: gl.constexpr = gl.DotOperandLayout(1, product, 8)
    of_pairs: gl.constexpr = _pairs(gl.to_linear_layout(left, [S, R, W]))
    of_scales: gl.constexpr = gl.SliceLayout(3, by_group(of_pairs, GROUP_WORDS // 2))
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    # Each in its own room: the compiler puts a barrier between a copy to one and what else is done with it.
    word_rooms, x_rooms, scale_rooms, scales_by_turn = (), (), (), ()
    for _ in gl.static_range(TILES):
        scale_room = gl.allocate_shared_memory(gl.uint8, [T, R, S, BYTES // S], plain)
        scales_by_turn = scales_by_turn + (scale_room,)  # noqa: RUF005
        scale_rooms = scale_rooms + (scale_room._reinterpret(gl.uint8, [T, R, BYTES], plain),)  # noqa: RUF005
    for _ in gl.static_range(STAGES):
        of_tiles, of_parts = (), ()
        for _ in gl.static_range(TILES):
            of_tiles = of_tiles + (gl.allocate_shared_memory(gl.int32, [S, R, W // 2], plain),)  # noqa: RUF005
        for _ in gl.static_range(PARTS):
            of_parts = of_parts + (gl.allocate_shared_memory(gl.float16, [S, TOKENS, W], plain),)  # noqa: RUF005
        word_rooms, x_rooms = word_rooms + (of_tiles,), x_rooms + (of_parts,)  # noqa: RUF005
    first = gl.program_id(0) * TILES
    _ask_scales(scales, scale_rooms, first, tiles, K, S, TILES, T)
    for i in gl.static_range(STAGES - 1):
        _ask_words(words, word_rooms[i], i, first, tiles, K, S, TILES)
        async_copy.commit_group()
    if PDL:
        wait_then_release()
    for i in gl.static_range(STAGES - 1):
        _ask_tokens(x, x_rooms[i], i, tokens, K, S)
        async_copy.commit_group()
    one_slice: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 16, 2], [1, 1, gl.num_warps()], [1, 2, 0])
    flat: gl.constexpr = gl.SliceLayout(0, one_slice)
    totals, factors, bases = (), (), ()
    for t in gl.static_range(TILES):
        of, to, ok = _outputs(first + t, tiles, tokens, flat)
        factors = factors + (gl.load(row_scales + of, mask=of < tiles * R, other=0.0),)  # noqa: RUF005
        if RESIDUAL:
            bases = bases + (gl.load(residual + to, mask=ok, other=0.0, cache_modifier=".cg"),)  # noqa: RUF005
        totals = totals + (gl.full([S, R, TOKENS], 0.0, gl.float32, product),)  # noqa: RUF005
    for begin in range(0, TURNS, STAGES):
        for i in gl.static_range(STAGES):
            turn = begin + i
            async_copy.wait_group(STAGES - 2)
            gl.thread_barrier()
            pairs, bytes_of, values = (), (), ()
            for t in gl.static_range(TILES):
                pairs = pairs + (word_rooms[i][t].load(of_pairs),)  # noqa: RUF005
                of_turn = scales_by_turn[t].index(turn).permute((1, 0, 2))
                bytes_of = bytes_of + (of_turn.load(of_scales),)  # noqa: RUF005
            for j in gl.static_range(PARTS):
                values = values + (x_rooms[i][j].permute((0, 2, 1)).load(right),)  # noqa: RUF005
            if turn + STAGES - 1 < TURNS:
                _ask_words(words, word_rooms[(i + STAGES - 1) % STAGES], turn + STAGES - 1, first, tiles, K, S, TILES)
                _ask_tokens(x, x_rooms[(i + STAGES - 1) % STAGES], turn + STAGES - 1, tokens, K, S)
            async_copy.commit_group()
            added = ()
            for t in gl.static_range(TILES):
                added = added + (_take(totals[t], pairs[t], bytes_of[t], values[0], values[1], S, left),)  # noqa: RUF005
            totals = added
    # The warps' sums, added in one order, where the ring was.
    sums = ()
    for t in gl.static_range(TILES):
        sums = sums + (gl.allocate_shared_memory(gl.float32, [S, R, TOKENS], plain),)  # noqa: RUF005
        sums[t].store(totals[t])
    gl.thread_barrier()
    for t in gl.static_range(TILES):
        y = gl.full([R, TOKENS], 0.0, gl.float32, flat)
        for s in gl.static_range(S):
            y += gl.sum(sums[t].slice(s, 1, 0).load(one_slice), axis=0)
        y = y * factors[t][:, None]
        if RESIDUAL:
            y += bases[t].to(gl.float32)
        of, to, ok = _outputs(first + t, tiles, tokens, flat)
        gl.store(out + to, y.to(out.dtype.element_ty), mask=ok)


@dataclass(frozen=True)
class RingPlan:
    """Tiles of 16 rows a program; warps, each with a slice of a turn's columns; turns on the chip at once."""

    tiles: int
    warps: int
    stages: int

    @staticmethod
    def of(rows: int, width: int, warps: int = 8) -> RingPlan | None:
        """For a matrix [rows, width]; None if a row is not whole rounds of a ring, or three turns do not fit the
        chip."""
        tiles = triton.cdiv(rows // R.value, _PROGRAMS)
        plan = RingPlan(tiles, warps, 0)
        turns, rest = divmod(width, plan._turn_columns)
        if rest or rows % R.value or not 1 <= tiles <= _MOST_TILES:
            return None
        room = _SHARED_BYTES - tiles * R.value * triton.next_power_of_2(turns) * plan._turn_columns // 32
        room -= warps * R.value * _MOST_TOKENS * 4
        turn_bytes = plan._turn_columns * (tiles * R.value + 2 * _MOST_TOKENS)
        # A ring that goes round once is no loop, and the compiler fails on it.
        rounds = [stages for stages in range(3, _MOST_STAGES + 1) if turns % stages == 0 and turns > stages]
        fit = [stages for stages in rounds if stages * turn_bytes <= room]
        return RingPlan(tiles, warps, fit[-1]) if fit else None

    @property
    def _turn_columns(self) -> int:
        return self.warps * int(W.value) * int(WeightFormat.MXFP8)


def ring_plan(x: Tensor, weight: PackedWeight) -> RingPlan | None:
    """How `ring_linear` would do it; None if it cannot.

    It takes two to eight tokens in fp16, which are copied as they are, and MXFP8 (measured on compute capability 9.0).
    """
    if weight.format is not WeightFormat.MXFP8 or not 2 <= x.shape[0] <= _MOST_TOKENS:
        return None
    if not x.is_cuda or x.dtype != torch.float16 or torch.cuda.get_device_capability(x.device) != (9, 0):
        return None
    return RingPlan.of(*weight.shape)


def ring_linear(
    x: Tensor, weight: PackedWeight, out: Tensor, residual: Tensor | None, plan: RingPlan, flags: dict[str, Any]
) -> None:
    """out = residual + weight @ x, for x [T, K] fp16 and weight [N, K] as `ring_plan` takes them.

    `flags` are RESIDUAL, PDL and the launch's own.
    """
    tokens, width = x.shape
    tiles = weight.shape[0] // R.value
    turns = width // (plan.warps * W.value * int(WeightFormat.MXFP8))
    _ring_linear[(triton.cdiv(tiles, plan.tiles),)](
        x, weight.words.view(torch.int32), weight.scales, weight.row_scales, x if residual is None else residual, out,
        tokens, tiles, K=width, TILES=plan.tiles, STAGES=plan.stages, T=triton.next_power_of_2(turns),
        num_warps=plan.warps, **flags,
    )  # fmt: skip
