"""Model shapes from configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longturn.errors import ConfigError
from longturn.simulate.shapes import load_shape, model_shape, preset_names


def test_presets() -> None:
    assert preset_names() == ("llama-3.1-8b", "m3", "m3-mini60", "m3-slice8", "m3.1-flash")
    m3, flash = load_shape("m3"), load_shape("m3.1-flash")
    assert (m3.sparse_layers, m3.dense_layers, m3.moe_layers) == (57, 3, 57)
    assert (flash.sparse_layers, flash.dense_layers, flash.moe_layers) == (60, 0, 57)
    assert m3.attend_limit == 2048


def config() -> dict[str, Any]:
    path = Path(__file__).parents[2] / "src" / "longturn" / "simulate" / "models" / "m3.json"
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def test_a_directory_or_file_reads_by_path(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config()["text_config"]))
    assert load_shape(str(tmp_path / "mine")).name == "mine"
    assert load_shape(str(tmp_path / "mine" / "config.json")).hidden == 6144


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "num_hidden_layers", "head_dim", "vocab_size", "moe_layer_freq", "num_local_experts",
     "intermediate_size", "dense_intermediate_size", "max_position_embeddings"],
)  # fmt: skip
def test_a_missing_key_is_one_line(key: str) -> None:
    data = config()
    del data["text_config"][key]
    with pytest.raises(ConfigError, match=f"model x: the cost model needs {key}"):
        model_shape(data, "x")


def test_a_missing_sparse_key_is_one_line() -> None:
    data = config()
    del data["text_config"]["sparse_attention_config"]["sparse_index_dim"]
    with pytest.raises(ConfigError, match="sparse_index_dim"):
        model_shape(data, "x")


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("moe_layer_freq", [1, 0], "a list of 60 zeros and ones"),
        ("num_key_value_heads", 5, "64 heads are not a multiple of 5"),
        ("num_experts_per_tok", 200, "200 is over 128 experts"),
        ("hidden_size", "wide", "hidden_size"),
    ],
)
def test_impossible_values(key: str, value: Any, line: str) -> None:
    data = config()
    data["text_config"][key] = value
    with pytest.raises(ConfigError, match=line):
        model_shape(data, "x")


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        load_shape(str(tmp_path))


QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 32768, "intermediate_size": 4864,
    "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": 32768,
}  # fmt: skip


def test_dense_models() -> None:
    llama, qwen = load_shape("llama-3.1-8b"), model_shape(QWEN, "qwen")
    assert (llama.dense_layers, llama.moe_layers, llama.sparse_layers, llama.dense_ffn) == (32, 0, 0, 14336)
    assert (qwen.head_dim, qwen.kv_heads, qwen.tied, llama.tied) == (64, 2, True, False)
    plain = {key: value for key, value in QWEN.items() if key != "architectures"}
    assert model_shape(plain, "qwen") == qwen, "without experts and without a name it is taken as dense"
    alone = {key: value for key, value in plain.items() if key != "num_key_value_heads"}
    assert model_shape(alone, "x").kv_heads == 14


@pytest.mark.parametrize("key", ["hidden_size", "num_attention_heads", "intermediate_size", "max_position_embeddings"])
def test_a_missing_key_of_a_dense_model_is_one_line(key: str) -> None:
    with pytest.raises(ConfigError, match=f"model x: the cost model needs {key}"):
        model_shape({name: value for name, value in QWEN.items() if name != key}, "x")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"use_sliding_window": True}, "no sliding-window attention"),
        ({"use_sliding_window": None, "layer_types": ["full_attention", "sliding_attention"]}, "no sliding-window"),
        ({"num_key_value_heads": 4}, "14 heads are not a multiple of 4"),
        ({"architectures": ["DeepseekV3ForCausalLM"]}, "architecture 'DeepseekV3ForCausalLM' is not known"),
        ({"architectures": ["MixtralForCausalLM"], "num_local_experts": 8}, "'MixtralForCausalLM' is not known"),
    ],
)
def test_models_that_are_not_known_say_what_is(change: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        model_shape({**QWEN, **change}, "x")
