"""Every published weight format: written, read back and compared with values decoded here, and damaged in every way."""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paged_runner import PagedRunner
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from longturn.config import ModelConfig
from longturn.errors import ConfigError, ModelError
from longturn.models.checkpoint.base import open_checkpoint
from longturn.models.checkpoint.published import PublishedCheckpoint
from longturn.models.checkpoint.quant_config import Format
from longturn.models.checkpoint.scheme import Flavour, Scheme, Stored
from longturn.models.checkpoint.shards import Shards
from longturn.models.convert import convert
from longturn.models.make_checkpoint import make_checkpoint
from longturn.models.minimax_m3 import MiniMaxM3, MoeWeights, PackedExperts, StackedExperts
from longturn.models.minimax_m3_config import minimax_m3_config
from longturn.models.minimax_m3_load import load_minimax_m3
from longturn.models.registry import load_model
from longturn.source import resolve_source

AT = "language_model.model.layers.1"
EXPERT = f"{AT}.block_sparse_moe.experts.3.w1.weight"
DENSE = f"{AT}.self_attn.q_proj.weight"
SCHEMES: list[tuple[Stored, Stored, Flavour]] = [
    ("bf16", "bf16", "compressed-tensors"),
    ("mxfp8", "mxfp8", "compressed-tensors"),
    ("nvfp4", "mxfp8", "compressed-tensors"),
    ("nvfp4", "bf16", "compressed-tensors"),
    ("bf16", "mxfp8", "compressed-tensors"),
    ("nvfp4", "mxfp8", "modelopt"),
    ("mxfp8", "bf16", "modelopt"),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("formats") / "tiny"
    make_checkpoint(path, "tiny", shard_bytes=1 << 19)
    return path


@pytest.fixture(scope="module")
def m31(tiny: Path) -> Path:
    """As M3.1-Flash is published."""
    path = tiny.parent / "m31"
    convert(tiny, path, Scheme("nvfp4", "mxfp8"))
    return path


def opened(path: Path) -> PublishedCheckpoint:
    checkpoint = open_checkpoint(resolve_source(ModelConfig(path=str(path))))
    assert isinstance(checkpoint, PublishedCheckpoint)
    return checkpoint


def load(path: Path) -> MiniMaxM3:
    model = load_model(resolve_source(ModelConfig(path=str(path))))
    assert isinstance(model, MiniMaxM3)
    return model


def stored(path: Path) -> dict[str, torch.Tensor]:
    """All tensors as the `safetensors` library reads them."""
    return {name: tensor for file in sorted(path.glob("*.safetensors")) for name, tensor in load_file(file).items()}


# --- an oracle that shares no code: numpy, tables made from the formats' definitions ----------------------------------

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def e4m3_table() -> np.ndarray:
    table = []
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        value = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        table.append(math.nan if byte & 127 == 127 else -value if byte & 128 else value)
    return np.array(table, np.float32)


def decode(tensors: dict[str, torch.Tensor], name: str) -> np.ndarray:
    """The weight `name` of a checkpoint of any format, fp32."""

    def raw(key: str) -> np.ndarray:
        tensor = tensors[key]
        return tensor.view(torch.uint8).numpy() if tensor.dtype.itemsize == 1 else tensor.float().numpy()

    packed = f"{name}_packed" if f"{name}_packed" in tensors else name
    if packed != name or tensors[name].dtype == torch.uint8:
        codes = raw(packed)
        values = np.stack([E2M1[codes & 15], E2M1[codes >> 4]], axis=-1).reshape(len(codes), -1)
        scales = e4m3_table()[raw(f"{name}_scale")]
        if packed != name:
            scales = scales / raw(f"{name}_global_scale").reshape(())
        else:
            scales = scales * raw(f"{name}_scale_2").reshape(())
        return values * np.repeat(scales.astype(np.float32), 16, axis=1)
    if tensors[name].dtype == torch.float8_e4m3fn:
        scales = raw(f"{name}_scale_inv" if f"{name}_scale_inv" in tensors else f"{name}_scale")
        powers = np.exp2(scales.astype(np.float32) - 127)
        return e4m3_table()[raw(name)] * np.repeat(powers, 32, axis=1)
    return tensors[name].float().numpy()


@pytest.mark.parametrize(("experts", "dense", "flavour"), SCHEMES)
def test_round_trip(experts: Stored, dense: Stored, flavour: Flavour, tiny: Path, tmp_path: Path) -> None:
    """Convert, load, and find in the model exactly what the files hold, decoded independently."""
    target = tmp_path / "converted"
    done = convert(tiny, target, Scheme(experts, dense, flavour), shard_bytes=1 << 18)
    tensors = stored(target)
    checkpoint = opened(target)
    assert checkpoint.names() == opened(tiny).names()
    assert checkpoint.format(EXPERT) == (Format.PLAIN if experts == "bf16" else experts)
    assert checkpoint.format(DENSE) == (Format.PLAIN if dense == "bf16" else dense)
    for name in checkpoint.names():
        np.testing.assert_array_equal(checkpoint.load(name).float().numpy(), decode(tensors, name))
    assert done.bytes_after == sum(checkpoint.stored_bytes(name) for name in checkpoint.names())

    model = load(target)
    for index, layer in enumerate(model.layers):
        at = f"language_model.model.layers.{index}"
        parts = [p for p in ("q_proj", "k_proj", "v_proj", "index_q_proj", "index_k_proj")
                 if f"{at}.self_attn.{p}.weight" in checkpoint.names()]  # fmt: skip
        rows = np.concatenate([decode(tensors, f"{at}.self_attn.{part}.weight") for part in parts])
        np.testing.assert_array_equal(layer.attention.projection.numpy(), rows)
        if not isinstance(layer.mlp, MoeWeights):
            continue
        moe = f"{at}.block_sparse_moe"
        routed = layer.mlp.experts
        for number in range(model.config.experts):
            w1, w2, w3 = (decode(tensors, f"{moe}.experts.{number}.{part}.weight") for part in ("w1", "w2", "w3"))
            np.testing.assert_array_equal(routed.w13(number).numpy(), np.concatenate([w1, w3]))
            np.testing.assert_array_equal(routed.w2(number).numpy(), w2)
        np.testing.assert_array_equal(layer.mlp.gate.numpy(), tensors[f"{moe}.gate.weight"].numpy())

    original = stored(tiny)
    error = {"bf16": 0.0, "mxfp8": 0.03, "nvfp4": 0.1}
    for name, kind in ((EXPERT, experts), (DENSE, dense)):
        want = original[name].float().numpy()
        apart = np.linalg.norm(decode(tensors, name) - want) / np.linalg.norm(want)
        assert apart <= error[kind] and (apart > 0) == (kind != "bf16")
    assert torch.equal(tensors["language_model.lm_head.weight"], original["language_model.lm_head.weight"])
    assert (target / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("experts", ["nvfp4", "mxfp8"])
def test_packed_experts_are_the_same_experts(experts: Stored, tiny: Path, tmp_path: Path) -> None:
    convert(tiny, tmp_path / "m", Scheme(experts, "bf16"))
    source = resolve_source(ModelConfig(path=str(tmp_path / "m")))
    config = minimax_m3_config(source.config)
    kinds = {"dtype": torch.float32, "kv_dtype": torch.float32, "device": torch.device("cpu")}
    stacked = load_minimax_m3(config, PublishedCheckpoint.of(source), **kinds)
    packed = load_minimax_m3(config, PublishedCheckpoint.of(source), **kinds, pack_above_bytes=0)
    for one, two in zip(stacked.layers, packed.layers, strict=True):
        if isinstance(one.mlp, MoeWeights) and isinstance(two.mlp, MoeWeights):
            assert isinstance(one.mlp.experts, StackedExperts) and isinstance(two.mlp.experts, PackedExperts)
            for number in range(config.experts):
                assert torch.equal(one.mlp.experts.w13(number), two.mlp.experts.w13(number))
                assert torch.equal(one.mlp.experts.w2(number), two.mlp.experts.w2(number))
    ids = list(range(300))
    runs = [PagedRunner(model, rows=1, max_tokens=300).step({0: ids})[0] for model in (stacked, packed)]
    assert torch.equal(*runs)


def test_published_names_and_types(m31: Path) -> None:
    tensors = stored(m31)
    assert tensors[f"{EXPERT}_packed"].dtype == torch.uint8
    assert tensors[f"{EXPERT}_scale"].dtype == torch.float8_e4m3fn
    assert tensors[f"{EXPERT}_global_scale"].dtype == torch.float32
    assert tensors[DENSE].dtype == torch.float8_e4m3fn and tensors[f"{DENSE}_scale_inv"].dtype == torch.uint8
    assert tensors[f"{AT}.block_sparse_moe.gate.weight"].dtype == torch.float32
    assert json.loads((m31 / "config.json").read_text())["quantization_config"] == {
        "quant_method": "mxfp8",
        "moe_quant_algo": "NVFP4",
        "moe_quant_format": "nvfp4-pack-quantized",
    }
    pair = [tensors[EXPERT.replace("w1", part) + "_global_scale"] for part in ("w1", "w3")]
    assert torch.equal(*pair), "gate and up share a scale, for kernels that run them as one"


def test_conventions_of_the_tensor_scale_agree(tiny: Path, m31: Path, tmp_path: Path) -> None:
    """Dividing and multiplying describe the same weights, up to the rounding of 1/x."""
    convert(tiny, tmp_path / "modelopt", Scheme("nvfp4", "mxfp8", "modelopt"))
    one, two = opened(m31).load(EXPERT), opened(tmp_path / "modelopt").load(EXPERT)
    assert 0.01 < float(one.std()) < 1
    torch.testing.assert_close(one, two, rtol=1e-6, atol=0)


def test_a_quantised_source_converts_back(m31: Path, tmp_path: Path) -> None:
    convert(m31, tmp_path / "plain", Scheme("bf16", "bf16"))
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())
    want = opened(m31)
    got = opened(tmp_path / "plain")
    for name in want.names():
        assert torch.equal(got.load(name).float(), want.load(name).to(got.load(name).dtype).float())


def test_modelopt_in_a_file_of_its_own(tiny: Path, tmp_path: Path) -> None:
    target = tmp_path / "modelopt"
    convert(tiny, target, Scheme("nvfp4", "mxfp8", "modelopt"))
    config = json.loads((target / "config.json").read_text())
    del config["quantization_config"]
    (target / "config.json").write_text(json.dumps(config))
    assert opened(target).quant.method == "modelopt MIXED_PRECISION"
    load(target)


def test_activation_scales_are_passed_over(m31: Path, tmp_path: Path) -> None:
    shutil.copytree(m31, tmp_path / "m")
    save_file({f"{AT}.self_attn.q_proj.input_scale": torch.ones(1)}, tmp_path / "m/model-extra.safetensors")
    index = json.loads((tmp_path / "m/model.safetensors.index.json").read_text())
    index["weight_map"][f"{AT}.self_attn.q_proj.input_scale"] = "model-extra.safetensors"
    (tmp_path / "m/model.safetensors.index.json").write_text(json.dumps(index))
    load(tmp_path / "m")


def test_single_file_and_shards_hold_the_same(tiny: Path, tmp_path: Path) -> None:
    assert len(list(tiny.glob("*.safetensors"))) > 3
    shutil.copytree(tiny, tmp_path / "one")
    for file in [*(tmp_path / "one").glob("*.safetensors"), tmp_path / "one/model.safetensors.index.json"]:
        file.unlink()
    save_file(stored(tiny), tmp_path / "one/model.safetensors")
    one, many = opened(tmp_path / "one"), opened(tiny)
    assert all(torch.equal(one.load(name), many.load(name)) for name in many.names())


def test_released_tensors_are_still_right(tiny: Path) -> None:
    checkpoint = opened(tiny)
    before = checkpoint.load(EXPERT)
    copy = before.clone()
    checkpoint.release()
    assert torch.equal(before, copy) and torch.equal(checkpoint.load(EXPERT), copy)


# --- damage -----------------------------------------------------------------------------------------------------------


Change = Callable[[dict[str, torch.Tensor]], object]


def rewrite(path: Path, change: Change) -> None:
    tensors = stored(path)
    change(tensors)
    for file in [*path.glob("*.safetensors"), path / "model.safetensors.index.json"]:
        file.unlink()
    save_file(tensors, path / "model.safetensors")


def put(name: str, tensor: torch.Tensor) -> Change:
    return lambda tensors: tensors.update({name: tensor})


def drop(name: str) -> Change:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "key", "expectation"),
    [
        (drop(f"{EXPERT}_scale"), f"{EXPERT}_scale is missing", "the scales of"),
        (drop(f"{EXPERT}_global_scale"), f"{EXPERT}_global_scale is missing", "the scales of"),
        (drop(f"{EXPERT}_packed"), f"{EXPERT}_scale has type F8_E4M3", "expected one of F32, F16, BF16"),
        (drop(f"{DENSE}_scale_inv"), f"{DENSE}_scale is missing", "the scales of"),
        (drop(f"{AT}.self_attn.o_proj.weight"), "o_proj.weight_scale_inv has type U8", "or a weight with its scales"),
        (drop(f"{AT}.block_sparse_moe.gate.weight"), "gate.weight is missing", ""),
        (put(f"{EXPERT}_scale", torch.ones(64, 4).to(torch.float8_e4m3fn)), "_scale has shape [64, 4]", "[64, 8]"),
        (put(f"{EXPERT}_scale", torch.ones(64, 8)), f"{EXPERT}_scale has type F32", "expected F8_E4M3"),
        (put(f"{EXPERT}_global_scale", torch.ones(2)), "has shape [2]", "expected one number"),
        (put(f"{EXPERT}_global_scale", torch.zeros(1)), f"{EXPERT}_global_scale is 0.0", "expected a positive number"),
        (put(f"{EXPERT}_packed", torch.ones(64, 64)), "has type F32", "expected U8"),
        (put(f"{DENSE}_scale_inv", torch.ones(128, 4)), "has type F32", "expected U8 or F8_E8M0"),
        (put(f"{AT}.input_layernorm.weight", torch.ones(127)), "input_layernorm.weight has shape [127]", "not [128]"),
        (put(f"{AT}.input_layernorm.weight", torch.ones(128, dtype=torch.int32)), "type I32", "expected one of F32"),
        (put(f"{AT}.self_attn.q_proj.bias", torch.ones(128)), "self_attn.q_proj.bias", "no place"),
        (put(DENSE, torch.ones(128, 100).to(torch.float8_e4m3fn)), "rows of 100 values", "expected a multiple of 32"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit(change: Change, key: str, expectation: str, m31: Path, tmp_path: Path) -> None:
    shutil.copytree(m31, tmp_path / "m")
    rewrite(tmp_path / "m", change)
    with pytest.raises(ModelError) as caught:
        load(tmp_path / "m")
    message = str(caught.value)
    assert str(tmp_path / "m") in message and key in message and expectation in message and "\n" not in message


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"quant_method": "quark"}, "quantisation 'quark' is not supported"),
        ({"quant_algo": "NVFP4"}, "quantisation 'unnamed' is not supported"),
        ({"quant_method": "mxfp8", "moe_quant_algo": "INT4"}, "moe_quant_algo: quantisation 'INT4'"),
        ({"quant_method": "mxfp8", "moe_quant_algo": "NVFP4", "moe_quant_format": "x"}, "moe_quant_format 'x'"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, "quant_algo: quantisation 'FP8'"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "has no quantized_layers"),
        ({"quant_method": "compressed-tensors"}, "has no config_groups"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"type": "int", "num_bits": 4}}}},
            "config_groups.g: weights of type int, 4 bits",
        ),
        ({"quant_method": "mxfp8"}, "experts.0.w1.weight is nvfp4, but is declared to be mxfp8"),
        (None, "is mxfp8, but no quantization_config says so"),
    ],
)
def test_declarations_that_do_not_fit(declared: Any, message: str, m31: Path, tmp_path: Path) -> None:
    shutil.copytree(m31, tmp_path / "m")
    config = json.loads((m31 / "config.json").read_text()) | {"quantization_config": declared}
    (tmp_path / "m/config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message) as caught:
        load(tmp_path / "m")
    assert str(tmp_path / "m") in str(caught.value) and "\n" not in str(caught.value)


def header(value: Any) -> bytes:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack("<Q", len(data)) + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a header of 0 bytes in a file of 0 bytes"),
        (b"\x01", "damaged"),
        (struct.pack("<Q", 1 << 40), "a header of 1099511627776 bytes in a file of 8 bytes"),
        (header(b"{not json"), "header is no JSON"),
        (header(b"\xff\xfe"), "header is no JSON"),
        (header([1]), "header is not a JSON object"),
        (header({"w": 3}), "entry of tensor w"),
        (header({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}), "entry of tensor w"),
        (header({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}), "is the file whole"),
        (header({"w": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}), "is the file whole"),
        (header({"w": {"dtype": "F32", "shape": [3], "data_offsets": [0, 0]}}), "tensor w has 0 bytes, expected 12"),
    ],
)
def test_corrupt_headers(content: bytes, message: str, tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "m")
    victim = sorted((tmp_path / "m").glob("*.safetensors"))[1]
    victim.write_bytes(content)
    with pytest.raises(ModelError, match=message) as caught:
        load(tmp_path / "m")
    assert str(victim) in str(caught.value) and "\n" not in str(caught.value)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_damage_to_a_header_is_an_error_or_harmless(data: st.DataObject, tmp_path: Path) -> None:
    """Whatever bytes a header has, the result is a table of tensors that lie in the file, or one line that names it."""
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.uint8)}, file)
    content = bytearray(file.read_bytes())
    size = 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, size - 1))] = data.draw(st.integers(0, 255))
    file.write_bytes(content)
    try:
        shards = Shards(tmp_path, (file,))
    except ModelError as error:
        assert str(file) in str(error) and "\n" not in str(error)
        return
    for name in shards.names():
        tensor = shards.find(name)
        assert 8 <= tensor.begin <= tensor.end <= len(content)
        with contextlib.suppress(ModelError):
            assert shards.load(name).shape == tensor.shape


