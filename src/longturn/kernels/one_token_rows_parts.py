"""Pieces of the persistent kernel for several rows (one_token_rows.py): weights as operands of tensor cores.

A tile is 16 KB of weights as the copy engine leaves them: lines of 64 weights, pieces of 16 bytes swizzled by the low
three bits of the line's number, all rows of 64 columns together. It is an operand [16, 512], of which each of the eight
warps multiplies 64 columns: as 16 rows of 512 columns (`tile_rows`), or as 8 rows of 1,024, the second half of the
columns below the first (`tile_pairs`). Two tiles are a unit, which is asked for, waited for and released as one.

The other operand has 8 columns: two slices of 512 numbers, one beside the other, of 4 tokens each. Rows of a whole
slice meet the columns of their own; what the others give is thrown away, so that operands of tokens are read from
shared memory once for all of a program's rows.
"""

# Functions under gluon.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2
from triton.runtime.jit import constexpr_function

from longturn.kernels.one_token_parts import flat_shared

TOKENS = gl.constexpr(4)
SLOTS = gl.constexpr(4)
"""Units of weights that a program's shared memory holds, in a ring; barrier s says that slot s is full, barrier
SLOTS + s that it has been read."""
SIDE = gl.constexpr(5)
"""Tiles of shared memory beside the ring: 4 for the projection's last two units, index keys, keys and values, and wide
inputs by turns, 1 for the inputs of the narrow products."""
X_AT = gl.constexpr(4)

_COLUMN_BASES = [1, 2, 4, 8, 16, 32]
_ROW_SWIZZLE = [8, 16, 32]


@constexpr_function
def acc_form():
    """Registers of a product [8 warps, 16, 8]: each warp has the sum over its own columns."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[8, 1, 1], instr_shape=[1, 16, 8])


@constexpr_function
def tile_rows():
    """Shared layout of a group of 16 rows of 512 columns as [8 warps, 16, 64]."""
    bases = [[0, 0, b] for b in _COLUMN_BASES]
    bases += [[0, 1 << n, swizzle] for n, swizzle in enumerate(_ROW_SWIZZLE)]
    bases += [[0, 8, 0]] + [[1 << n, 0, 0] for n in range(3)]
    return gl.SharedLinearLayout(bases)


@constexpr_function
def tile_pairs():
    """Shared layout of a group of 8 rows of 1,024 columns as [8 warps, 16, 64]."""
    bases = [[0, 0, b] for b in _COLUMN_BASES]
    bases += [[0, 1 << n, swizzle] for n, swizzle in enumerate(_ROW_SWIZZLE)]
    bases += [[1 << n, 0, 0] for n in range(3)] + [[0, 8, 0]]
    return gl.SharedLinearLayout(bases)


@constexpr_function
def slice_pair():
    """Shared layout of two slices of 4 tokens as [8 slices and tokens, 8 warps, 64]."""
    bases = [[0, 0, b] for b in _COLUMN_BASES] + [[0, 1 << n, 0] for n in range(3)]
    bases += [[1 << n, 0, swizzle] for n, swizzle in enumerate(_ROW_SWIZZLE)]
    return gl.SharedLinearLayout(bases)


@constexpr_function
def slices_of_tokens(SLICES):
    """Shared layout of `slice_pair`s, one after the other, as [4 tokens, 512 * SLICES]."""
    bases = [[0, 1 << n] for n in range(9)] + [[1, 8], [2, 16]]
    slices = [[0, 512 << n] for n in range(SLICES.bit_length() - 1)]
    slices[0] = [0, 512 + 32]
    return gl.SharedLinearLayout(bases + slices)


@constexpr_function
def slices_in_rows():
    """Shared layout of two `slice_pair`s as [16 slices and tokens, 512]."""
    return gl.SharedLinearLayout([[0, 1 << n] for n in range(9)] + [[1, 8], [2, 16], [4, 32], [8, 0]])


@constexpr_function
def tokens_form():
    """Registers of numbers of 4 tokens [4, n * 2048]: 8 columns of each token a thread."""
    return gl.BlockedLayout([4, 8], [1, 32], [1, 8], [1, 0])


@gluon.jit
def operand(side, pair):
    """The operand of tokens of `slice_pair` number `pair` of the side's shared memory: [8 warps, 64, 8]."""
    view = side._reinterpret(gl.bfloat16, [2 * SIDE, 8, 8, 64], slice_pair()).index(pair)
    return view.permute((1, 2, 0)).load(gl.DotOperandLayout(1, acc_form(), 2))


@gluon.jit
def zeros():
    return gl.full([8, 16, 8], 0.0, gl.float32, acc_form())


