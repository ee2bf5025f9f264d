"""What the cost model needs to know of a model: sizes, read from the text part of a Hugging Face `config.json`.

Weights are never read, and nothing is assumed that the file should say: a missing key is one line that names it.
The presets in `models/*.json` are such files, cut to the keys that matter here, each with its sources.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longturn.errors import ConfigError

_PRESETS = Path(__file__).parent / "models"
DENSE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures whose layers all are grouped-query attention over everything and a gated feed-forward."""
_OTHER_KINDS = ("kv_lora_rank", "num_local_experts", "num_experts", "n_routed_experts", "moe_layer_freq")
"""Keys of models that are not dense, or whose attention compresses its keys."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model of the MiniMax-M3 family, or of a dense one of Llama's kind. Widths are elements."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    sparse_layers: int
    """Layers with block-sparse attention and an index; the others attend to everything."""
    index_dim: int
    index_heads: int
    top_blocks: int
    """Blocks that one query attends to in a sparse layer, forced ones included."""
    block_tokens: int
    moe_layers: int
    """Layers with experts; the others have a dense feed-forward."""
    experts: int
    top_experts: int
    expert_ffn: int
    shared_ffn: int
    """Width of the shared expert; 0 if there is none."""
    dense_ffn: int
    max_context: int
    tied: bool = False
    """The head is the embedding table."""

    @property
    def dense_layers(self) -> int:
        """Layers whose attention is dense."""
        return self.layers - self.sparse_layers

    @property
    def attend_limit(self) -> int:
        """Most tokens that a query of a sparse layer attends to."""
        return self.top_blocks * self.block_tokens


def model_shape(config: Mapping[str, Any], name: str) -> ModelShape:
    """Read a configuration: the whole file, or its `text_config`.

    Raises:
        ConfigError: a key is missing or has an impossible value; the line names the model and the key.
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ConfigError(f"model {name}: text_config must be a mapping")
    architecture = _architecture(config, text)
    if architecture in DENSE or (architecture is None and not any(key in text for key in _OTHER_KINDS)):
        return _dense_shape(text, name)
    if architecture is not None and "moe_layer_freq" not in text:
        raise ConfigError(
            f"model {name}: architecture '{architecture}' is not known to the cost model (MiniMax-M3's family, and "
            f"dense: {', '.join(DENSE)})"
        )
    sparse = text.get("sparse_attention_config") or {}
    layers = _size(text, "num_hidden_layers", name)
    sparse_flags = _flags(sparse, "sparse_attention_freq", layers, name) if sparse else (0,) * layers
    moe_flags = _flags(text, "moe_layer_freq", layers, name)
    has_sparse, has_moe, has_dense = any(sparse_flags), any(moe_flags), not all(moe_flags)
    shape = ModelShape(
        name=name,
        hidden=_size(text, "hidden_size", name),
        layers=layers,
        heads=_size(text, "num_attention_heads", name),
        kv_heads=_size(text, "num_key_value_heads", name),
        head_dim=_size(text, "head_dim", name),
        vocab=_size(text, "vocab_size", name),
        sparse_layers=sum(sparse_flags),
        index_dim=_size(sparse, "sparse_index_dim", name) if has_sparse else 0,
        index_heads=_size(sparse, "sparse_num_index_heads", name) if has_sparse else 0,
        top_blocks=_size(sparse, "sparse_topk_blocks", name) if has_sparse else 0,
        block_tokens=_size(sparse, "sparse_block_size", name) if has_sparse else 1,
        moe_layers=sum(moe_flags),
        experts=_size(text, "num_local_experts", name) if has_moe else 0,
        top_experts=_size(text, "num_experts_per_tok", name) if has_moe else 0,
        expert_ffn=_size(text, "intermediate_size", name) if has_moe else 0,
        shared_ffn=_shared(text, name) if has_moe else 0,
        dense_ffn=_size(text, "dense_intermediate_size", name) if has_dense else 0,
        max_context=_size(text, "max_position_embeddings", name),
    )
    _check_heads(shape)
    if shape.top_experts > shape.experts:
        raise ConfigError(f"model {name}: num_experts_per_tok {shape.top_experts} is over {shape.experts} experts")
    return shape


def _dense_shape(text: Mapping[str, Any], name: str) -> ModelShape:
    layer_types = text.get("layer_types")
    windowed = text.get("use_sliding_window", text.get("sliding_window") is not None and layer_types is None)
    if windowed or "sliding_attention" in (layer_types or ()):
        raise ConfigError(f"model {name}: the cost model has no sliding-window attention")
    hidden, heads = _size(text, "hidden_size", name), _size(text, "num_attention_heads", name)
    shape = ModelShape(
        name=name,
        hidden=hidden,
        layers=_size(text, "num_hidden_layers", name),
        heads=heads,
        kv_heads=_size(text, "num_key_value_heads", name) if text.get("num_key_value_heads") is not None else heads,
        head_dim=_size(text, "head_dim", name) if text.get("head_dim") is not None else hidden // heads,
        vocab=_size(text, "vocab_size", name),
        sparse_layers=0,
        index_dim=0,
        index_heads=0,
        top_blocks=0,
        block_tokens=1,
        moe_layers=0,
        experts=0,
        top_experts=0,
        expert_ffn=0,
        shared_ffn=0,
        dense_ffn=_size(text, "intermediate_size", name),
        max_context=_size(text, "max_position_embeddings", name),
        tied=bool(text.get("tie_word_embeddings", False)),
    )
    _check_heads(shape)
    return shape


def _architecture(config: Mapping[str, Any], text: Mapping[str, Any]) -> str | None:
    """The first architecture that is named, or None."""
    for part in (config, text):
        names = part.get("architectures")
        if isinstance(names, list) and names and isinstance(names[0], str):
            return names[0]
    return None


def _check_heads(shape: ModelShape) -> None:
    if shape.heads % shape.kv_heads:
        raise ConfigError(
            f"model {shape.name}: {shape.heads} heads are not a multiple of {shape.kv_heads} key/value heads"
        )


def load_shape(name: str) -> ModelShape:
    """A preset by name, or a `config.json` (or a directory that holds one) by path.

    Raises:
        ConfigError: there is no such preset or file, or it does not hold what the cost model needs.
    """
    path = _PRESETS / f"{name}.json"
    if not path.is_file():
        path = Path(name)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise ConfigError(f"unknown model '{name}' (a config.json, or one of: {', '.join(preset_names())})")
        name = path.parent.name if path.name == "config.json" else path.stem
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {path}: cannot be read as JSON ({error})") from None
    if not isinstance(config, dict):
        raise ConfigError(f"model {path}: not a JSON object")
    return model_shape(config, name)


def preset_names() -> tuple[str, ...]:
    """Names of the models that ship with Longturn."""
    return tuple(sorted(path.stem for path in _PRESETS.glob("*.json")))


def _size(config: Mapping[str, Any], key: str, name: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"model {name}: the cost model needs {key} (it is {value!r})")
    return value


def _shared(config: Mapping[str, Any], name: str) -> int:
    return _size(config, "shared_intermediate_size", name) if config.get("n_shared_experts") else 0


def _flags(config: Mapping[str, Any], key: str, layers: int, name: str) -> tuple[int, ...]:
    value = config.get(key)
    if not isinstance(value, list) or len(value) != layers or any(entry not in (0, 1) for entry in value):
        raise ConfigError(f"model {name}: the cost model needs {key}, a list of {layers} zeros and ones")
    return tuple(value)
