"""Weights for the native CPU decoder: published 4- and 8-bit blocks kept as they are, everything else in 8-bit blocks.

Packing is done once a model; the result is a prepared file that later starts map into memory. Nothing here imports
torch, except to read the floating-point tensors of a Hugging Face directory while packing it.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from longturn.errors import ModelError
from longturn.gguf_file import read_gguf
from longturn.kernels.cpu.native import DecoderConfig, DecoderWeights, LayerWeights, NativeDecoder, NativeLibrary
from longturn.kernels.cpu.packing import BLOCK, LAYOUT, Kind, PackedMatrix, pack_blocks, pack_float
from longturn.models.checkpoint.base import CheckedReader, Checkpoint, open_checkpoint
from longturn.models.checkpoint.gguf import GGUFCheckpoint
from longturn.models.llama_config import LlamaConfig, llama_config
from longturn.prepared import prepared_entry, prepared_key, source_digest
from longturn.source import ModelSource

Float32 = npt.NDArray[np.float32]

FORMAT_VERSION = 2
_ALIGN_BYTES = 64
_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_KINDS: Mapping[str, Kind] = {"Q4_1": "q4_1", "Q8_0": "q8_0"}
_FLOATING = ("F32", "F16", "BF16")
_WEIGHTS, _INDEX = "weights.bin", "index.json"
_EMBEDDING, _HEAD, _NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
_MATRICES: Mapping[str, str] = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True)
class PackedModel:
    """Everything that a `NativeDecoder` needs."""

    config: LlamaConfig
    weights: DecoderWeights
    """Views of a read-only memory map."""

    def decoder_config(self, *, threads: int, cache_dtype: Literal["fp16", "fp32"] = "fp16") -> DecoderConfig:
        c = self.config
        return DecoderConfig(
            hidden=c.hidden,
            heads=c.heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            ffn=c.ffn,
            vocab=c.vocab_size,
            rms_eps=c.norm_eps,
            cache_dtype=cache_dtype,
            threads=threads,
        )

    def decoder(
        self, library: NativeLibrary, *, threads: int, cache_dtype: Literal["fp16", "fp32"] = "fp16"
    ) -> NativeDecoder:
        """A decoder that computes with these weights. Raises ModelError if the kernels do not serve their shapes."""
        return NativeDecoder(library, self.decoder_config(threads=threads, cache_dtype=cache_dtype), self.weights)


def is_quantised(source: ModelSource) -> bool:
    """Whether the checkpoint's matrices are stored in blocks, so that `auto` means the packed path."""
    if source.kind != "gguf":
        return False
    return any(len(t.shape) > 1 and t.type not in _FLOATING for t in read_gguf(source.path).tensors.values())


def why_not_packed(source: ModelSource) -> str | None:
    """What keeps a model off the packed path, None if nothing does.

    Raises:
        ModelError: the configuration itself is impossible.
    """
    if source.architecture not in _ARCHITECTURES:
        return f"architecture {source.architecture}"
    c = llama_config(source.architecture, source.config)
    if c.mlp_bias:
        return "biases in the feed-forward layers"
    for name, value, unit in (
        ("hidden_size", c.hidden, BLOCK),
        ("intermediate_size", c.ffn, BLOCK),
        ("head_dim", c.head_dim, 16),
        ("heads times head_dim", c.q_width, BLOCK),
    ):
        if value % unit:
            return f"{name} {value}, which is not a multiple of {unit}"
    return None


def load_packed(source: ModelSource, *, cache_dir: str | Path | None = None) -> PackedModel:
    """Pack a model, or map the packed file that an earlier start left in the cache directory.

    Args:
        source: from `resolve_source`; its `max_context_tokens` sets the length of the rotary tables.
        cache_dir: from `EngineConfig.cache_dir`.

    Raises:
        ModelError: the model cannot be packed, or its checkpoint is damaged.
        ConfigError: the cache directory cannot be written.
    """
    if (reason := why_not_packed(source)) is not None:
        raise ModelError(f"{source.path}: packed weights do not support {reason} (use fp32 weights)")
    config = llama_config(source.architecture, source.config)
    key = prepared_key("weights", FORMAT_VERSION, LAYOUT, source_digest(cache_dir, source.files))
    entry = prepared_entry(cache_dir, key, lambda directory: _pack(source, config, directory))
    return _map(entry, config, source.max_context_tokens)


# --- packing ---------------------------------------------------------------------------------------------------------


