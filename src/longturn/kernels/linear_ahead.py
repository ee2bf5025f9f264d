"""Matrix times a few tokens, all weights of a program in shared memory before it waits for its predecessor.

y = residual + W norm(x) for 1 to 32 tokens. What `_gemv` holds in registers, this kernel copies asynchronously to
shared memory, which the kernels before it hardly use: so its programs fit beside theirs, and with one program a
multiprocessor the whole matrix is on the chip when the predecessor ends. What is left then is x and one pass of the
tensor cores.

A program's rows are few (16) and long, a tensor-core tile wants 64: so a row is cut into SLICES pieces, one below the
other. All pieces of W meet all pieces of x; of the product only the blocks where a piece meets its own are summed up.
The rest is thrown away, which costs nothing while the weights' bytes are the limit.

Written in Gluon, Triton's lower layer: plain Triton cannot start a copy before a barrier and use it after. Triton's
interpreter does not run Gluon, so `small_linear` without `ahead` stays the form that it checks.
"""

# Functions under gluon.jit are written in Triton's types, which mypy does not know.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, warpgroup_mma

from longturn.kernels.dependent_gluon import wait_then_release

ROWS = 16
"""Rows of W in a tile."""
SLICES = 4
_SHARED_BYTES = 224 * 1024
"""Of a program on compute capability 9.0, with a little to spare."""
_MOST_TOKENS = 32
_PROGRAMS = 132
"""Multiprocessors of an H200 or H100 SXM; on a card with fewer, some programs wait for a place, no harm else."""


