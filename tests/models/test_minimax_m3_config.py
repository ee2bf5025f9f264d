"""Reading MiniMax-M3 configurations, and what a token costs in the cache."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from longturn.errors import ModelError
from longturn.models.make_checkpoint import PRESETS, preset_config
from longturn.models.minimax_m3_cache import minimax_m3_kv
from longturn.models.minimax_m3_config import minimax_m3_config
from longturn.ops.kv_lane import FP8, NVFP4
from longturn.ops.msa_cpu import Selection


def text(preset: str = "m3.1-flash", **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = copy.deepcopy(preset_config(PRESETS[preset])["text_config"])
    for key, value in changes.items():
        target = config
        *parents, leaf = key.split("__")
        for parent in parents:
            target = target[parent]
        if value is None:
            target.pop(leaf, None)
        else:
            target[leaf] = value
    return config


@pytest.mark.parametrize(
    ("dtype", "key_value", "index"),
    [(torch.bfloat16, 122_880, 15_360), (FP8, 61_440, 7_680), (NVFP4, 34_560, 7_680)],
)
def test_cache_bytes_of_a_token(dtype: torch.dtype, key_value: int, index: int) -> None:
    kv = minimax_m3_kv(minimax_m3_config(text()), dtype)
    lanes = [lane for layer in kv.layers for lane in layer]
    assert sum(lane.nbytes for lane in lanes if not lane.name.startswith("index")) == 128 * key_value
    assert sum(lane.nbytes for lane in lanes if lane.name.startswith("index")) == 128 * index
    assert kv.page_bytes == 128 * (key_value + index)


def test_layers_with_dense_attention_have_no_index_lane() -> None:
    """M3's first three layers."""
    freq = [0] * 3 + [1] * 57
    config = minimax_m3_config(
        text(
            sparse_attention_config__sparse_attention_freq=freq,
            sparse_attention_config__sparse_disable_index_value=freq,
        )
    )
    kv = minimax_m3_kv(config, FP8)
    assert kv.page_bytes == 128 * (61_440 + 57 * 128)
    assert [lane.name for lane in kv.layers[2]] == ["key", "value"]
    assert [lane.name for lane in kv.layers[3]] == ["key", "value", "index_key"]


def test_lanes_lie_where_the_kernels_expect_them() -> None:
    """One layer: K, V, then the index key, each contiguous in the page."""
    config = minimax_m3_config(text("slice8"))
    kv = minimax_m3_kv(config, torch.bfloat16)
    assert [lane.shape for lane in kv.layers[0]] == [(4, 128, 128), (4, 128, 128), (1, 128, 128)]
    cache = kv.allocate(2)
    layer_bytes = 2 * (2 * 4 + 1) * 128 * 128
    kv.view(cache, 1, 2)[1, 0, 5, 7] = 1.0
    (at,) = cache[1].nonzero()[:1, 0].tolist()
    assert at // 2 * 2 == layer_bytes + 2 * (2 * 4 * 128 * 128 + 5 * 128 + 7)


def test_values_are_read_and_not_assumed() -> None:
    config = minimax_m3_config(
        text(
            num_experts_per_tok=8,
            sparse_attention_config__sparse_init_block=1,
            swiglu_beta=0.5,
            swiglu_alpha=2.0,
            swiglu_limit=3.0,
            routed_scaling_factor=1.25,
        )
    )
    assert config.top_experts == 8
    assert config.selection == Selection(16, init=1, local=1)
    assert (config.activation.alpha, config.activation.beta, config.activation.limit) == (2.0, 0.5, 3.0)
    assert config.routed_scale == 1.25
    assert config.rope.rotary_dim == 64
    assert config.moe_layers == (False,) * 3 + (True,) * 57
    assert config.sparse_layers == (True,) * 60


SPARSE = "sparse_attention_config__sparse"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_gemma_norm": False}, "use_gemma_norm False is not supported"),
        ({"attention_output_gate": True}, "attention_output_gate True"),
        ({"qk_norm_type": "per_layer"}, "qk_norm_type 'per_layer' is not supported .supported: 'per_head'"),
        ({"scoring_func": "softmax"}, "scoring_func 'softmax'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_size": "wide"}, "no valid hidden_size .it is 'wide'"),
        ({"head_dim": None}, "no valid head_dim"),
        ({"num_experts_per_tok": None}, "no valid num_experts_per_tok"),
        ({"num_experts_per_tok": 129}, r"num_experts_per_tok \(129\) is over the number of experts \(128\)"),
        ({"n_shared_experts": 2}, "n_shared_experts 2"),
        ({"num_key_value_heads": 5}, "not a multiple of num_key_value_heads"),
        ({"rotary_dim": 32}, "rotary_dim 32 and partial_rotary_factor 0.5 of 128 channels disagree"),
        ({"rotary_dim": None, "partial_rotary_factor": None}, "neither rotary_dim nor partial_rotary_factor"),
        ({"moe_layer_freq": [1] * 59}, "moe_layer_freq has 59 entries for 60 layers"),
        ({"moe_layer_freq": None}, "neither mlp_layer_types nor moe_layer_freq"),
        ({"moe_layer_freq": [2] * 60}, "moe_layer_freq must be a list of 1, 0"),
        ({"layer_types": ["full_attention"] * 60}, "layer_types and sparse_attention_freq disagree"),
        ({"layer_types": ["sliding_attention"] * 60}, "layer_types must be a list of"),
        ({"index_topk_blocks": 8}, r"index_topk_blocks \(8\) and sparse_topk_blocks \(16\) disagree"),
        ({f"{SPARSE}_init_block": None}, "no valid sparse_init_block"),
        ({f"{SPARSE}_init_block": 16}, r"16 \+ 1 forced blocks are over the 16 chosen ones"),
        ({f"{SPARSE}_block_size": 64}, "sparse blocks of 64 tokens"),
        ({f"{SPARSE}_num_index_heads": 2}, "2 index heads for 4 key/value heads"),
        ({f"{SPARSE}_index_dim": 32}, "index heads of 32 channels are narrower than the rotation"),
        ({f"{SPARSE}_score_type": "mean"}, "sparse_score_type 'mean'"),
        ({f"{SPARSE}_disable_index_value": [0] * 60}, "index value branch"),
        ({"swiglu_alpha": "x"}, "no valid swiglu_alpha"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "RoPE type 'longrope'"),
    ],
)
def test_configurations_that_cannot_be_honoured(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        minimax_m3_config(text(**change))
    assert "\n" not in str(caught.value)


def test_cache_types_that_cannot_be() -> None:
    config = minimax_m3_config(text())
    with pytest.raises(ModelError, match="a cache of int8 is not supported"):
        minimax_m3_kv(config, torch.int8)
    odd = minimax_m3_config(text(head_dim=100, rotary_dim=50))
    with pytest.raises(ModelError, match="multiple of 16 channels, not 100"):
        minimax_m3_kv(odd, NVFP4)