class _Writer:
    """Appends arrays to the weights file, each at a multiple of 64 bytes, and notes where they are."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._at = 0
        self.index: dict[str, dict[str, Any]] = {}

    def matrix(self, name: str, matrix: PackedMatrix) -> None:
        place = {"kind": matrix.kind, "rows": matrix.rows, "cols": matrix.cols}
        self.index[name] = place | self._append(matrix.data)

    def vector(self, name: str, vector: Float32) -> None:
        self.index[name] = self._append(np.ascontiguousarray(vector, np.float32))

    def _append(self, data: npt.NDArray[Any]) -> dict[str, Any]:
        begin = -(-self._at // _ALIGN_BYTES) * _ALIGN_BYTES
        self._file.write(bytes(begin - self._at))
        self._file.write(data.data)
        self._at = begin + data.nbytes
        return {"offset_bytes": begin, "nbytes": data.nbytes}


def _pack(source: ModelSource, c: LlamaConfig, directory: Path) -> None:
    checkpoint = open_checkpoint(source)
    reader = CheckedReader(checkpoint)
    with (directory / _WEIGHTS).open("wb") as file:
        writer = _Writer(file)
        for name, shape in _tensors(c).items():
            reader.check(name, *shape)
            if len(shape) == 1:
                writer.vector(name, _floats(checkpoint, name))
            else:
                writer.matrix(name, _packed(checkpoint, name))
    if c.tied:
        reader.ignore(_HEAD)
    reader.finish()
    (directory / _INDEX).write_text(json.dumps({"tensors": writer.index}), encoding="utf-8")


def _tensors(c: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that is packed, with its shape, in the order of computation."""
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (c.vocab_size, c.hidden)}
    matrices = {
        "q": (c.q_width, c.hidden),
        "k": (c.kv_width, c.hidden),
        "v": (c.kv_width, c.hidden),
        "o": (c.hidden, c.q_width),
        "gate": (c.ffn, c.hidden),
        "up": (c.ffn, c.hidden),
        "down": (c.hidden, c.ffn),
    }
    for index in range(c.layers):
        at = f"model.layers.{index}"
        shapes[f"{at}.input_layernorm.weight"] = (c.hidden,)
        shapes |= {f"{at}.{_MATRICES[key]}.weight": shape for key, shape in matrices.items()}
        biased = (*(("q", "k", "v") if c.qkv_bias else ()), *(("o",) if c.out_bias else ()))
        shapes |= {f"{at}.{_MATRICES[key]}.bias": matrices[key][:1] for key in biased}
        if c.qk_norm:
            shapes |= {f"{at}.self_attn.{key}_norm.weight": (c.head_dim,) for key in ("q", "k")}
        shapes[f"{at}.post_attention_layernorm.weight"] = (c.hidden,)
    shapes[_NORM] = (c.hidden,)
    if not c.tied:
        shapes[_HEAD] = (c.vocab_size, c.hidden)
    return shapes


def _packed(checkpoint: Checkpoint, name: str) -> PackedMatrix:
    """A matrix in the packed layout: blocks as they are stored, anything else rounded to 8-bit blocks."""
    if isinstance(checkpoint, GGUFCheckpoint) and (kind := _KINDS.get(checkpoint.type(name))) is not None:
        return pack_blocks(kind, checkpoint.raw(name))
    try:
        return pack_float(_floats(checkpoint, name))
    except ModelError as error:
        raise ModelError(f"{checkpoint.path}: tensor {name}: {error}") from error


def _floats(checkpoint: Checkpoint, name: str) -> Float32:
    if isinstance(checkpoint, GGUFCheckpoint):
        return checkpoint.floats(name)
    floats: Float32 = checkpoint.load(name).float().numpy()
    return floats


# --- mapping ---------------------------------------------------------------------------------------------------------


def _map(entry: Path, c: LlamaConfig, positions: int) -> PackedModel:
    index = json.loads((entry / _INDEX).read_text(encoding="utf-8"))
    tensors: dict[str, dict[str, Any]] = index["tensors"]
    with (entry / _WEIGHTS).open("rb") as file:
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)

    def stored(name: str) -> npt.NDArray[np.uint8]:
        place = tensors[name]
        return data[place["offset_bytes"] : place["offset_bytes"] + place["nbytes"]]

    def matrix(name: str) -> PackedMatrix:
        place = tensors[name]
        return PackedMatrix(place["kind"], place["rows"], place["cols"], stored(name))

    def vector(name: str) -> Float32:
        return stored(name).view(np.float32)

    def optional(name: str) -> Float32 | None:
        return vector(name) if name in tensors else None

    layers = []
    for number in range(c.layers):
        at = f"model.layers.{number}"
        layers.append(
            LayerWeights(
                **{key: matrix(f"{at}.{name}.weight") for key, name in _MATRICES.items()},
                attention_norm=vector(f"{at}.input_layernorm.weight"),
                mlp_norm=vector(f"{at}.post_attention_layernorm.weight"),
                q_bias=optional(f"{at}.self_attn.q_proj.bias"),
                k_bias=optional(f"{at}.self_attn.k_proj.bias"),
                v_bias=optional(f"{at}.self_attn.v_proj.bias"),
                o_bias=optional(f"{at}.self_attn.o_proj.bias"),
                q_norm=optional(f"{at}.self_attn.q_norm.weight"),
                k_norm=optional(f"{at}.self_attn.k_norm.weight"),
            )
        )
    embedding = matrix(_EMBEDDING)
    cosine, sine = c.rope.table(positions)
    weights = DecoderWeights(
        layers=tuple(layers),
        embedding=embedding,
        head=embedding if c.tied else matrix(_HEAD),
        final_norm=vector(_NORM),
        cosine=cosine,
        sine=sine,
    )
    return PackedModel(c, weights)
