"""Which layers of MiniMax-M3 a decode step of one row takes in one launch (kernels/one_token.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from longturn.kernels.msa_plan import MsaShape
from longturn.kernels.one_token import TOP_EXPERTS, OneTokenLayer, OneTokenWeights
from longturn.models.minimax_m3_gpu_weights import GpuLayer


@dataclass(frozen=True)
class OneTokenRun:
    """The last layers of a model, from `first` on."""

    first: int
    weights: OneTokenWeights


def one_token_run(layers: Sequence[GpuLayer], shape: MsaShape, cache: Tensor) -> OneTokenRun | None:
    """The longest run up to the last layer whose layers have sparse attention, experts and plain weights; None if there
    is none, or the kernel does not serve such layers."""
    taken: list[OneTokenLayer] = []
    for layer in reversed(layers):
        made = _as_one_token(layer)
        if made is None:
            break
        taken.insert(0, made)
    first = len(layers) - len(taken)
    weights = OneTokenWeights.of(taken, first, shape, cache)
    return None if weights is None else OneTokenRun(first, weights)


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
