"""Pieces of the kernel that streams the experts of a few tokens (moe_stream.py): who takes what, and how tiles lie.

A tile is 64 rows of a matrix (32 of a gate and 32 of its up, or 64 of a down projection), over all of its columns. It
comes in turns of 512 bytes of each row, as two boxes of the copy engine, each [4 pieces, 32 rows, 128 bytes], and a box
of scales for each. A slot of the ring holds a turn. Each of eight warps has a slice of a turn's columns, for all rows:
slice 2 * b + i is the piece b, of which a lane takes the 16 bytes number 2 * t + i, t being its place among the four
lanes of a row. So the two slices of a piece have neighbouring bytes in the same lane, all banks are met at once, and
the two groups of NVFP4 in 16 bytes are columns 2 * t and 2 * t + 1 of what follows.
"""

# Functions under gluon.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime.jit import constexpr_function

from longturn.kernels.packed_linear import by_group, product_layout

WARPS = 8
TURN_BYTES = 512
"""Of a row."""
TILE_ROWS = 64
SLOT_BYTES = TILE_ROWS * TURN_BYTES
SLOT_SCALE_BYTES = 64 * TILE_ROWS
"""Of NVFP4; those of MXFP8 are a quarter."""
MAILS = gl.constexpr(8)
"""Tiles of which a program keeps the numbers: more than the ring can hold, so that none is overwritten unread."""
NVFP4_COST, MXFP8_COST = gl.constexpr(6), gl.constexpr(11)
"""Bytes of a tile of so many columns, in one unit, by which work is dealt out."""
_AHEAD, _OF = gl.constexpr(12), gl.constexpr(16)
"""How much of the work is dealt out beforehand."""
TOKENS = gl.constexpr(8)
S = gl.constexpr(8)
"""Slices of a turn's columns."""
R = gl.constexpr(TILE_ROWS)
W = gl.constexpr(32)
"""16-bit words of a row that a slice has in a turn."""


@constexpr_function
def words_shared():
    """A slot's words as [slices, rows, pairs of words], in the copy engine's 128-byte swizzle."""
    bases = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [1, 0, 0], [0, 0, 8], [0, 0, 16]]
    bases += [[1, 1, 0], [0, 2, 8], [0, 4, 16], [0, 8, 0], [0, 16, 0], [2, 0, 0], [4, 0, 0], [0, 32, 0]]
    return gl.SharedLinearLayout(bases)


@constexpr_function
def nvfp4_scales_shared():
    """A slot's scales of NVFP4 as [slices, rows, groups], in the 64-byte swizzle."""
    bases = [[0, 0, 1], [1, 0, 0], [0, 0, 2], [0, 0, 4], [2, 0, 0], [4, 0, 0]]
    bases += [[0, 1, 0], [2, 2, 0], [4, 4, 0], [0, 8, 0], [0, 16, 0], [0, 32, 0]]
    return gl.SharedLinearLayout(bases)


@constexpr_function
def mxfp8_scales_shared():
    """A slot's scales of MXFP8 as [pieces, rows, groups], not swizzled."""
    bases = [[0, 0, 1], [0, 0, 2], [1, 0, 0], [2, 0, 0]] + [[0, 1 << n, 0] for n in range(6)]
    return gl.SharedLinearLayout(bases)


@constexpr_function
def left_form():
    """Registers of weights [slices, rows, words] as an operand."""
    return gl.DotOperandLayout(0, product_layout(WARPS, 1), 8)


@constexpr_function
def right_form():
    """Registers of x [slices, words, tokens] as an operand."""
    return gl.DotOperandLayout(1, product_layout(WARPS, 1), 8)


