"""Llama, Qwen2 and Qwen3 dense decoders: the same model but for biases and the norm of queries and keys.

Llama: Touvron et al., 2023, arXiv:2302.13971 and arXiv:2407.21783. Qwen2: arXiv:2407.10671. Qwen3: arXiv:2505.09388.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from longturn.config import PAGE_TOKENS
from longturn.models.base import KVLane, KVSpec, ModelStep
from longturn.models.checkpoint.base import CheckedReader, Checkpoint
from longturn.models.llama_config import LlamaConfig
from longturn.ops.attention import AttentionPlan, paged_attention, plan_attention, write_kv
from longturn.ops.linear import embed, linear, swiglu
from longturn.ops.norm import rms_norm
from longturn.ops.rope import Rope, apply_rope, rope_cos_sin, rope_of

# --- layer -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LlamaLayer:
    """Weights of one layer, [out, in]."""

    attention_norm: Tensor
    qkv: Tensor
    """Queries, keys, values one after the other: [q_width + 2 * kv_width, hidden]."""
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    """[head_dim]."""
    out: Tensor
    out_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    """[2 * ffn, hidden]."""
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


def attention(
    c: LlamaConfig,
    layer: LlamaLayer,
    x: Tensor,
    turn: tuple[Tensor, Tensor],
    plan: AttentionPlan,
    kv: tuple[Tensor, Tensor],
) -> Tensor:
    """Self-attention of one layer.

    Args:
        x: normalised input [T, hidden].
        turn: cosine and sine of the step's positions.
        plan: from `plan_attention`.
        kv: this layer's key and value pages, [pages, kv_heads, 128, head_dim]; the step's are written to them.

    Returns:
        [T, hidden].
    """
    qkv = linear(x, layer.qkv, layer.qkv_bias).view(len(x), -1, c.head_dim)
    q, k, v = torch.split(qkv, [c.heads, c.kv_heads, c.kv_heads], dim=1)
    if layer.q_norm is not None and layer.k_norm is not None:
        q, k = rms_norm(q, layer.q_norm, c.norm_eps), rms_norm(k, layer.k_norm, c.norm_eps)
    q, k = apply_rope(q, *turn), apply_rope(k, *turn)
    write_kv(plan, k, v, *kv)
    mixed = paged_attention(plan, q, *kv)
    return linear(mixed.flatten(1), layer.out, layer.out_bias)


def mlp(layer: LlamaLayer, x: Tensor) -> Tensor:
    """SwiGLU feed-forward of normalised x [T, hidden]."""
    return linear(swiglu(linear(x, layer.gate_up, layer.gate_up_bias)), layer.down, layer.down_bias)


# --- model -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Llama:
    """A loaded model; implements `models.base.CausalModel`."""

    config: LlamaConfig
    embedding: Tensor
    """[vocab_size, hidden]."""
    layers: tuple[LlamaLayer, ...]
    norm: Tensor
    head: Tensor
    """[vocab_size, hidden]; the embedding itself if tied."""
    rope: Rope
    kv: KVSpec

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @torch.inference_mode()
    def forward(self, step: ModelStep, cache: Tensor) -> Tensor:
        c = self.config
        plan = plan_attention(step.rows, step.positions, self.norm.dtype)
        turn = rope_cos_sin(step.positions, self.rope)
        x = embed(step.token_ids, self.embedding)
        for index, layer in enumerate(self.layers):
            pages = (self.kv.view(cache, index, 0), self.kv.view(cache, index, 1))
            x = x + attention(c, layer, rms_norm(x, layer.attention_norm, c.norm_eps), turn, plan, pages)
            x = x + mlp(layer, rms_norm(x, layer.mlp_norm, c.norm_eps))
        return x

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        return linear(rms_norm(hidden, self.norm, self.config.norm_eps), self.head).to(torch.float32)


def llama_kv(c: LlamaConfig, dtype: torch.dtype) -> KVSpec:
    """Two lanes a layer: keys and values, [kv_heads, 128, head_dim]."""
    shape = (c.kv_heads, PAGE_TOKENS, c.head_dim)
    return KVSpec(((KVLane("key", shape, dtype), KVLane("value", shape, dtype)),) * c.layers)


# --- weight mapping --------------------------------------------------------------------------------------------------


def load_llama(c: LlamaConfig, checkpoint: Checkpoint, *, dtype: torch.dtype, kv_dtype: torch.dtype) -> Llama:
    """Read the weights, converted to `dtype`.

    Raises:
        ModelError: a tensor is missing, has the wrong shape, or has no place in the model.
    """
    reader = CheckedReader(checkpoint)

    def load(name: str, *shape: int) -> Tensor:
        return reader.load(name, *shape).to(dtype)

    def stack(prefix: str, parts: Mapping[str, int], width: int) -> Tensor:
        return torch.cat([load(f"{prefix}.{part}.weight", rows, width) for part, rows in parts.items()])

    def biases(prefix: str, parts: Mapping[str, int], present: bool) -> Tensor | None:
        return torch.cat([load(f"{prefix}.{part}.bias", rows) for part, rows in parts.items()]) if present else None

    qkv = {"self_attn.q_proj": c.q_width, "self_attn.k_proj": c.kv_width, "self_attn.v_proj": c.kv_width}
    out, down = {"self_attn.o_proj": c.hidden}, {"mlp.down_proj": c.hidden}
    gate_up = {"mlp.gate_proj": c.ffn, "mlp.up_proj": c.ffn}
    layers = []
    for index in range(c.layers):
        at = f"model.layers.{index}"
        layers.append(
            LlamaLayer(
                attention_norm=load(f"{at}.input_layernorm.weight", c.hidden),
                qkv=stack(at, qkv, c.hidden),
                qkv_bias=biases(at, qkv, c.qkv_bias),
                q_norm=load(f"{at}.self_attn.q_norm.weight", c.head_dim) if c.qk_norm else None,
                k_norm=load(f"{at}.self_attn.k_norm.weight", c.head_dim) if c.qk_norm else None,
                out=stack(at, out, c.q_width),
                out_bias=biases(at, out, c.out_bias),
                mlp_norm=load(f"{at}.post_attention_layernorm.weight", c.hidden),
                gate_up=stack(at, gate_up, c.hidden),
                gate_up_bias=biases(at, gate_up, c.mlp_bias),
                down=stack(at, down, c.ffn),
                down_bias=biases(at, down, c.mlp_bias),
            )
        )
    embedding = load("model.embed_tokens.weight", c.vocab_size, c.hidden)
    if c.tied:
        reader.ignore("lm_head.weight")
    head = embedding if c.tied else load("lm_head.weight", c.vocab_size, c.hidden)
    norm = load("model.norm.weight", c.hidden)
    reader.finish()
    return Llama(c, embedding, tuple(layers), norm, head, rope_of(c.rope), llama_kv(c, kv_dtype))