@gluon.jit
def taken(bars, number):
    """Wait for unit `number` of the launch; its first tile."""
    slot = number & (SLOTS - 1)
    mbarrier.wait(bars.index(slot), (number // SLOTS) & 1)
    return 2 * slot


@gluon.jit
def rows_tile(store, tile):
    """Tile number `tile` of the ring, or of the side, as an operand: 16 rows of 512 columns."""
    view = store.index(tile)._reinterpret(gl.bfloat16, [8, 16, 64], tile_rows())
    return view.load(gl.DotOperandLayout(0, acc_form(), 2))


@gluon.jit
def times_rows(store, tile, x, even, odd):
    """even + the product of a tile of 16 rows with an operand of tokens, odd + that of the tile after it, which holds
    the next 512 columns."""
    a = rows_tile(store, tile)
    b = rows_tile(store, tile + 1)
    return mma_v2(a, x, even), mma_v2(b, x, odd)


@gluon.jit
def times_pairs(ring, bars, number, x_0, x_1):
    """The product of a unit, 8 rows of 2,048 columns in two tiles of 1,024, with two operands of tokens."""
    tile = taken(bars, number)
    form: gl.constexpr = gl.DotOperandLayout(0, acc_form(), 2)
    a = ring.index(tile)._reinterpret(gl.bfloat16, [8, 16, 64], tile_pairs()).load(form)
    b = ring.index(tile + 1)._reinterpret(gl.bfloat16, [8, 16, 64], tile_pairs()).load(form)
    return mma_v2(a, x_0, zeros()) + mma_v2(b, x_1, zeros())


@gluon.jit
def release(bars, number):
    """Give back the slot of unit `number`, once all warps are here. (`arrive` begins with a barrier of its own.)

    A barrier does not wait for loads on their way, and what the copy engine writes next could overtake them: either
    products of the unit have been summed (`sum_rows`, `sum_pairs`), or `fence_async_shared` comes before."""
    mbarrier.arrive(bars.index(SLOTS + (number & (SLOTS - 1))))


@constexpr_function
def _rows_summed():
    return gl.BlockedLayout([8, 1, 2, 1], [1, 8, 1, 4], [4, 2, 1, 1], [3, 2, 1, 0])


@constexpr_function
def rows_form():
    """Registers of the result [16 rows, 4 tokens] of `sum_rows`."""
    return gl.SliceLayout(0, gl.SliceLayout(2, _rows_summed()))


@gluon.jit
def sum_rows(sums, buffer, even, odd):
    """Results [16, 4] of 16 rows: `even` is the sum of products of even slices, whose tokens are columns 0 to 3, `odd`
    that of odd ones, columns 4 to 7."""
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, acc_form())))
    sums.index(buffer)._reinterpret(gl.float32, [8, 16, 8], flat_shared(3)).store(
        gl.where((column < 4)[None, None, :], even, odd)
    )
    gl.thread_barrier()
    part = sums.index(buffer)._reinterpret(gl.float32, [8, 16, 2, 4], flat_shared(4)).load(_rows_summed())
    return gl.sum(gl.sum(part, axis=2), axis=0)


@constexpr_function
def _pairs_summed():
    return gl.BlockedLayout([4, 2, 1, 2, 1], [2, 1, 4, 1, 4], [8, 1, 1, 1, 1], [4, 3, 2, 1, 0])


@constexpr_function
def pairs_form():
    """Registers of the results [4 rows, 4 tokens] of `sum_pairs`."""
    return gl.SliceLayout(0, gl.SliceLayout(0, gl.SliceLayout(3, _pairs_summed())))


@gluon.jit
def sum_pairs(sums, buffer, acc):
    """Results of 4 rows of a gate and of 4 of its up, each [4 rows, 4 tokens]."""
    form: gl.constexpr = acc_form()
    row = gl.arange(0, 16, gl.SliceLayout(1, gl.SliceLayout(0, form)))
    column = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(0, form)))
    own = (row // 8)[:, None] == (column // 4)[None, :]
    both = gl.sum(gl.where(own[None, :, :], acc, 0.0).reshape([8, 2, 8, 8]), axis=1)
    view = sums.index(buffer)._reinterpret(gl.float32, [16, 8, 8], flat_shared(3)).slice(0, 8, 0)
    view.store(both)
    gl.thread_barrier()
    part = sums.index(buffer)._reinterpret(gl.float32, [16, 2, 4, 2, 4], flat_shared(5)).slice(0, 8, 0)
    y = gl.sum(gl.sum(part.load(_pairs_summed()), axis=3), axis=0)
    half = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, y.type.layout)))[:, None, None]
    return gl.sum(gl.where(half == 0, y, 0.0), axis=0), gl.sum(gl.where(half == 1, y, 0.0), axis=0)
