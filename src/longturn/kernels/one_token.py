"""All layers of a one-token decode step in one launch, for plain bf16 weights that fit on the chip a layer at a time.

A chain of kernels pays some 2.3 microseconds a launch that no byte explains, and its next weights cannot be asked for
early enough. Here one program a multiprocessor stays for all layers; between two phases of a layer there is a barrier
over the grid (0.9 microseconds), and while a program waits, the weights of its next phase are on their way into shared
memory:

    project   norm, queries, keys, values and index
    scores    of whole older blocks; the new token's keys and values
    attend    half a block a program, which finds out itself which one
    merge     of the parts
    out       output projection and residual
    route     norm and the router's logits; behind the barrier the shared expert's gate and up
    routed    the chosen experts' gate and up
    down      the experts' down projections, weighted, and residual

Results are summed in one order, so that every replay gives the same bits. Products take norm(x), and the down
projection the experts' activations, rounded to bf16, where the chain of kernels multiplies one token's in fp32; the
router does not.

All programs must be resident at once: the launch is cooperative, and fails where they would not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from longturn.kernels.msa_plan import DecodeRows, MsaNorms, MsaShape
from longturn.kernels.one_token_kernel import _one_token
from longturn.kernels.one_token_parts import LINE_WEIGHTS, PROGRAMS, WARPS
from longturn.kernels.pages import KvFormat

LOG2E = 1.4426950408889634
_SPLITS = 32
_TILE = NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
HIDDEN, HEAD, INTER, EXPERTS, TOP_EXPERTS, TOP_BLOCKS, Q_HEADS, KV_HEADS = 2048, 128, 512, 128, 4, 16, 32, 4
"""What the kernel deals out to its programs; other extents need another dealing."""
MOST_BLOCKS = 4097
"""Of a context: above, the work of `select`, which grows with their square, outweighs the launches saved."""
STAMPS = 18


@dataclass(frozen=True)
class OneTokenPlan:
    """Groups of 16 KB a program has on their way at once, of the two projections. More of them make all other traffic
    slow, above all the barriers (docs/performance.md)."""

    out_ahead: int = 1
    in_ahead: int = 2


@dataclass(frozen=True)
class OneTokenLayer:
    """Weights of one layer, bf16 but for the router and its bias (fp32)."""

    input_norm: Tensor
    projection: Tensor
    heads: MsaNorms
    out: Tensor
    post_norm: Tensor
    router: Tensor
    bias: Tensor
    w13: Tensor
    w2: Tensor
    shared_w13: Tensor
    shared_w2: Tensor

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """Those read as lines, in the order of the table."""
        return (self.projection, self.out, self.shared_w13, self.w13, self.w2, self.shared_w2)

    @property
    def norms(self) -> tuple[Tensor, ...]:
        heads = self.heads
        return (self.input_norm, self.post_norm, heads.query, heads.key, heads.index_query, heads.index_key)


def runs_here(device: torch.device) -> bool:
    """Whether the device can run the persistent kernel: all its programs at once, and a Hopper's copy engine and
    shared memory. `meta` stands for the device that a step's kernels are noted for."""
    if device.type == "cpu" or torch.cuda.get_device_capability() != (9, 0):
        return False
    return device.type == "meta" or torch.cuda.get_device_properties(device).multi_processor_count >= PROGRAMS


def fits(layer: OneTokenLayer, shape: MsaShape) -> bool:
    """Whether the persistent kernel can serve such a layer."""
    layout = shape.layout
    projected = shape.projected_width
    wanted = (
        (projected, HIDDEN), (HIDDEN, Q_HEADS * HEAD), (2 * INTER, HIDDEN), (EXPERTS, 2 * INTER, HIDDEN),
        (EXPERTS, HIDDEN, INTER), (HIDDEN, INTER),
    )  # fmt: skip
    return (
        all(m.dtype == torch.bfloat16 and m.is_contiguous() for m in (*layer.matrices, *layer.norms))
        and all(tuple(m.shape) == w for m, w in zip(layer.matrices, wanted, strict=True))
        and layer.router.dtype == torch.float32
        and tuple(layer.router.shape) == (EXPERTS, HIDDEN)
        and layer.router.is_contiguous()
        and (layer.bias.dtype, tuple(layer.bias.shape)) == (torch.float32, (EXPERTS,))
        and projected % PROGRAMS == 0
        and 44 <= projected // PROGRAMS <= 48
        and (shape.q_heads, layout.kv_heads, layout.head_dim, layout.page_tokens) == (Q_HEADS, KV_HEADS, HEAD, 128)
        and (shape.top_blocks, shape.init_blocks, shape.local_blocks) == (TOP_BLOCKS, 0, 1)
        and layout.kv_format == KvFormat.PLAIN
        and layout.index_format == KvFormat.PLAIN
        and not layout.in_bytes
    )


def score_blocks(shape: MsaShape) -> int:
    """Blocks that may need a score, rounded up: all but the own one."""
    scored = shape.max_blocks - 1
    return max(64, 1 << max(scored - 1, 0).bit_length())


