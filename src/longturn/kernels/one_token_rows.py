"""All layers of a decode step of two or four rows in one launch, for the layers that one_token.py serves.

Phases and barriers are those of one_token.py. What differs:

- Products are those of tensor cores, whose tiles have room for four tokens: weights are read once for all rows, and an
  expert that any row chose is multiplied by all rows, its share being 0 where a row did not choose it.
- Which and how many experts a layer takes is known on the way only, so weights come through a ring of slots in the
  order of their use (one_token_rows_fetch.py).
- `scores` deals out all rows' blocks together; `attend` is one or two blocks a program.

Results are summed in one order, so that every replay gives the same bits. A padded row (position -1) chooses no
experts and writes nothing to the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from longturn.kernels.msa_plan import DecodeRows, MsaShape
from longturn.kernels.one_token import (
    EXPERTS,
    HEAD,
    HIDDEN,
    INTER,
    KV_HEADS,
    LOG2E,
    Q_HEADS,
    STAMPS,
    TOP_BLOCKS,
    TOP_EXPERTS,
    OneTokenScratch,
    OneTokenWeights,
    score_blocks,
)
from longturn.kernels.one_token_parts import LINE_WEIGHTS, PROGRAMS, WARPS
from longturn.kernels.one_token_rows_kernel import _one_token_rows

ROWS_SERVED = (2, 4)


@dataclass(frozen=True)
class OneTokenRowsPlan:
    """Units of 32 KB a program has on their way at once, at most 4: of the projection before attention, of the one
    after it, of experts. More of them make all other traffic slow, above all the barriers."""

    in_ahead: int = 1
    out_ahead: int = 1
    experts_ahead: int = 4


@dataclass(frozen=True)
class OneTokenRowsWeights:
    """Weights as the kernel for several rows finds them: the same memory as `one`, as other pieces."""

    one: OneTokenWeights
    projections: TensorDescriptor
    outs: TensorDescriptor
    pairs: TensorDescriptor
    downs: TensorDescriptor
    keys: TensorDescriptor

    @staticmethod
    def of(one: OneTokenWeights) -> OneTokenRowsWeights:
        """Pieces are addressed by the line of 64 weights that they begin with, wherever a matrix lies; so the first
        dimension of a descriptor counts lines, and its other strides are those inside a piece."""
        base, lines = one.lines.base, one.lines.shape[0]

        def rows(width: int) -> TensorDescriptor:
            """16 rows of 512 columns of a matrix of this width."""
            return TensorDescriptor(
                base, [lines, 16, LINE_WEIGHTS], [LINE_WEIGHTS, width, 1], [8, 16, LINE_WEIGHTS], _tile(3)
            )

        pairs = TensorDescriptor(
            base, [lines, 2, 4, LINE_WEIGHTS], [LINE_WEIGHTS, INTER * HIDDEN, HIDDEN, 1], [16, 2, 4, LINE_WEIGHTS],
            _tile(4),
        )  # fmt: skip
        keys = TensorDescriptor(one.keys.base, one.keys.shape, one.keys.strides, [128, HEAD], _tile(2))
        return OneTokenRowsWeights(one, rows(HIDDEN), rows(Q_HEADS * HEAD), pairs, rows(INTER), keys)


def _tile(rank: int) -> NVMMASharedLayout:
    return NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


def rows_scratch(rows: int, shape: MsaShape, device: torch.device, timed_layers: int = 0) -> OneTokenScratch:
    """Buffers of one step, uninitialised; with `timed_layers` there is room for their stamps."""
    splits = PROGRAMS // (rows * KV_HEADS)

    def fp32(*extents: int) -> Tensor:
        return torch.empty(extents, dtype=torch.float32, device=device)

    def bf16(*extents: int) -> Tensor:
        return torch.empty(extents, dtype=torch.bfloat16, device=device)

    return OneTokenScratch(
        projected=fp32(rows, shape.projected_width),
        scores=fp32(rows, KV_HEADS, score_blocks(shape)),
        partial=fp32(rows, Q_HEADS, splits, HEAD),
        partial_max=fp32(rows, Q_HEADS, splits),
        partial_sum=fp32(rows, Q_HEADS, splits),
        attention=bf16(rows, Q_HEADS * HEAD),
        logits=fp32(rows, EXPERTS),
        hidden=bf16(rows * TOP_EXPERTS + 1, 4, INTER),
        counter=torch.empty(32, dtype=torch.int32, device=device),
        stamps=torch.empty(timed_layers, STAMPS, PROGRAMS, dtype=torch.int64, device=device),
    )


def one_token_rows_layers(
    weights: OneTokenRowsWeights, x: Tensor, rows: DecodeRows, shape: MsaShape, scratch: OneTokenScratch, *,
    scaling_factor: float, alpha: float = 1.702, beta: float = 1.0, limit: float = 7.0, first: int = 0,
    last: int | None = None, plan: OneTokenRowsPlan | None = None, timed: bool = False,
) -> None:  # fmt: skip
    """Layers first..last of `weights` on x [rows, 2048] bf16 in place, rows being one of ROWS_SERVED; the tokens' keys
    and values go to their pages.

    `rows` as for `msa_decode`; `shape` bounds their contexts; `scratch` of `rows_scratch`.
    """
    plan = plan or OneTokenRowsPlan()
    scratch.counter.zero_()
    more: dict[str, Any] = {"num_warps": WARPS, "launch_cooperative_grid": True}
    s, w, one = scratch, weights, weights.one
    _one_token_rows[(PROGRAMS,)](
        w.projections, w.outs, w.pairs, w.downs, w.keys, one.table, one.norms, one.biases, x, rows.positions,
        rows.page_table, rows.page_table.stride(0), rows.cos, rows.sin, one.cache,
        s.projected, s.scores, s.partial, s.partial_max, s.partial_sum, s.attention, s.logits, s.hidden, s.counter,
        s.stamps, first, len(one.held) if last is None else last, shape.layout.page_stride,
        float(scaling_factor), HEAD**-0.5 * LOG2E, shape.eps,
        R=x.shape[0], Q=Q_HEADS, KV=KV_HEADS, HALF=shape.rotary_dim // 2, ROWS=shape.projected_width // PROGRAMS,
        TOP=TOP_BLOCKS, BLOCKS=score_blocks(shape), ALPHA=alpha, BETA=beta, LIMIT=limit, TIMED=timed,
        IN_AHEAD=plan.in_ahead, OUT_AHEAD=plan.out_ahead, EXPERTS_AHEAD=plan.experts_ahead, **more,
    )  # fmt: skip
