"""MiniMax-M3 with random weights, without a checkpoint.

Scales are those of `make_checkpoint`: activations stay near one and routing is near even.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longturn.models.make_checkpoint import BIAS_STD, NORM_STD
from longturn.models.minimax_m3 import (
    AttentionWeights,
    MiniMaxM3,
    MiniMaxM3Layer,
    MlpWeights,
    MoeWeights,
    StackedExperts,
)
from longturn.models.minimax_m3_cache import minimax_m3_kv
from longturn.models.minimax_m3_config import MiniMaxM3Config


def random_minimax_m3(
    c: MiniMaxM3Config, *, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> MiniMaxM3:
    """A model of this configuration; the same seed, device and dtype give the same weights. Needs a shared expert."""
    generator = torch.Generator(device).manual_seed(seed)
    branch = (2 * c.layers) ** -0.5

    def weight(*shape: int, std: float | None = None) -> Tensor:
        out = torch.empty(shape, dtype=dtype, device=device)
        return out.normal_(0.0, shape[-1] ** -0.5 if std is None else std, generator=generator)

    def exact(*shape: int, std: float = NORM_STD) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device).normal_(0.0, std, generator=generator)

    def mlp(width: int) -> MlpWeights:
        return MlpWeights(weight(2 * width, c.hidden), weight(c.hidden, width, std=branch * width**-0.5))

    def attention(sparse: bool) -> AttentionWeights:
        rows = c.q_width + 2 * c.kv_width + (c.index_q_width + c.index_dim if sparse else 0)
        return AttentionWeights(
            projection=weight(rows, c.hidden),
            q_norm=exact(c.head_dim),
            k_norm=exact(c.head_dim),
            index_q_norm=exact(c.index_dim) if sparse else None,
            index_k_norm=exact(c.index_dim) if sparse else None,
            out=weight(c.hidden, c.q_width, std=branch * c.q_width**-0.5),
        )

    def moe() -> MoeWeights:
        gate = exact(c.experts, c.hidden, std=1.0)
        experts = StackedExperts(
            weight(c.experts, 2 * c.expert_ffn, c.hidden),
            weight(c.experts, c.hidden, c.expert_ffn, std=branch * c.expert_ffn**-0.5),
        )
        gate /= gate.norm(dim=-1, keepdim=True)
        return MoeWeights(gate, exact(c.experts, std=BIAS_STD), experts, mlp(c.shared_ffn))

    layers = tuple(
        MiniMaxM3Layer(exact(c.hidden), attention(sparse), exact(c.hidden), moe() if routed else mlp(c.dense_ffn))
        for sparse, routed in zip(c.sparse_layers, c.moe_layers, strict=True)
    )
    embedding = weight(c.vocab_size, c.hidden, std=1.0)
    head = embedding if c.tied else weight(c.vocab_size, c.hidden)
    return MiniMaxM3(c, embedding, layers, exact(c.hidden), head, minimax_m3_kv(c, dtype))