def test_missing_shard_and_missing_key(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "m")
    victim = sorted((tmp_path / "m").glob("*.safetensors"))[1]
    tensors = load_file(victim)
    name = next(iter(tensors))
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, victim)
    with pytest.raises(ModelError, match=f"{victim}: tensor {name} is missing, which model.safetensors.index.json"):
        load(tmp_path / "m")
    victim.unlink()
    with pytest.raises(ModelError, match=victim.name):
        load(tmp_path / "m")


def test_truncated_shard(tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "m")
    victim = sorted((tmp_path / "m").glob("*.safetensors"))[0]
    victim.write_bytes(victim.read_bytes()[:-5])
    with pytest.raises(ModelError, match=f"{victim}: damaged safetensors file .tensor .* is the file whole"):
        load(tmp_path / "m")


def test_conversions_that_cannot_be(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(ConfigError, match="exists already"):
        convert(tiny, tmp_path / "there", Scheme())
    with pytest.raises(ConfigError, match="dense weights can be mxfp8 or bf16, not nvfp4"):
        Scheme("nvfp4", "nvfp4")
    shutil.copytree(tiny, tmp_path / "m")
    rewrite(tmp_path / "m", lambda tensors: tensors[EXPERT].fill_(math.inf))
    with pytest.raises(ModelError, match=f"{tmp_path / 'm'}: tensor {EXPERT} has values that are not finite"):
        convert(tmp_path / "m", tmp_path / "x", Scheme("nvfp4", "bf16"))
    assert not [path for path in tmp_path.iterdir() if path.name not in ("there", "m")], "nothing half-written stays"


def test_files_are_read_alike_by_the_safetensors_library(m31: Path) -> None:
    for file in m31.glob("*.safetensors"):
        with safe_open(file, framework="pt") as handle:
            assert handle.metadata() == {"format": "pt"}
