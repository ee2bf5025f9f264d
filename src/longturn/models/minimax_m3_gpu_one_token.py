"""Which layers of MiniMax-M3 a decode step of one, two or four rows takes in one launch (kernels/one_token.py,
one_token_rows.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longturn.kernels.msa_plan import DecodeRows, MsaShape
from longturn.kernels.one_token import (
    MOST_BLOCKS,
    TOP_EXPERTS,
    OneTokenLayer,
    OneTokenScratch,
    OneTokenWeights,
    one_token_layers,
    runs_here,
)
from longturn.kernels.one_token_rows import (
    ROWS_SERVED,
    OneTokenRowsWeights,
    one_token_rows_layers,
    rows_scratch,
)
from longturn.models.minimax_m3_gpu_weights import GpuLayer
from longturn.ops.moe import SwigluOai


@dataclass(frozen=True)
class OneTokenRun:
    """The last layers of a model, from `first` on."""

    first: int
    weights: OneTokenWeights
    weights_of_rows: OneTokenRowsWeights

    def serves(self, rows: int, max_blocks: int, device: torch.device) -> bool:
        """Whether these layers of a step of so many rows, with contexts of up to `max_blocks`, are one launch there."""
        return (rows == 1 or rows in ROWS_SERVED) and max_blocks <= MOST_BLOCKS and runs_here(device)

    def decode(
        self, x: Tensor, rows: DecodeRows, shape: MsaShape, *, scaling_factor: float, activation: SwigluOai,
        last: int | None = None,
    ) -> None:  # fmt: skip
        """Layers first..last of the model on x [rows, hidden] in place; all if `last` is None."""
        count = None if last is None else last - self.first
        a = activation
        if x.shape[0] == 1:
            one_token_layers(
                self.weights, x, rows, shape, OneTokenScratch.allocate(shape, x.device), scaling_factor=scaling_factor,
                alpha=a.alpha, beta=a.beta, limit=a.limit, last=count,
            )  # fmt: skip
        else:
            one_token_rows_layers(
                self.weights_of_rows, x, rows, shape, rows_scratch(x.shape[0], shape, x.device),
                scaling_factor=scaling_factor, alpha=a.alpha, beta=a.beta, limit=a.limit, last=count,
            )  # fmt: skip


def one_token_run(layers: Sequence[GpuLayer], shape: MsaShape, cache: Tensor) -> OneTokenRun | None:
    """The longest run up to the last layer whose layers have sparse attention, experts and plain weights; None if there
    is none, or the kernels do not serve such layers."""
    taken: list[OneTokenLayer] = []
    for layer in reversed(layers):
        made = _as_one_token(layer)
        if made is None:
            break
        taken.insert(0, made)
    first = len(layers) - len(taken)
    weights = OneTokenWeights.of(taken, first, shape, cache)
    return None if weights is None else OneTokenRun(first, weights, OneTokenRowsWeights.of(weights))


def _as_one_token(layer: GpuLayer) -> OneTokenLayer | None:
    norm, router, bias, w13, w2, shared_w13, shared_w2 = layer.feed_forward
    projection, out = layer.projection, layer.out
    if layer.heads is None or layer.top != TOP_EXPERTS:
        return None
    if not (isinstance(projection, Tensor) and isinstance(out, Tensor)):
        return None
    if not (isinstance(w13, Tensor) and isinstance(w2, Tensor)):
        return None
    if not (isinstance(shared_w13, Tensor) and isinstance(shared_w2, Tensor)):
        return None
    return OneTokenLayer(
        layer.input_norm, projection, layer.heads, out, norm, router, bias, w13, w2, shared_w13, shared_w2
    )
