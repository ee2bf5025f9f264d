"""The text model of MiniMax-M3 and M3.1-Flash: block-sparse attention (MSA, arXiv:2606.13392) and a mixture of experts.

`minimax_m3_config.py` reads the configuration, `minimax_m3_load.py` the weights, `minimax_m3_cache.py` lays out the
pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from longturn.models.base import KVSpec, ModelStep
from longturn.models.minimax_m3_cache import LayerLanes, layer_lanes
from longturn.models.minimax_m3_config import MiniMaxM3Config
from longturn.ops.attention import AttentionPlan, plan_attention
from longturn.ops.gemma_norm import gemma_rms_norm
from longturn.ops.linear import embed, linear
from longturn.ops.moe import expert, route, swiglu_oai
from longturn.ops.msa_cpu import dense_paged_attention, sparse_paged_attention
from longturn.ops.mxfp8 import Mxfp8Weight
from longturn.ops.nvfp4 import Nvfp4Weight
from longturn.ops.rope import apply_rope, rope_cos_sin

PackedWeight = Nvfp4Weight | Mxfp8Weight

# --- layer -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """[out, in] each; norms are raw, around zero."""

    projection: Tensor
    """Rows of q, k, v, and in sparse layers index q and index k: one product for all."""
    q_norm: Tensor
    k_norm: Tensor
    """[head_dim]."""
    index_q_norm: Tensor | None
    index_k_norm: Tensor | None
    """[index_dim], in sparse layers."""
    out: Tensor


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """A feed-forward, gate rows first."""

    gate_up: Tensor
    """[2 * width, hidden]."""
    down: Tensor
    """[hidden, width]."""


class Experts(Protocol):
    """The routed experts of one layer."""

    def w13(self, number: int) -> Tensor:
        """Gate rows, then up rows: [2 * width, hidden]."""
        ...

    def w2(self, number: int) -> Tensor:
        """[hidden, width]."""
        ...


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Experts as two tensors in the model's dtype."""

    gate_up: Tensor
    """[experts, 2 * width, hidden]."""
    down: Tensor
    """[experts, hidden, width]."""

    def w13(self, number: int) -> Tensor:
        return self.gate_up[number]

    def w2(self, number: int) -> Tensor:
        return self.down[number]


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Experts as they are stored, dequantised to fp32 each time one is used: slow, and a seventh of fp32's memory."""

    gate: tuple[PackedWeight, ...]
    up: tuple[PackedWeight, ...]
    down: tuple[PackedWeight, ...]

    def w13(self, number: int) -> Tensor:
        return torch.cat((self.gate[number].dequantize(), self.up[number].dequantize()))

    def w2(self, number: int) -> Tensor:
        return self.down[number].dequantize()


@dataclass(frozen=True, slots=True)
class MoeWeights:
    gate: Tensor
    """fp32 [experts, hidden]."""
    bias: Tensor
    """fp32 [experts]: chooses experts and weighs nothing."""
    experts: Experts
    shared: MlpWeights | None


@dataclass(frozen=True, slots=True)
class MiniMaxM3Layer:
    attention_norm: Tensor
    attention: AttentionWeights
    mlp_norm: Tensor
    mlp: MlpWeights | MoeWeights


def attention(
    c: MiniMaxM3Config,
    w: AttentionWeights,
    x: Tensor,
    turn: tuple[Tensor, Tensor],
    plan: AttentionPlan,
    lanes: LayerLanes,
) -> Tensor:
    """Self-attention of one layer.

    Args:
        x: normalised input [T, hidden].
        turn: cosine and sine of the step's positions.
        plan: from `plan_attention`.
        lanes: this layer's pages; the step's keys, values and index keys are written to them.

    Returns:
        [T, hidden].
    """
    widths = [c.q_width, c.kv_width, c.kv_width]
    if lanes.index_key is not None:
        widths += [c.index_q_width, c.index_dim]
    q, k, v, *index = torch.split(linear(x, w.projection), widths, dim=-1)
    q, k, v = (part.reshape(len(x), -1, c.head_dim) for part in (q, k, v))
    q = apply_rope(gemma_rms_norm(q, w.q_norm, c.norm_eps), *turn)
    k = apply_rope(gemma_rms_norm(k, w.k_norm, c.norm_eps), *turn)
    lanes.key.write(plan.pages, plan.offsets, k)
    lanes.value.write(plan.pages, plan.offsets, v)
    if lanes.index_key is None or w.index_q_norm is None or w.index_k_norm is None:
        mixed = dense_paged_attention(plan, q, lanes.key, lanes.value)
    else:
        index_q, index_k = (part.reshape(len(x), -1, c.index_dim) for part in index)
        index_q = apply_rope(gemma_rms_norm(index_q, w.index_q_norm, c.norm_eps), *turn)
        index_k = apply_rope(gemma_rms_norm(index_k, w.index_k_norm, c.norm_eps), *turn)
        lanes.index_key.write(plan.pages, plan.offsets, index_k)
        mixed = sparse_paged_attention(plan, q, index_q, lanes.key, lanes.value, lanes.index_key, c.selection)
    return linear(mixed.flatten(1), w.out)


def mlp(c: MiniMaxM3Config, w: MlpWeights, x: Tensor) -> Tensor:
    """SwiGLU-OAI feed-forward of normalised x [T, hidden]."""
    gate, up = linear(x, w.gate_up).chunk(2, dim=-1)
    return linear(swiglu_oai(gate, up, c.activation).to(x.dtype), w.down)


def mixture(c: MiniMaxM3Config, w: MoeWeights, x: Tensor) -> Tensor:
    """Routed experts and the shared one, for normalised x [T, hidden]. Sums are fp32."""
    routing = route(x, w.gate, w.bias, c.top_experts, c.routed_scale)
    out = torch.zeros(x.shape, dtype=torch.float32) if w.shared is None else mlp(c, w.shared, x).float()
    for number in torch.unique(routing.experts).tolist():
        token, slot = (routing.experts == number).nonzero(as_tuple=True)
        part = expert(x[token], w.experts.w13(number), w.experts.w2(number), c.activation)
        out.index_add_(0, token, part * routing.weights[token, slot][:, None])
    return out.to(x.dtype)


# --- model -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MiniMaxM3:
    """A loaded model; implements `models.base.CausalModel`."""

    config: MiniMaxM3Config
    embedding: Tensor
    """[vocab_size, hidden]."""
    layers: tuple[MiniMaxM3Layer, ...]
    norm: Tensor
    head: Tensor
    """[vocab_size, hidden]; the embedding itself if tied."""
    kv: KVSpec

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @torch.inference_mode()
    def forward(self, step: ModelStep, cache: Tensor) -> Tensor:
        c = self.config
        plan = plan_attention(step.rows, step.positions)
        turn = rope_cos_sin(step.positions, c.rope)
        x = embed(step.token_ids, self.embedding)
        for index, layer in enumerate(self.layers):
            lanes = layer_lanes(self.kv, cache, index)
            normal = gemma_rms_norm(x, layer.attention_norm, c.norm_eps)
            x = x + attention(c, layer.attention, normal, turn, plan, lanes)
            normal = gemma_rms_norm(x, layer.mlp_norm, c.norm_eps)
            w = layer.mlp
            x = x + (mixture(c, w, normal) if isinstance(w, MoeWeights) else mlp(c, w, normal))
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return linear(gemma_rms_norm(hidden, self.norm, self.config.norm_eps), self.head).to(torch.float32)
