"""The text configuration of MiniMax-M3 and M3.1-Flash, as published and as transformers writes it.

Which layers are sparse or have experts, how many experts a token uses and which blocks are forced differ between the
checkpoints of this family: they are read, never assumed. A value that the code cannot honour is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longturn.config import PAGE_TOKENS
from longturn.errors import ModelError
from longturn.models.config_reader import ConfigReader
from longturn.ops.moe import SwigluOai
from longturn.ops.msa_cpu import Selection
from longturn.ops.rope import Rope, rope_from_config

SPARSE_LAYER_TYPE, DENSE_LAYER_TYPE = "minimax_m3_sparse", "full_attention"

# What this code does without asking; anything else in a configuration is another model.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("swigluoai", "silu"),  # transformers writes silu and computes SwiGLU-OAI all the same
    "use_gemma_norm": (True,),
    "use_qk_norm": (True,),
    "qk_norm_type": ("per_head",),
    "attention_output_gate": (False,),
    "attention_bias": (False,),
    "sliding_window": (None,),
    "scoring_func": ("sigmoid",),
    "norm_topk_prob": (True,),
}
_OLD_INDEX_KEYS: Mapping[str, str] = {
    "index_n_heads": "sparse_num_index_heads",
    "index_head_dim": "sparse_index_dim",
    "index_block_size": "sparse_block_size",
    "index_topk_blocks": "sparse_topk_blocks",
    "index_local_blocks": "sparse_local_block",
    "index_init_blocks": "sparse_init_block",
}


@dataclass(frozen=True, slots=True)
class MiniMaxM3Config:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    norm_eps: float
    tied: bool
    """The head is the embedding table."""
    rope: Rope
    sparse_layers: tuple[bool, ...]
    """For each layer: block-sparse attention with an index branch, or dense attention."""
    moe_layers: tuple[bool, ...]
    """For each layer: experts, or a dense feed-forward."""
    dense_ffn: int
    expert_ffn: int
    shared_ffn: int
    """Width of the shared expert; 0 if there is none."""
    experts: int
    top_experts: int
    routed_scale: float
    """Factor on the routed experts' sum; the shared expert has none."""
    routing_bias: bool
    activation: SwigluOai
    index_dim: int
    selection: Selection

    @property
    def layers(self) -> int:
        return len(self.sparse_layers)

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def index_q_width(self) -> int:
        return self.kv_heads * self.index_dim