@dataclass(frozen=True)
class OneTokenWeights:
    """Consecutive layers as the kernel finds them. Holds copies of small weights, addresses of large ones."""

    lines: TensorDescriptor
    keys: TensorDescriptor
    table: Tensor
    """int64 [layers, 8]: lines of the six matrices, address of the router, offset of the layer in a page."""
    norms: Tensor
    """bf16 [layers, 2 * hidden + 4 * head]."""
    biases: Tensor
    """fp32 [layers, experts]."""
    cache: Tensor
    held: tuple[OneTokenLayer, ...]

    @staticmethod
    def of(layers: Sequence[OneTokenLayer], first: int, shape: MsaShape, cache: Tensor) -> OneTokenWeights | None:
        """Layers `first`.. of a model on one device, whose pages lie in `cache` (bf16, contiguous). None if the kernel
        cannot serve them, wherever it runs."""
        device = cache.device
        if device.type == "cpu" or not layers or cache.dtype != torch.bfloat16 or not cache.is_contiguous():
            return None
        if not all(fits(layer, shape) for layer in layers):
            return None
        matrices = [m for layer in layers for m in layer.matrices]
        base = min(matrices, key=lambda m: m.data_ptr())
        line_bytes = LINE_WEIGHTS * base.itemsize
        lines = max(m.data_ptr() + m.numel() * m.itemsize for m in matrices) - base.data_ptr()
        starts = [m.data_ptr() - base.data_ptr() for m in matrices]
        rows = cache.numel() // HEAD
        if any(start % line_bytes for start in starts) or any(layer.router.data_ptr() % 16 for layer in layers):
            return None
        if max(lines // line_bytes, rows) >= 2**31 or shape.layout.page_stride >= 2**31:
            return None
        offset = shape.layout.key_offset
        table = [
            [*((m.data_ptr() - base.data_ptr()) // line_bytes for m in layer.matrices), layer.router.data_ptr(),
             offset(first + n)]
            for n, layer in enumerate(layers)
        ]  # fmt: skip
        return OneTokenWeights(
            TensorDescriptor(base, [lines // line_bytes, LINE_WEIGHTS], [LINE_WEIGHTS, 1], [128, LINE_WEIGHTS], _TILE),
            TensorDescriptor(cache, [rows, HEAD], [HEAD, 1], [64, HEAD], _TILE),
            torch.tensor(table, dtype=torch.int64, device=device),
            torch.stack([torch.cat(layer.norms) for layer in layers]),
            torch.stack([layer.bias for layer in layers]),
            cache,
            tuple(layers),
        )


@dataclass(frozen=True)
class OneTokenScratch:
    """Buffers of one step."""

    projected: Tensor
    scores: Tensor
    partial: Tensor
    partial_max: Tensor
    partial_sum: Tensor
    attention: Tensor
    logits: Tensor
    hidden: Tensor
    counter: Tensor
    stamps: Tensor

    @staticmethod
    def allocate(shape: MsaShape, device: torch.device, timed_layers: int = 0) -> OneTokenScratch:
        """Uninitialised; with `timed_layers` there is room for their stamps."""

        def fp32(*extents: int) -> Tensor:
            return torch.empty(extents, dtype=torch.float32, device=device)

        return OneTokenScratch(
            projected=fp32(shape.projected_width),
            scores=fp32(KV_HEADS, score_blocks(shape)),
            partial=fp32(Q_HEADS, HEAD // 32, _SPLITS, 32),
            partial_max=fp32(Q_HEADS, _SPLITS),
            partial_sum=fp32(Q_HEADS, _SPLITS),
            attention=torch.empty(Q_HEADS * HEAD, dtype=torch.bfloat16, device=device),
            logits=fp32(EXPERTS),
            hidden=fp32((TOP_EXPERTS + 1) * INTER),
            counter=torch.empty(32, dtype=torch.int32, device=device),
            stamps=torch.empty(timed_layers, STAMPS, PROGRAMS, dtype=torch.int64, device=device),
        )


def one_token_layers(
    weights: OneTokenWeights, x: Tensor, rows: DecodeRows, shape: MsaShape, scratch: OneTokenScratch, *,
    scaling_factor: float, alpha: float = 1.702, beta: float = 1.0, limit: float = 7.0, first: int = 0,
    last: int | None = None, plan: OneTokenPlan | None = None, timed: bool = False,
) -> None:  # fmt: skip
    """Layers first..last of `weights` on x [1, 2048] bf16 in place; the token's keys and values go to its page.

    `rows` as for `msa_decode`, of one row; `shape` bounds its context.
    """
    plan = plan or OneTokenPlan()
    scratch.counter.zero_()
    more: dict[str, Any] = {"num_warps": WARPS, "launch_cooperative_grid": True}
    s, w = scratch, weights
    _one_token[(PROGRAMS,)](
        w.lines, w.keys, w.table, w.norms, w.biases, x, rows.positions, rows.page_table, rows.cos, rows.sin, w.cache,
        s.projected, s.scores, s.partial, s.partial_max, s.partial_sum, s.attention, s.logits, s.hidden,
        s.counter, s.stamps, first, len(w.held) if last is None else last, shape.layout.page_stride,
        float(scaling_factor), HEAD**-0.5 * LOG2E, shape.eps,
        Q=Q_HEADS, KV=KV_HEADS, HALF=shape.rotary_dim // 2, ROWS=shape.projected_width // PROGRAMS, TOP=TOP_BLOCKS,
        BLOCKS=score_blocks(shape), ALPHA=alpha, BETA=beta, LIMIT=limit, TIMED=timed, OUT_AHEAD=plan.out_ahead,
        IN_AHEAD=plan.in_ahead, **more,
    )  # fmt: skip
