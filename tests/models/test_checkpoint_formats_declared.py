"""Which format a declaration gives a module, fused names among them."""

from __future__ import annotations

from typing import Any

import pytest

from longturn.errors import ModelError
from longturn.models.checkpoint.quant_config import Format, quant_config

LAYER = "language_model.model.layers.5"


def modelopt(**layers: str) -> Any:
    entries = {f"{LAYER}.{name.replace('__', '.')}": {"quant_algo": algo} for name, algo in layers.items()}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": entries}


def test_fused_entries_cover_their_parts() -> None:
    config = quant_config(modelopt(self_attn__qkv_proj="MXFP8", mlp__gate_up_proj="NVFP4"))
    for part in ("q_proj", "k_proj", "v_proj", "index_q_proj", "index_k_proj", "qkv_proj"):
        assert config.declared(f"{LAYER}.self_attn.{part}") == Format.MXFP8
    assert config.declared(f"{LAYER}.mlp.up_proj") == Format.NVFP4
    assert config.declared(f"{LAYER}.self_attn.o_proj") is None
    assert config.declared("language_model.model.layers.50.self_attn.q_proj") is None


def test_parts_cover_the_fused_module() -> None:
    config = quant_config(modelopt(self_attn__q_proj="MXFP8", self_attn__k_proj="MXFP8", mlp__gate_proj="MXFP8"))
    assert config.declared(f"{LAYER}.self_attn.qkv_proj") == Format.MXFP8
    assert config.declared(f"{LAYER}.mlp.gate_up_proj") == Format.MXFP8
    assert config.declared(f"{LAYER}.self_attn.v_proj") is None


def test_parts_that_differ_cannot_be_fused() -> None:
    config = quant_config(modelopt(mlp__gate_proj="MXFP8", mlp__up_proj="NVFP4"))
    assert config.declared(f"{LAYER}.mlp.up_proj") == Format.NVFP4
    with pytest.raises(ModelError, match=r"different formats .gate_proj mxfp8, up_proj nvfp4"):
        config.declared(f"{LAYER}.mlp.gate_up_proj")


def test_an_entry_for_a_parent_covers_what_is_in_it() -> None:
    config = quant_config(modelopt(block_sparse_moe__experts="NVFP4"))
    assert config.declared(f"{LAYER}.block_sparse_moe.experts.7.w2") == Format.NVFP4
    assert config.declared(f"{LAYER}.block_sparse_moe.shared_experts.up_proj") is None


def test_names_with_and_without_the_prefix() -> None:
    config = quant_config(modelopt(self_attn__q_proj="MXFP8"))
    assert config.declared("model.layers.5.self_attn.q_proj") == Format.MXFP8
    bare = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {"model.layers.5.self_attn.q_proj": {"quant_algo": "MXFP8"}}}  # fmt: skip
    assert quant_config(bare).declared(f"{LAYER}.self_attn.q_proj") == Format.MXFP8


def test_one_algorithm_with_exclusions() -> None:
    config = quant_config(
        {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head", "*.self_attn*", "vision_tower*"]}}
    )
    assert config.declared(f"{LAYER}.mlp.up_proj") == Format.NVFP4
    assert config.declared(f"{LAYER}.self_attn.q_proj") == Format.PLAIN
    assert config.declared("lm_head") == Format.PLAIN


def test_minimax_style() -> None:
    config = quant_config({"quant_method": "mxfp8", "moe_quant_algo": "NVFP4"})
    assert config.declared(f"{LAYER}.block_sparse_moe.experts.12.w3") == Format.NVFP4
    assert config.declared(f"{LAYER}.block_sparse_moe.shared_experts.up_proj") == Format.MXFP8
    assert config.declared(f"{LAYER}.self_attn.index_k_proj") == Format.MXFP8


def test_compressed_tensors_groups() -> None:
    four = {"num_bits": 4, "type": "float", "group_size": 16}
    eight = {"num_bits": 8, "type": "float", "group_size": 32}
    config = quant_config(
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                "wide": {"targets": ["Linear"], "weights": eight},
                "experts": {"targets": ["re:.*experts\\.\\d+\\."], "weights": four},
            },
            "ignore": ["lm_head", "re:.*gate$"],
        }
    )
    assert config.declared(f"{LAYER}.block_sparse_moe.experts.3.w1") == Format.NVFP4
    assert config.declared(f"{LAYER}.self_attn.q_proj") == Format.MXFP8
    assert config.declared(f"{LAYER}.block_sparse_moe.gate") == Format.PLAIN
    assert config.declared("language_model.lm_head") == Format.PLAIN


def test_nothing_declared() -> None:
    assert quant_config(None).declared("anything") is None
    assert quant_config(None).method == "none"


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"quantization": 4}, "quantization must be a mapping, not 4"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": []}, "no quantized_layers"),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {"x": "NVFP4"}},
            "quantized_layers.x must be a mapping",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": "lm_head"}, "exclude_modules must be a list"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": None}}, "config_groups.g must be a mapping"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {}}, "ignore": ["re:("]},
            "no regular expression",
        ),
        ({"quant_method": 8}, "quantisation '8' is not supported"),
    ],
)
def test_malformed_declarations(declared: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        quant_config(declared)


def test_groups_of_another_size() -> None:
    declared = modelopt(self_attn__q_proj="NVFP4")
    declared["quantized_layers"][f"{LAYER}.self_attn.q_proj"]["group_size"] = 32
    with pytest.raises(ModelError, match="NVFP4 groups of 32"):
        quant_config(declared)
