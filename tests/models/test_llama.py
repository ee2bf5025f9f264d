"""The dense family against transformers on tiny random checkpoints, for every way a scheduler may cut the work."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_runner import PagedRunner

from longturn.config import ModelConfig
from longturn.errors import ModelError
from longturn.models.registry import load_model
from longturn.source import resolve_source

transformers = pytest.importorskip("transformers")

VOCAB = 97
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}}),
    "llama-dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama-head-dim": ("Llama", {"head_dim": 16, "num_key_value_heads": 6, "rms_norm_eps": 1e-3}),
    "qwen2-tied": (
        "Qwen2",
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3-untied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
    "qwen3-yarn-tuned": (
        "Qwen3",
        {
            "head_dim": 12,
            "attention_bias": True,
            "rope_parameters": {
                **YARN,
                "beta_fast": 20.0,
                "beta_slow": 2.0,
                "attention_factor": 1.3,
                "truncate": False,
            },
        },
    ),
}


def make_checkpoint(path: Path, family: str, settings: dict[str, Any], **save: Any) -> Any:
    """Save a random model to `path` and return it."""
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**{**TINY, **settings})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():  # transformers starts biases at 0 and norms at 1, which would hide a dropped one
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(path, **save)
    return model


def tokens(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


@torch.no_grad()
def expected(model: Any, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids])).logits[0]


def largest(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max())


@pytest.mark.parametrize("case", CASES)
def test_logits_equal_transformers(case: str, tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path, *CASES[case])
    model = load_model(resolve_source(ModelConfig(path=str(tmp_path))))
    ids = tokens(300, seed=1)
    want = expected(oracle, ids)
    assert float(want.std()) > 0.1, "the oracle must have something to say"

    whole = PagedRunner(model, rows=1, max_tokens=300).step({0: ids})[0]
    assert largest(whole, want) < 1e-4

    for cut in (1, 127, 128, 129, 255, 256, 257, 299):  # around both page borders
        runner = PagedRunner(model, rows=1, max_tokens=300, seed=cut)
        parts = torch.cat([runner.step({0: ids[:cut]})[0], runner.step({0: ids[cut:]})[0]])
        assert largest(parts, want) < 1e-4, f"cut at {cut}"

    runner = PagedRunner(model, rows=1, max_tokens=300)
    runner.step({0: ids[:120]})
    for position in range(120, 140):  # decode across a page border
        assert largest(runner.step({0: ids[position : position + 1]})[0][0], want[position]) < 1e-4


def test_mixed_steps_equal_transformers(tmp_path: Path) -> None:
    """Random steps over several rows: decodes, chunks and first prefills beside each other."""
    oracle = make_checkpoint(tmp_path, *CASES["qwen2-tied"])
    model = load_model(resolve_source(ModelConfig(path=str(tmp_path))))
    rng = random.Random(3)
    prompts = [tokens(rng.randint(1, 330), seed=row) for row in range(5)]
    want = [expected(oracle, ids) for ids in prompts]
    runner = PagedRunner(model, rows=5, max_tokens=330)
    while left := [row for row in range(5) if runner.lengths[row] < len(prompts[row])]:
        work = {}
        for row in rng.sample(left, rng.randint(1, len(left))):
            at = runner.lengths[row]
            work[row] = prompts[row][at : at + rng.choice((1, 1, 2, 60, 128, 200))]
        before = list(runner.lengths)
        for row, logits in runner.step(work).items():
            assert largest(logits, want[row][before[row] : runner.lengths[row]]) < 1e-4


def test_reduced_precision_stays_close(tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path, *CASES["qwen3-untied"])
    source = resolve_source(ModelConfig(path=str(tmp_path)))
    ids = tokens(200, seed=2)
    want = expected(oracle, ids)
    cached = load_model(source, kv_dtype=torch.float16)
    assert cached.kv.page_bytes * 2 == load_model(source).kv.page_bytes
    assert largest(PagedRunner(cached, rows=1, max_tokens=200).step({0: ids})[0], want) < 0.05
    half = load_model(source, dtype=torch.bfloat16)
    assert largest(PagedRunner(half, rows=1, max_tokens=200).step({0: ids})[0], want) < 0.6 * float(want.std())


def test_legacy_config_keys(tmp_path: Path) -> None:
    """`rope_theta` and `rope_scaling`, as directories saved before transformers 5 have them."""
    oracle = make_checkpoint(tmp_path, *CASES["llama-llama3"])
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(resolve_source(ModelConfig(path=str(tmp_path))))
    ids = tokens(200, seed=5)
    assert largest(PagedRunner(model, rows=1, max_tokens=200).step({0: ids})[0], expected(oracle, ids)) < 1e-4


def test_sharded_checkpoint(tmp_path: Path) -> None:
    oracle = make_checkpoint(tmp_path, *CASES["llama-linear"], max_shard_size="40KB")
    source = resolve_source(ModelConfig(path=str(tmp_path)))
    assert len(source.files) > 3
    ids = tokens(40, seed=5)
    got = PagedRunner(load_model(source), rows=1, max_tokens=40).step({0: ids})[0]
    assert largest(got, expected(oracle, ids)) < 1e-4
    source.files[-1].unlink()
    with pytest.raises(ModelError, match=source.files[-1].name):
        resolve_source(ModelConfig(path=str(tmp_path)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "RoPE type 'longrope'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "'linear' needs a positive factor"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"use_sliding_window": True}, "sliding-window"),
        ({"num_key_value_heads": 4}, "multiple of num_key_value_heads"),
        ({"hidden_size": "big"}, "no valid hidden_size"),
        ({"intermediate_size": 64}, r"shape \[80, 48\], not \[64, 48\]"),
        ({"num_hidden_layers": 4}, "model.layers.3.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 2}, "no place in this architecture, first model.layers.2"),
    ],
)
def test_configurations_that_do_not_fit(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, *CASES["llama-linear"])
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message) as caught:
        load_model(resolve_source(ModelConfig(path=str(tmp_path))))
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bias_nobody_expects_is_an_error(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, *CASES["llama-biases"])
    config = json.loads((tmp_path / "config.json").read_text()) | {"mlp_bias": False}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelError, match=r"no place in this architecture, first model\.layers\.0\.mlp\.down_proj\.bias"
    ):
        load_model(resolve_source(ModelConfig(path=str(tmp_path))))
