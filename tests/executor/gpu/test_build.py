"""What a user is told where a GPU is asked for and cannot be had."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from longturn.assemble import GPU_STEP_TOKENS, build_engine, gpu_defaults, on_gpu
from longturn.config import CacheConfig, EngineConfig, ExecutorConfig, ModelConfig, SchedulerConfig
from longturn.errors import ConfigError
from longturn.executor.gpu import device
from longturn.models.checkpoint.scheme import Scheme
from longturn.models.make_checkpoint import PRESETS, make_checkpoint, preset_config
from longturn.models.minimax_m3_config import minimax_m3_config
from longturn.source import resolve_source


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("m3") / "tiny", "tiny").path


def config(path: Path, wanted: str) -> EngineConfig:
    return EngineConfig(model=ModelConfig(path=str(path)), executor=ExecutorConfig(device=wanted))  # type: ignore[arg-type]


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_a_torch_without_cuda_is_named(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"torch .* was built without CUDA") as caught:
        build_engine(config(checkpoint, "cuda"))
    assert "\n" not in str(caught.value) and "'cpu' works" in str(caught.value)
    assert not on_gpu(config(checkpoint, "auto"))


class Gpu:
    """A machine with a GPU, as torch would describe it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], trouble: str | None = None):
        def init() -> None:
            if trouble is not None:
                raise RuntimeError(trouble)

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: trouble is None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *args: "NVIDIA Test")
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: object())


@pytest.mark.parametrize(
    ("capability", "trouble", "words"),
    [
        ((8, 0), None, "NVIDIA Test has compute capability 8.0, and 9.0 is needed"),
        ((9, 0), "The NVIDIA driver on your system is too old (found version 12000).", "driver is too old for"),
        ((9, 0), "No CUDA GPUs are available", r"no GPU can be used here \(No CUDA GPUs are available\)"),
    ],
)
def test_what_is_wrong_with_the_machine_is_named(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Path, capability: tuple[int, int], trouble: str | None, words: str
) -> None:
    Gpu(monkeypatch, capability, trouble)
    with pytest.raises(ConfigError, match=words):
        on_gpu(config(checkpoint, "cuda"))
    assert not on_gpu(config(checkpoint, "auto"))


def test_a_model_that_kernels_do_not_take_is_named(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    Gpu(monkeypatch, (9, 0))
    with pytest.raises(ConfigError, match=r"not supported by the GPU kernels: head_dim 32 \(128 is\)"):
        on_gpu(config(checkpoint, "cuda"))
    assert not on_gpu(config(checkpoint, "auto"))


def test_another_family_is_named_without_torch() -> None:
    wanted = EngineConfig(executor=ExecutorConfig(device="cuda"))
    with pytest.raises(ConfigError, match="architecture LlamaForCausalLM has no GPU kernels"):
        on_gpu(wanted)
    assert not on_gpu(EngineConfig())


def test_the_presets_of_the_benchmarks_are_served() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from longturn.models.minimax_m3_gpu_limits import weight_bytes, why_not_on_gpu

    for name, gigabytes in (("mini60", 50), ("slice8", 107)):
        c = minimax_m3_config(preset_config(PRESETS[name])["text_config"])
        assert why_not_on_gpu(c) is None
        assert abs(weight_bytes(c) / 1e9 - gigabytes) < 5
        assert why_not_on_gpu(replace(c, experts=96)) is not None


def test_only_a_default_step_budget_grows_on_a_gpu() -> None:
    assert gpu_defaults(EngineConfig()).scheduler.step_tokens == GPU_STEP_TOKENS
    chosen = EngineConfig(scheduler=SchedulerConfig(step_tokens=300))
    assert gpu_defaults(chosen) == chosen


@pytest.mark.parametrize(
    ("dtype", "dense_attention", "words"),
    [
        ("fp16", 0, r"cache.dtype 'fp16' is not supported on a GPU \(auto, bf16, fp8, nvfp4 are\)"),
        ("nvfp4", 1, "cache.dtype 'nvfp4' is not supported on a GPU for a model that has layers with dense attention"),
        ("fp8", 0, None),
        ("bf16", 1, None),
    ],
)
def test_caches_that_kernels_do_not_take_are_named(dtype: str, dense_attention: int, words: str | None) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from longturn.executor.gpu.build import _check_settings

    preset = replace(PRESETS["tiny"], dense_attention=dense_attention)
    c = minimax_m3_config(preset_config(preset)["text_config"])
    wanted = EngineConfig(cache=CacheConfig(dtype=dtype))  # type: ignore[arg-type]
    if words is None:
        _check_settings(wanted, c)
        return
    with pytest.raises(ConfigError, match=words) as caught:
        _check_settings(wanted, c)
    assert "\n" not in str(caught.value)


def memory_of(monkeypatch: pytest.MonkeyPatch, path: Path, free_mb: float, **settings: object) -> Any:
    """What `build` makes of a card with so much memory for the tiny checkpoint."""
    from longturn.executor.gpu import build

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *args: (int(free_mb * 1e6), 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *args: "NVIDIA Test")
    monkeypatch.setattr(build, "_CONTEXT_BYTES", 0)
    wanted = replace(config(path, "cuda"), **settings)  # type: ignore[arg-type]
    source = resolve_source(wanted.model)
    return build._memory(wanted, minimax_m3_config(source.config), source, torch.device("cpu"))


@pytest.mark.parametrize("experts", ["bf16", "mxfp8", "nvfp4"])
def test_weights_take_what_their_files_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, experts: Literal["bf16", "mxfp8", "nvfp4"]
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from longturn.models.minimax_m3_gpu_limits import scratch_bytes

    made = make_checkpoint(tmp_path / "m3", "tiny", scheme=Scheme(experts=experts)).path
    stored = sum(file.stat().st_size for file in made.glob("*.safetensors"))
    source = resolve_source(ModelConfig(path=str(made)))
    c = minimax_m3_config(source.config)
    tokens = SchedulerConfig().step_tokens
    scratch = scratch_bytes(c, tokens, source.max_context_tokens, packed_experts=experts != "bf16")
    weights = 900 * 10**6 - scratch - memory_of(monkeypatch, made, 900).pool_bytes
    assert 0.9 * stored < weights < 1.5 * stored


def test_a_card_that_is_too_small_says_what_would_fit(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    few = SchedulerConfig(step_tokens=65_536, max_running=8)
    with pytest.raises(ConfigError, match=r"GB of weights and .* of scratch, .*; scheduler.step_tokens 512 would fit$"):
        memory_of(monkeypatch, checkpoint, 600, scheduler=few)
    with pytest.raises(ConfigError, match=r"does not fit on NVIDIA Test: .*; no format of it would$"):
        memory_of(monkeypatch, checkpoint, 1, scheduler=few)
    with pytest.raises(ConfigError, match=r"cache.memory_bytes 80000000000 is more than fits, which is \d+: "):
        memory_of(monkeypatch, checkpoint, 900, cache=CacheConfig(memory_bytes=80 * 10**9))


def test_running_out_of_memory_while_loading_is_one_line(monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from longturn.executor.gpu import build

    source = resolve_source(ModelConfig(path=str(checkpoint)))
    with (
        pytest.raises(ConfigError, match=r"does not fit on CARD beside 2\.0 GB of pages: words; a smaller"),
        build._told(source, "CARD", build._Memory(2 * 10**9, "words")),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")
