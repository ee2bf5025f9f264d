"""What distinguishes one Llama-type dense model from another, read from a Hugging Face configuration. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longturn.errors import ModelError
from longturn.models.config_reader import ConfigReader
from longturn.ops.rope_frequencies import RopeFrequencies, rope_frequencies


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    hidden: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    tied: bool
    """The head is the embedding table."""
    qkv_bias: bool
    out_bias: bool
    """Bias on the output projection of attention."""
    mlp_bias: bool
    qk_norm: bool
    """RMSNorm over each head of queries and keys, before rotation."""
    rope: RopeFrequencies

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


def llama_config(architecture: str, config: Mapping[str, Any]) -> LlamaConfig:
    """Read a Hugging Face configuration.

    Args:
        architecture: `LlamaForCausalLM`, `Qwen2ForCausalLM` or `Qwen3ForCausalLM`.
        config: the contents of config.json.

    Raises:
        ModelError: a dimension is missing or impossible, or the model uses something that this family does not have.
    """

    size = ConfigReader(config).size
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"activation '{activation}' is not supported (silu is)")
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise ModelError("sliding-window attention is not supported (set use_sliding_window to false)")
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    kv_heads = size("num_key_value_heads", heads)
    head_dim = size("head_dim", 128 if architecture == "Qwen3ForCausalLM" else hidden // heads)
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})")
    qwen2 = architecture == "Qwen2ForCausalLM"  # biases on q, k, v alone, whatever its configuration says
    bias = bool(config.get("attention_bias", False))
    return LlamaConfig(
        hidden=hidden,
        ffn=size("intermediate_size"),
        layers=size("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=size("vocab_size"),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qwen2 or bias,
        out_bias=bias and not qwen2,
        mlp_bias=architecture == "LlamaForCausalLM" and bool(config.get("mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        rope=rope_frequencies(config, head_dim),
    )
