"""Packed weights: the published blocks, bit for bit, and a native decoder that agrees with the fp32 model."""

from __future__ import annotations

import inspect
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from paged_runner import PagedRunner
from test_embedded_model import make_tokenizer
from test_llama import TINY, make_checkpoint, tokens

import longturn.models.packed as packed_module
from longturn.config import ModelConfig
from longturn.errors import ModelError
from longturn.kernels.cpu import native
from longturn.kernels.cpu.build import KernelBuildError
from longturn.kernels.cpu.packing import unpack_blocks
from longturn.models.checkpoint.gguf import GGUFCheckpoint
from longturn.models.packed import PackedModel, is_quantised, load_packed, why_not_packed
from longturn.models.registry import load_model
from longturn.source import ModelSource, resolve_source

pytest.importorskip("transformers")

FITTING = {**TINY, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "initializer_range": 0.1}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-untied-o-bias": ("Llama", {**FITTING, "attention_bias": True}),
    "qwen2-tied-yarn": (
        "Qwen2",
        {
            **FITTING,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen3-wide-heads": ("Qwen3", {**FITTING, "head_dim": 32}),
}


@pytest.fixture(scope="module")
def library() -> native.NativeLibrary:
    try:
        return native.load()
    except KernelBuildError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def embedded() -> ModelSource:
    try:
        return resolve_source(ModelConfig(max_context_tokens=2048))
    except ModelError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def packed_embedded(embedded: ModelSource, cache_dir: Path) -> PackedModel:
    return load_packed(embedded, cache_dir=cache_dir)


def native_logits(
    model: PackedModel,
    library: native.NativeLibrary,
    ids: list[int],
    cuts: list[int],
    cache_dtype: Literal["fp16", "fp32"] = "fp32",
) -> torch.Tensor:
    """Logits of every position, computed in chunks that end at `cuts`, over pages in reverse order."""
    decoder = model.decoder(library, threads=1, cache_dtype=cache_dtype)
    pages = -(-len(ids) // 128)
    cache = decoder.new_cache(pages + 1)
    table = np.arange(pages, 0, -1, dtype=np.int32)[None]
    out = []
    for begin, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        count = end - begin
        logits, _ = decoder.forward(
            np.array(ids[begin:end], np.int32),
            np.arange(begin, end, dtype=np.int32),
            np.zeros(count, np.int32),
            table,
            np.arange(count, dtype=np.int32),
            cache,
        )
        assert logits is not None
        out.append(torch.from_numpy(logits))
    decoder.close()
    return torch.cat(out)


def mean_kl(exact: torch.Tensor, other: torch.Tensor) -> float:
    """Mean KL divergence from the distribution of `exact` to that of `other`, in nats."""
    p, q = exact.double().log_softmax(-1), other.double().log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("case", CASES)
def test_native_decoder_agrees_with_fp32(
    case: str, library: native.NativeLibrary, cache_dir: Path, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, *CASES[case])
    source = resolve_source(ModelConfig(path=str(tmp_path)))
    assert not is_quantised(source)
    assert why_not_packed(source) is None
    model = load_packed(source, cache_dir=cache_dir)
    ids = tokens(300, seed=4)
    exact = PagedRunner(load_model(source), rows=1, max_tokens=300).step({0: ids})[0]
    got = native_logits(model, library, ids, cuts=[1, 130])
    # 8-bit weights and activations: about one part in a hundred of the logits' spread
    assert float((got - exact).abs().mean()) < 0.03 * float(exact.std())
    assert mean_kl(exact, got) < 1e-3


def test_blocks_are_kept_bit_for_bit(embedded: ModelSource, packed_embedded: PackedModel) -> None:
    checkpoint = GGUFCheckpoint(embedded)
    names = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm", **packed_module._MATRICES}
    seen = {"model.embed_tokens.weight", "model.norm.weight"}
    for number, layer in enumerate(packed_embedded.weights.layers):
        for attribute, part in names.items():
            name = f"model.layers.{number}.{part}.weight"
            weight = getattr(layer, attribute)
            raw = checkpoint.raw(name)
            assert np.array_equal(weight.view(np.uint8) if "norm" in part else unpack_blocks(weight), raw), name
            seen.add(name)
    assert np.array_equal(unpack_blocks(packed_embedded.weights.embedding), checkpoint.raw("model.embed_tokens.weight"))
    assert np.array_equal(packed_embedded.weights.final_norm.view(np.uint8), checkpoint.raw("model.norm.weight"))
    assert packed_embedded.weights.head is packed_embedded.weights.embedding
    assert seen == set(checkpoint.names())
    assert packed_embedded.weights.cosine.shape == (2048, 32)
    assert is_quantised(embedded)


def test_a_second_start_reads_the_prepared_file(
    embedded: ModelSource, packed_embedded: PackedModel, cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: ModelSource) -> None:
        raise AssertionError("packed again")

    monkeypatch.setattr(packed_module, "open_checkpoint", refuse)
    again = load_packed(embedded, cache_dir=cache_dir)
    first, second = packed_embedded.weights.layers[17].down, again.weights.layers[17].down
    assert (first.kind, first.rows, first.cols) == (second.kind, second.rows, second.cols) == ("q4_1", 576, 1536)
    assert np.array_equal(first.data, second.data)
    assert first.data.ctypes.data % 64 == 0
    assert not second.data.flags.writeable


def test_no_torch_on_the_packed_path(packed_embedded: PackedModel, cache_dir: Path) -> None:
    code = (
        "import sys\n"
        "from longturn.config import ModelConfig\n"
        "from longturn.models.packed import load_packed\n"
        "from longturn.source import resolve_source\n"
        f"load_packed(resolve_source(ModelConfig()), cache_dir={str(cache_dir)!r})\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_kl_to_fp32_over_real_text(
    embedded: ModelSource, packed_embedded: PackedModel, library: native.NativeLibrary
) -> None:
    """600 positions of real text; the bound that `--weights packed` promises."""
    ids = make_tokenizer(embedded).encode(inspect.getsource(textwrap)).ids[:600]
    assert len(ids) == 600
    runner = PagedRunner(load_model(embedded), rows=1, max_tokens=600)
    exact = torch.cat([runner.step({0: ids[begin : begin + 200]})[0] for begin in range(0, 600, 200)])
    loss = float(torch.nn.functional.cross_entropy(exact[:-1], torch.tensor(ids[1:])))
    assert loss < 2.5, "the model must make sense of the text, or agreeing about it means little"
    got = native_logits(packed_embedded, library, ids, cuts=[150, 400], cache_dtype="fp16")
    kl = np.mean([mean_kl(exact[at : at + 100], got[at : at + 100]) for at in range(0, 600, 100)])
    assert 0.0 < kl < 0.002


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("Llama", {**FITTING, "mlp_bias": True}, "biases in the feed-forward layers"),
        ("Llama", {**FITTING, "hidden_size": 48}, "hidden_size 48, which is not a multiple of 32"),
        ("Qwen3", {**FITTING, "head_dim": 24}, "head_dim 24, which is not a multiple of 16"),
        ("Llama", {**FITTING, "intermediate_size": 100}, "intermediate_size 100"),
    ],
)
def test_models_that_cannot_be_packed(
    family: str, settings: dict[str, Any], reason: str, cache_dir: Path, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, family, settings)
    with pytest.raises(ModelError, match=reason) as caught:
        load_packed(resolve_source(ModelConfig(path=str(tmp_path))), cache_dir=cache_dir)
    assert str(tmp_path) in str(caught.value)
    assert "fp32" in str(caught.value)


def test_other_architectures_are_not_packed(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, *CASES["qwen3-wide-heads"])
    source = replace(resolve_source(ModelConfig(path=str(tmp_path))), architecture="OtherForCausalLM")
    assert why_not_packed(source) == "architecture OtherForCausalLM"


def test_weights_that_are_not_finite(cache_dir: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    make_checkpoint(tmp_path, *CASES["qwen3-wide-heads"])
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    state["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.inf
    save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        load_packed(resolve_source(ModelConfig(path=str(tmp_path))), cache_dir=cache_dir)