def minimax_m3_config(config: Mapping[str, Any]) -> MiniMaxM3Config:
    """Read a text configuration (`text_config` of config.json).

    Raises:
        ModelError: a value is missing or impossible, or asks for something that this family does not have.
    """
    read = ConfigReader(config)
    for key, allowed in _FIXED.items():
        read.must_be(key, allowed)
    layers, heads, kv_heads = (
        read.size(key) for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    )
    head_dim = read.size("head_dim")
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})")
    moe = _layer_flags(config, layers, "mlp_layer_types", "sparse", "dense", "moe_layer_freq", config)
    old = _old_sparse(config)
    sparse = _layer_flags(
        config, layers, "layer_types", SPARSE_LAYER_TYPE, DENSE_LAYER_TYPE, "sparse_attention_freq", old
    )
    if old.get("use_sparse_attention") is False:
        sparse = (False,) * layers
    rope = _rope(config, head_dim)
    index_dim, selection = _index(read, old, sparse, kv_heads, rope)
    routing_bias = bool(config.get("use_routing_bias", True))
    shared = read.size("n_shared_experts", 1, least=0)
    if shared > 1:
        raise ModelError(f"n_shared_experts {shared} is not supported (supported: 0 or 1)")
    experts, top = 0, 0
    if any(moe):
        # transformers has an alias for the first
        experts = read.size("num_local_experts" if "num_local_experts" in config else "num_experts")
        top = read.size("num_experts_per_tok")
        if top > experts:
            raise ModelError(f"num_experts_per_tok ({top}) is over the number of experts ({experts})")
    return MiniMaxM3Config(
        hidden=read.size("hidden_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=read.size("vocab_size"),
        norm_eps=read.number("rms_norm_eps", 1e-6),
        tied=bool(config.get("tie_word_embeddings", False)),
        rope=rope,
        sparse_layers=sparse,
        moe_layers=moe,
        dense_ffn=0 if all(moe) else read.size("dense_intermediate_size"),
        expert_ffn=read.size("intermediate_size") if any(moe) else 0,
        shared_ffn=read.size("shared_intermediate_size") if any(moe) and shared else 0,
        experts=experts,
        top_experts=top,
        routed_scale=read.number("routed_scaling_factor", 1.0),
        routing_bias=routing_bias,
        activation=SwigluOai(
            alpha=read.number("swiglu_alpha", 1.702),
            beta=read.number("swiglu_beta", 1.0),  # absent from the published files
            limit=read.number("swiglu_limit", 7.0),
        ),
        index_dim=index_dim,
        selection=selection,
    )


def _old_sparse(config: Mapping[str, Any]) -> Mapping[str, Any]:
    old = config.get("sparse_attention_config") or {}
    if not isinstance(old, Mapping):
        raise ModelError(f"sparse_attention_config must be a mapping, not {old!r}")
    return old


def _layer_flags(
    config: Mapping[str, Any], layers: int, new_key: str, yes: str, no: str, old_key: str, old: Mapping[str, Any]
) -> tuple[bool, ...]:
    """One flag a layer, from the new spelling (names) or the old one (0 and 1); if both are there they must agree."""
    found: dict[str, tuple[bool, ...]] = {}
    for key, value, allowed in (
        (new_key, config.get(new_key), {yes: True, no: False}),
        (old_key, old.get(old_key), {1: True, 0: False}),
    ):
        if value is None:
            continue
        if not isinstance(value, (list, tuple)) or any(entry not in allowed for entry in value):
            raise ModelError(f"{key} must be a list of {', '.join(map(repr, allowed))}, not {value!r}")
        if len(value) != layers:
            raise ModelError(f"{key} has {len(value)} entries for {layers} layers")
        found[key] = tuple(allowed[entry] for entry in value)
    if not found:
        # transformers' defaults describe no published model, so there is nothing sensible to assume.
        raise ModelError(f"the model's configuration has neither {new_key} nor {old_key}")
    if len(set(found.values())) > 1:
        raise ModelError(f"{new_key} and {old_key} disagree")
    return next(iter(found.values()))


def _rope(config: Mapping[str, Any], head_dim: int) -> Rope:
    """Rotation of the first `rotary_dim` channels, which transformers states as `partial_rotary_factor`."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    factor = parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    rotary_dim = config.get("rotary_dim")
    if factor is None:
        if not isinstance(rotary_dim, int):
            raise ModelError("the model's configuration has neither rotary_dim nor partial_rotary_factor")
        factor = rotary_dim / head_dim
    elif rotary_dim is not None and int(head_dim * factor) != rotary_dim:
        raise ModelError(f"rotary_dim {rotary_dim} and partial_rotary_factor {factor} of {head_dim} channels disagree")
    rope = rope_from_config({**config, "rope_parameters": {**parameters, "partial_rotary_factor": factor}}, head_dim)
    if not 0 < rope.rotary_dim <= head_dim:
        raise ModelError(f"rotary_dim {rope.rotary_dim} does not fit heads of {head_dim} channels")
    return rope


def _index(
    read: ConfigReader, old: Mapping[str, Any], sparse: tuple[bool, ...], kv_heads: int, rope: Rope
) -> tuple[int, Selection]:
    if not any(sparse):
        return 0, Selection(top=1)
    values: dict[str, Any] = {}
    for new_key, old_key in _OLD_INDEX_KEYS.items():
        new, older = read.config.get(new_key), old.get(old_key)
        if new is not None and older is not None and new != older:
            raise ModelError(f"{new_key} ({new}) and {old_key} ({older}) disagree")
        values[old_key if old else new_key] = new if older is None else older
    if not old and values["index_init_blocks"] is None:
        values["index_init_blocks"] = 0  # the new spelling has no such key, and no forced first blocks

    def size(new_key: str, least: int) -> int:
        return ConfigReader(values).size(_OLD_INDEX_KEYS[new_key] if old else new_key, least=least)

    index_dim = size("index_head_dim", 1)
    selection = Selection(size("index_topk_blocks", 1), size("index_init_blocks", 0), size("index_local_blocks", 0))
    if (block := size("index_block_size", 1)) != PAGE_TOKENS:
        raise ModelError(f"sparse blocks of {block} tokens are not supported (supported: {PAGE_TOKENS})")
    if (index_heads := size("index_n_heads", 1)) != kv_heads:
        raise ModelError(
            f"{index_heads} index heads for {kv_heads} key/value heads are not supported (one for each is)"
        )
    if index_dim < rope.rotary_dim:
        raise ModelError(f"index heads of {index_dim} channels are narrower than the rotation ({rope.rotary_dim})")
    if selection.init + selection.local > selection.top:
        raise ModelError(f"{selection.init} + {selection.local} forced blocks are over the {selection.top} chosen ones")
    ConfigReader(old).must_be("sparse_score_type", ("max",))
    disabled = old.get("sparse_disable_index_value")
    if disabled is not None and any(is_sparse and not off for is_sparse, off in zip(sparse, disabled, strict=False)):
        raise ModelError("sparse_disable_index_value is 0 for a sparse layer: an index value branch is not supported")
    return index_dim, selection