@gluon.jit
def _finish(
    total, scale, residual, out, first, tokens, rows,
    SLICES: gl.constexpr, ROWS: gl.constexpr, TOKENS: gl.constexpr, RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Sum the blocks of `total` [SLICES * ROWS, SLICES * TOKENS] on its diagonal, and store rows `first`.. of y."""
    placed: gl.constexpr = gl.BlockedLayout([1, 1], [16, 2], [1, gl.num_warps()], [0, 1])
    r = first + gl.arange(0, ROWS, gl.SliceLayout(1, placed))
    t = gl.arange(0, TOKENS, gl.SliceLayout(0, placed))
    at = t[None, :].to(gl.int64) * rows + r[:, None]
    ok = (t < tokens)[None, :] & (r < rows)[:, None]
    y = gl.full([ROWS, TOKENS], 0.0, gl.float32, placed)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    sums = gl.allocate_shared_memory(gl.float32, [SLICES * ROWS, SLICES * TOKENS], flat)
    sums.store(total)
    gl.thread_barrier()
    for s in gl.static_range(SLICES):
        y += sums.slice(s * ROWS, ROWS, 0).slice(s * TOKENS, TOKENS, 1).load(placed)
    gl.thread_barrier()
    y = y * scale
    if RESIDUAL:
        y += gl.load(residual + at, mask=ok, other=0.0, cache_modifier=".cg").to(gl.float32)
    gl.store(out + at, y.to(out.dtype.element_ty), mask=ok)


@gluon.jit(do_not_specialize=["tokens"])
def _linear_ahead(
    x, norm_weight, weight, residual, out, tokens, rows, eps,
    K: gl.constexpr, SLICES: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr, TOKENS: gl.constexpr,
    CHUNK: gl.constexpr, BUFFERS: gl.constexpr, NORM: gl.constexpr, RESIDUAL: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    W: gl.constexpr = K // SLICES
    M: gl.constexpr = SLICES * ROWS
    N: gl.constexpr = SLICES * TOKENS
    CHUNKS: gl.constexpr = W // CHUNK
    ACROSS: gl.constexpr = min(CHUNK // 8, 32)
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [gl.num_warps(), 1], [1, 0])
    tile: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    product: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[gl.num_warps(), 1], instr_shape=[16, N, 16]
    )
    first = gl.program_id(0) * (TILES * ROWS)
    m = gl.arange(0, M, gl.SliceLayout(1, copied))
    c = gl.arange(0, CHUNK, gl.SliceLayout(0, copied))
    weights = gl.allocate_shared_memory(weight.dtype.element_ty, [TILES * CHUNKS, M, CHUNK], tile)
    for i in gl.static_range(TILES):
        row = gl.minimum(first + i * ROWS + m % ROWS, rows - 1)
        w_at = weight + (row.to(gl.int64) * K + (m // ROWS) * W)[:, None] + c[None, :]
        for k in gl.static_range(CHUNKS):
            async_copy.async_copy_global_to_shared(weights.index(i * CHUNKS + k), w_at + k * CHUNK)
    async_copy.commit_group()
    n = gl.arange(0, N, gl.SliceLayout(1, copied))
    # Tokens past the last repeat it: a column of the product depends on its own token only.
    token = gl.minimum(n % TOKENS, tokens - 1)
    column = ((n // TOKENS) * W)[:, None] + c[None, :]
    x_at = x + (token.to(gl.int64) * K)[:, None] + column
    inputs = gl.allocate_shared_memory(weight.dtype.element_ty, [BUFFERS, N, CHUNK], tile)
    if PDL:
        wait_then_release()
    square = gl.full([N, CHUNK], 0.0, gl.float32, copied)
    for k in gl.static_range(BUFFERS):
        if NORM:
            # One token, so that every row of `value` is a piece of it, each piece TOKENS times.
            value = gl.load(x_at + k * CHUNK, cache_modifier=".cg").to(gl.float32)
            square += value * value
            value = value * (gl.load(norm_weight + column + k * CHUNK).to(gl.float32) + 1.0)
            inputs.index(k).store(value.to(weight.dtype.element_ty))
        else:
            async_copy.async_copy_global_to_shared(inputs.index(k), x_at + k * CHUNK)
            async_copy.commit_group()
    scale = 1.0
    if NORM:
        scale = gl.rsqrt(gl.sum(gl.sum(square, axis=1), axis=0) / (TOKENS * K) + eps)
    total = gl.full([M, N], 0.0, gl.float32, product)
    total_1 = gl.full([M, N], 0.0, gl.float32, product)
    total_2 = gl.full([M, N], 0.0, gl.float32, product)
    for k in gl.static_range(CHUNKS):
        if NORM:
            async_copy.wait_group(0)
        else:
            async_copy.wait_group(BUFFERS - 1)
        fence_async_shared()
        gl.thread_barrier()
        value = inputs.index(k % BUFFERS).permute((1, 0))
        total = warpgroup_mma(weights.index(k), value, total)
        if TILES > 1:
            total_1 = warpgroup_mma(weights.index(CHUNKS + k), value, total_1)
        if TILES > 2:
            total_2 = warpgroup_mma(weights.index(2 * CHUNKS + k), value, total_2)
        if not NORM:
            if k + BUFFERS < CHUNKS:
                gl.thread_barrier()
                async_copy.async_copy_global_to_shared(inputs.index(k % BUFFERS), x_at + (k + BUFFERS) * CHUNK)
            async_copy.commit_group()
    _finish(total, scale, residual, out, first, tokens, rows, SLICES, ROWS, TOKENS, RESIDUAL)
    if TILES > 1:
        _finish(total_1, scale, residual, out, first + ROWS, tokens, rows, SLICES, ROWS, TOKENS, RESIDUAL)
    if TILES > 2:
        _finish(total_2, scale, residual, out, first + 2 * ROWS, tokens, rows, SLICES, ROWS, TOKENS, RESIDUAL)


@dataclass(frozen=True)
class AheadPlan:
    """Tiles of 16 rows a program holds; tokens, padded; columns of a piece of x that are on the chip at once, and how
    many times."""

    tiles: int
    tokens: int
    chunk: int
    buffers: int

    @staticmethod
    def of(tokens: int, rows: int, width: int) -> AheadPlan | None:
        """For a matrix [rows, width]; None if its rows do not fit on the chip at once."""
        tiles = triton.cdiv(rows, ROWS * _PROGRAMS)
        room = _SHARED_BYTES - tiles * ROWS * width * 2
        held = max(2, triton.next_power_of_2(tokens))
        if not 1 <= tokens <= _MOST_TOKENS or tiles > 3 or width % (64 * SLICES):
            return None
        piece = width // SLICES
        chunk = min(256, piece & -piece)
        while chunk > 64 and 2 * SLICES * held * chunk * 2 > room:
            chunk //= 2
        bytes_of_one = SLICES * held * chunk * 2
        buffers = min(piece // chunk, max(2, min(room, 32 * 1024) // bytes_of_one))
        return AheadPlan(tiles, held, chunk, buffers) if buffers * bytes_of_one <= room else None


def ahead_plan(x: Tensor, weight: Tensor, norm: bool) -> AheadPlan | None:
    """How `linear_ahead` would do it; None if it cannot.

    It takes bf16 on compute capability 9.0 (its products are of Hopper's warp groups). A norm is for one token, whose
    pieces are all of x; and it needs all of x on the chip at once.
    """
    if not x.is_cuda or x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16:
        return None
    if torch.cuda.get_device_capability(x.device) != (9, 0):
        return None
    plan = AheadPlan.of(x.shape[0], weight.shape[0], x.shape[1])
    if norm and plan is not None and (x.shape[0] > 1 or plan.buffers * plan.chunk * SLICES != x.shape[1]):
        return None
    return plan


def ahead_pays(tokens: int, plan: AheadPlan) -> bool:
    """Whether it is faster than the other kernels, as measured (docs/performance.md).

    A matrix of several tiles a program fills the shared memory, so that the kernel after it starts late; at one token
    that costs more than it saves, unless that kernel has little to load (`LinearPlan.before_attention`). At 32 tokens
    what room is left for x is so little that a program waits for it more often than it saves.
    """
    return plan.tiles == 1 or 2 <= tokens <= 16


def linear_ahead(
    x: Tensor, weight: Tensor, out: Tensor, norm_weight: Tensor | None, residual: Tensor | None, eps: float,
    plan: AheadPlan, flags: dict[str, Any],
) -> None:  # fmt: skip
    """out = residual + weight @ norm(x), for x [T, K] and weight [N, K] as `ahead_plan` takes them.

    `flags` are RESIDUAL, PDL and the launch's own.
    """
    tokens, width = x.shape
    n = weight.shape[0]
    _linear_ahead[(triton.cdiv(n, plan.tiles * ROWS),)](
        x, x if norm_weight is None else norm_weight, weight, x if residual is None else residual, out, tokens, n, eps,
        K=width, SLICES=SLICES, ROWS=ROWS, TILES=plan.tiles, TOKENS=plan.tokens, CHUNK=plan.chunk,
        BUFFERS=plan.buffers, NORM=norm_weight is not None, num_warps=4, **flags,
    )  # fmt: skip