@constexpr_function
def words_form():
    """Registers of words [slices, rows, words], where `left_form` has them."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 8, 0], [0, 16, 0], [0, 32, 0]],
        [[0, 0, 8], [0, 0, 16], [0, 1, 0], [0, 2, 0], [0, 4, 0]], [[1, 0, 0], [2, 0, 0], [4, 0, 0]], [], [8, 64, 32],
    )  # fmt: skip


@constexpr_function
def groups_form():
    """Registers of one number for each group of NVFP4 [slices, rows, groups], where its words are."""
    return gl.SliceLayout(3, by_group(words_form(), 4))


@constexpr_function
def pieces_form():
    """Registers of words as [pieces, slices of a piece, rows, groups of MXFP8 in a piece, words of a slice in one]."""
    linear = words_form()

    def cut(bases):
        return [[s // 2, s % 2, r, w // 8, w % 8] for s, r, w in bases]

    return gl.DistributedLinearLayout(
        cut(linear.reg_bases), cut(linear.lane_bases), cut(linear.warp_bases), cut(linear.block_bases),
        [4, 2, TILE_ROWS, 4, 8],
    )  # fmt: skip


@constexpr_function
def x_form():
    """Registers of x on its way to shared memory [slices, columns, words]: 16 bytes a lane."""
    return gl.BlockedLayout([1, 1, 8], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])


@constexpr_function
def row_form():
    """Registers of a turn's columns of one token on their way [parts, slices, words]: 8 bytes a lane."""
    return gl.BlockedLayout([1, 1, 4], [1, 4, 8], [4, 2, 1], [2, 1, 0])


@constexpr_function
def sums_form():
    """Registers of partial sums [slices, halves of a tile, its rows, columns]: all slices and halves in a thread."""
    return gl.BlockedLayout([8, 2, 1, 1], [1, 1, 4, 8], [1, 1, WARPS, 1], [3, 2, 1, 0])


@constexpr_function
def flat(rank):
    return gl.SwizzledSharedLayout(1, 1, 1, list(range(rank - 1, -1, -1)))


@gluon.jit
def choices(experts, PAIRS: gl.constexpr):
    """Of each pair, one a lane, the same in every warp: its expert, how many pairs before it chose the same, and its
    rank among those that are their expert's first (-1 for others); and how many experts there are."""
    form: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    i = gl.arange(0, 32, form)
    expert = gl.load(experts + i, mask=i < PAIRS, other=-1, cache_modifier=".cg")
    three: gl.constexpr = (gl.int32,) * 3
    earlier, rank, count = gl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .u32 m, b, l;
        mov.u32 l, %lanemask_lt;
        match.any.sync.b32 m, $3, 0xffffffff;
        and.b32 m, m, l;
        popc.b32 $0, m;
        setp.ge.s32 p, $3, 0;
        setp.eq.and.u32 p, m, 0, p;
        vote.sync.ballot.b32 b, p, 0xffffffff;
        popc.b32 $2, b;
        and.b32 b, b, l;
        popc.b32 $1, b;
        selp.b32 $1, $1, -1, p;
        }""",
        "=&r,=&r,=&r,r", [expert], three, is_pure=False, pack=1,
    )  # fmt: skip
    return expert, earlier, rank, gl.max(count, axis=0)


@gluon.jit
def expert_of(expert, rank, number):
    """The expert that is `number` among those chosen."""
    return gl.sum(gl.where(rank == number, expert, 0), axis=0)


@gluon.jit
def _tile_at(cost, tiles):
    """The number of the first tile that begins at `cost` or later: `tiles` of the shared expert come first, then as
    many of each chosen one."""
    shared = tiles * MXFP8_COST
    routed = (gl.maximum(cost - shared, 0) + NVFP4_COST - 1) // NVFP4_COST
    return gl.minimum((cost + MXFP8_COST - 1) // MXFP8_COST, tiles) + routed


@gluon.jit
def dealt_out(tiles, count, PROGRAMS: gl.constexpr):
    """This program's tiles, from one number to another, and the first of those that are nobody's beforehand."""
    cost = (tiles * MXFP8_COST + count * tiles * NVFP4_COST) * _AHEAD // _OF
    begin = gl.program_id(0) * cost // PROGRAMS
    end = (gl.program_id(0) + 1) * cost // PROGRAMS
    return _tile_at(begin, tiles), _tile_at(end, tiles), _tile_at(cost, tiles)


@gluon.jit
def ask_number(counter):
    """Take the next number of a counter, in one lane; `number_asked` waits for it."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred p; .reg .u32 l;
        mov.u32 l, %laneid;
        setp.eq.u32 p, l, 0;
        mov.u32 $0, 0;
        @p atom.relaxed.gpu.global.add.u32 $0, [$1], 1;
        }""",
        "=r,l", [counter.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def number_asked(number):
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1
    )
