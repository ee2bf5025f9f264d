"""MiniMax-M3 checkpoints with random weights, in the published names and formats: models for tests and benchmarks.

Weights are scaled so that activations stay near one and the router, whose rows have one length, chooses experts
evenly: a benchmark then reads as many different experts as a trained and balanced model would.
"""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longturn.errors import ConfigError, ModelError
from longturn.models.checkpoint.quant_config import Format
from longturn.models.checkpoint.scheme import Scheme
from longturn.models.checkpoint.write import SHARD_BYTES, ShardWriter, new_directory, write_json
from longturn.models.minimax_m3_config import MiniMaxM3Config, minimax_m3_config
from longturn.models.small_tokenizer import special_ids, write_tokenizer

PREFIX = "language_model."
DRAW_ELEMENTS = 1 << 24
"""Values drawn at once, in fp32: an embedding table of this precision would take gigabytes."""
_UNITS = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
NORM_STD = 0.02
BIAS_STD = 1e-3
"""Of the router's selection bias: enough to break ties, too little to favour an expert."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A shape. All have block-sparse attention from `dense_attention` on and experts from `dense_mlp` on."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    index_dim: int
    top_blocks: int
    dense_ffn: int
    expert_ffn: int
    experts: int
    top_experts: int
    vocab_size: int
    context: int
    dense_mlp: int = 1
    """Layers at the start without experts."""
    dense_attention: int = 0
    """Layers at the start with dense attention."""
    scheme: Scheme = field(default_factory=Scheme)
    """What is written unless something else is asked for."""


PRESETS: Mapping[str, Preset] = {
    # One dense layer of each kind, and a choice of 4 blocks, so that 513 tokens are enough to be sparse.
    "tiny": Preset(128, 4, 4, 2, 32, 16, 32, 4, 256, 64, 8, 2, 1024, 65536, dense_attention=1),
    "mini60": Preset(2048, 60, 32, 4, 128, 64, 128, 16, 6144, 512, 128, 4, 200064, 1048576),
    "slice8": Preset(6144, 8, 64, 4, 128, 64, 128, 16, 12288, 3072, 128, 4, 200064, 1048576),
    "m3.1-flash": Preset(
        6144, 60, 64, 4, 128, 64, 128, 16, 12288, 3072, 128, 4, 200064, 1048576, dense_mlp=3,
        scheme=Scheme(experts="nvfp4", dense="mxfp8"),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Made:
    """What was written."""

    path: Path
    tensors: int
    parameters: int
    bytes: int


def preset_config(preset: Preset, layers: int | None = None) -> dict[str, Any]:
    """config.json of a preset, with its first `layers` layers if that is given."""
    count = layers or preset.layers
    ids = special_ids(preset.vocab_size)
    moe = [int(index >= preset.dense_mlp) for index in range(count)]
    sparse = [int(index >= preset.dense_attention) for index in range(count)]
    text = {
        "architectures": ["MiniMaxM3SparseForCausalLM"],
        "vocab_size": preset.vocab_size,
        "hidden_size": preset.hidden,
        "num_hidden_layers": count,
        "num_attention_heads": preset.heads,
        "num_key_value_heads": preset.kv_heads,
        "head_dim": preset.head_dim,
        "max_position_embeddings": preset.context,
        "rms_norm_eps": 1e-6,
        "use_gemma_norm": True,
        "attention_output_gate": False,
        "rope_theta": 5000000.0,
        "rotary_dim": preset.rotary_dim,
        "partial_rotary_factor": preset.rotary_dim / preset.head_dim,
        "hidden_act": "swigluoai",
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
        "use_qk_norm": True,
        "qk_norm_type": "per_head",
        "tie_word_embeddings": False,
        "intermediate_size": preset.expert_ffn,
        "dense_intermediate_size": preset.dense_ffn,
        "shared_intermediate_size": preset.expert_ffn,
        "num_local_experts": preset.experts,
        "num_experts_per_tok": preset.top_experts,
        "n_shared_experts": 1,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "routed_scaling_factor": 2.0,
        "moe_layer_freq": moe,
        "sparse_attention_config": {
            "use_sparse_attention": True,
            "sparse_index_dim": preset.index_dim,
            "sparse_num_index_heads": preset.kv_heads,
            "sparse_topk_blocks": preset.top_blocks,
            "sparse_block_size": 128,
            "sparse_score_type": "max",
            "sparse_init_block": 0,
            "sparse_local_block": 1,
            "sparse_attention_freq": sparse,
            "sparse_disable_index_value": sparse,
        },
        "bos_token_id": ids["bos_token_id"],
        "eos_token_id": ids["eos_token_id"],
    }
    return {
        "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
        "model_type": "minimax_m3_vl",
        "torch_dtype": "bfloat16",
        "image_token_index": ids["image_token_index"],
        "video_token_index": ids["video_token_index"],
        "text_config": text,
    }


@dataclass(frozen=True, slots=True)
class _Spec:
    """One tensor to make."""

    name: str
    shape: tuple[int, ...]
    std: float
    dtype: torch.dtype = torch.bfloat16
    unit_rows: bool = False
    """Rows are scaled to length one."""
    pair: str | None = None
    """Another tensor that shares its scale when quantised."""


def tensor_specs(c: MiniMaxM3Config) -> Iterator[_Spec]:
    """Every tensor of a model under its published name, layer by layer."""
    # Each layer adds two branches to the residual stream; so scaled, they add up to about the embedding's size.
    branch = (2 * c.layers) ** -0.5

    def weight(name: str, rows: int, width: int, factor: float = 1.0, pair: str | None = None) -> _Spec:
        other = None if pair is None else f"{PREFIX}{pair}.weight"
        return _Spec(f"{PREFIX}{name}.weight", (rows, width), factor * width**-0.5, pair=other)

    def norm(name: str, width: int) -> _Spec:
        return _Spec(f"{PREFIX}{name}.weight", (width,), NORM_STD)

    def mlp(at: str, width: int) -> Iterator[_Spec]:
        yield weight(f"{at}.gate_proj", width, c.hidden)
        yield weight(f"{at}.up_proj", width, c.hidden)
        yield weight(f"{at}.down_proj", c.hidden, width, branch)

    yield _Spec(f"{PREFIX}model.embed_tokens.weight", (c.vocab_size, c.hidden), 1.0)
    for index in range(c.layers):
        at = f"model.layers.{index}"
        yield norm(f"{at}.input_layernorm", c.hidden)
        yield norm(f"{at}.post_attention_layernorm", c.hidden)
        attention = f"{at}.self_attn"
        rows = {"q_proj": c.q_width, "k_proj": c.kv_width, "v_proj": c.kv_width}
        norms = {"q_norm": c.head_dim, "k_norm": c.head_dim}
        if c.sparse_layers[index]:
            rows |= {"index_q_proj": c.index_q_width, "index_k_proj": c.index_dim}
            norms |= {"index_q_norm": c.index_dim, "index_k_norm": c.index_dim}
        for name, count in rows.items():
            yield weight(f"{attention}.{name}", count, c.hidden)
        for name, width in norms.items():
            yield norm(f"{attention}.{name}", width)
        yield weight(f"{attention}.o_proj", c.hidden, c.q_width, branch)
        if not c.moe_layers[index]:
            yield from mlp(f"{at}.mlp", c.dense_ffn)
            continue
        moe = f"{at}.block_sparse_moe"
        yield _Spec(f"{PREFIX}{moe}.gate.weight", (c.experts, c.hidden), 1.0, torch.float32, unit_rows=True)
        yield _Spec(f"{PREFIX}{moe}.e_score_correction_bias", (c.experts,), BIAS_STD, torch.float32)
        for number in range(c.experts):
            one = f"{moe}.experts.{number}"
            yield weight(f"{one}.w1", c.expert_ffn, c.hidden, pair=f"{one}.w3")
            yield weight(f"{one}.w2", c.hidden, c.expert_ffn, branch)
            yield weight(f"{one}.w3", c.expert_ffn, c.hidden, pair=f"{one}.w1")
        if c.shared_ffn:
            yield from mlp(f"{moe}.shared_experts", c.shared_ffn)
    yield norm("model.norm", c.hidden)
    yield weight("lm_head", c.vocab_size, c.hidden)


def make_checkpoint(
    path: Path,
    preset_name: str,
    *,
    seed: int = 0,
    layers: int | None = None,
    scheme: Scheme | None = None,
    progress: Callable[[int, int, str], None] = lambda done, planned, name: None,
    shard_bytes: int = SHARD_BYTES,
) -> Made:
    """Write a random checkpoint of a preset's shape.

    Args:
        path: a directory that does not exist.
        preset_name: one of `PRESETS`.
        seed: the same seed gives the same weights, whatever the layer count and shard size.
        layers: only so many first layers.
        scheme: formats; the preset's own if None.
        progress: called with tensors done, tensors in all, and the name of the last one.
        shard_bytes: size of a file, and about what is held in memory.

    Raises:
        ConfigError: there is no such preset, or the directory exists.
        ModelError: it does not fit on the disk, or cannot be written.
    """
    if preset_name not in PRESETS:
        raise ConfigError(f"unknown preset '{preset_name}' (known: {', '.join(PRESETS)})")
    preset = PRESETS[preset_name]
    if layers is not None and not 1 <= layers <= preset.layers:
        raise ConfigError(f"--layers is {layers}, but preset {preset_name} has 1 to {preset.layers}")
    scheme = scheme or preset.scheme
    config = preset_config(preset, layers)
    specs = list(tensor_specs(minimax_m3_config(config["text_config"])))
    _check_space(path, specs, scheme)
    with new_directory(path) as partial:
        writer = ShardWriter(partial, shard_bytes)
        kept: dict[str, tuple[Tensor, float]] = {}  # the other of a pair, until its turn comes
        for done, spec in enumerate(specs, 1):
            if spec.name in kept:
                values, largest = kept.pop(spec.name)
            else:
                values, largest = _values(spec.name, spec, seed), None
                if spec.pair is not None and scheme.format_of(spec.name) == Format.NVFP4:
                    other = _values(spec.pair, spec, seed)
                    largest = max(float(values.abs().amax()), float(other.abs().amax()))
                    kept[spec.pair] = (other, largest)
            for name, tensor in scheme.encode(spec.name, values, largest).items():
                writer.add(name, tensor)
            progress(done, len(specs), spec.name)
        writer.finish()
        if (declared := scheme.declare([spec.name for spec in specs])) is not None:
            config["quantization_config"] = declared
        write_json(partial / "config.json", config)
        ids = {key: config["text_config"][key] for key in ("bos_token_id", "eos_token_id")}
        write_json(partial / "generation_config.json", {**ids, "temperature": 1.0, "top_p": 0.95, "top_k": 40})
        write_tokenizer(partial, preset.vocab_size)
    parameters = sum(math.prod(spec.shape) for spec in specs)
    return Made(path, len(specs), parameters, writer.total_bytes)


def _values(name: str, spec: _Spec, seed: int) -> Tensor:
    """Values that depend on the seed and the tensor's name alone."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    values = torch.empty(spec.shape, dtype=spec.dtype)
    rows = max(1, DRAW_ELEMENTS // math.prod(spec.shape[1:]))
    for part in torch.split(values, rows):
        drawn = torch.empty(part.shape).normal_(0.0, spec.std, generator=generator)
        if spec.unit_rows:
            drawn /= drawn.norm(dim=-1, keepdim=True)
        part.copy_(drawn)
    return values


def _check_space(path: Path, specs: list[_Spec], scheme: Scheme) -> None:
    bytes_of = {None: 2.0, Format.PLAIN: 2.0, Format.MXFP8: 1.04, Format.NVFP4: 0.57}
    needed = sum(math.prod(spec.shape) * bytes_of[scheme.format_of(spec.name)] for spec in specs)
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise ModelError(f"{path}: needs about {_size(needed)}, and {_size(free)} are free")


def _size(count_bytes: float) -> str:
    unit, size = next(((unit, size) for unit, size in _UNITS if count_bytes >= size), _UNITS[-1])
    return f"{count_bytes / size:.{1 if count_bytes < 100 * size else 0}f} {unit}"
