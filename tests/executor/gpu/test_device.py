"""The executor on a real GPU against the CPU backend: graphs, run-ahead, prefix cache, preemption, checkpoints."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("no GPU, or Triton interprets", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")  # not before: other tests set how it is imported

from tests.executor.gpu.tiny import TINY, cpu_executor, gpu_executor, request, run, tiny_model, with_packed_experts

from longturn.assemble import build_engine
from longturn.config import CacheConfig, EngineConfig, ExecutorConfig, ModelConfig, SchedulerConfig
from longturn.engine.loop import Engine
from longturn.engine.records import EngineRequest, SamplingParams, TokenLogprobs, pack_tokens
from longturn.executor.gpu.executor import GpuExecutor
from longturn.executor.gpu.steps import GpuLimits
from longturn.models import make_checkpoint
from longturn.models.checkpoint.scheme import Scheme
from longturn.models.minimax_m3_gpu import MiniMaxM3Gpu
from longturn.models.minimax_m3_gpu_weights import GpuWeights

MIXED = Scheme(experts="nvfp4", dense="mxfp8")


@pytest.mark.parametrize(
    ("run_ahead", "dense_attention", "packed"), [(False, 1, False), (True, 0, False), (True, 1, True)]
)
def test_greedy_output_equals_the_cpu_backends(run_ahead: bool, dense_attention: int, packed: bool) -> None:
    """64 tokens each, in fp32: short and sparse prompts, in chunks beside decodes, cached, more than fit at once."""
    rng = random.Random(5)
    prompts = [[rng.randrange(256) for _ in range(count)] for count in (1, 40, 127, 128, 129, 300, 700)]
    first = [request(f"r{i}", tokens, 64) for i, tokens in enumerate(prompts)]
    warm = [request(f"w{i}", [*tokens, 5, 6, 7], 64) for i, tokens in enumerate(prompts)]
    again = [request("same", prompts[-1][:512], 64), request("again", prompts[-1][:640], 64)]
    waves, sizes = [first, warm, again], {"pages": 14, "rows": 3, "context": 1024}
    cpu = tiny_model(dense_attention=dense_attention)
    if packed:
        cpu = with_packed_experts(cpu)
    wanted = list(run(cpu_executor(cpu, **sizes), waves, run_ahead=run_ahead, step_tokens=256))
    executor = gpu_executor(GpuWeights.of(cpu, "cuda"), **sizes, step_tokens=256, graphs=True)
    assert list(run(executor, waves, run_ahead=run_ahead, step_tokens=256)) == wanted


def test_graphs_made_on_first_use_give_the_same_tokens() -> None:
    """Beside those that all exist before the first step; some are made by `idle` between two waves."""
    rng = random.Random(6)
    prompts = [[rng.randrange(256) for _ in range(count)] for count in (3, 140, 300)]
    waves = [[request(f"{wave}{i}", tokens, 8) for i, tokens in enumerate(prompts)] for wave in "ab"]
    weights, sizes = GpuWeights.of(tiny_model(), "cuda"), {"pages": 14, "rows": 3, "context": 1024}
    wanted = list(
        run(gpu_executor(weights, **sizes, step_tokens=256, graphs=True), waves, run_ahead=True, step_tokens=256)
    )
    lazy = GpuExecutor(MiniMaxM3Gpu(weights, 14), GpuLimits(3, 256, 1024), description="test")
    before = lazy.start()
    waves_got = run(lazy, waves, run_ahead=True, step_tokens=256)
    got = [next(waves_got)]
    assert lazy.idle() and len(lazy._graphs) > before
    assert [*got, *waves_got] == wanted


def test_pages_that_left_for_host_memory_come_back() -> None:
    rng = random.Random(1)
    prompt, filler = ([rng.randrange(256) for _ in range(count)] for count in (331, 500))
    executor = GpuExecutor(
        MiniMaxM3Gpu(GpuWeights.of(tiny_model(), "cuda"), 6), GpuLimits(1, 256, 512, host_pages=8), description="test"
    )
    executor.capture()
    loads: list[int] = []
    launch = executor.launch

    def noting(plan: object) -> object:
        loads.append(len(plan.load_pages))  # type: ignore[attr-defined]
        return launch(plan)  # type: ignore[arg-type]

    executor.launch = noting  # type: ignore[method-assign, assignment]
    waves = [[request("cold", prompt, 8)], [request("filler", filler, 1)], [request("back", prompt, 8)]]
    cold, _, back = run(executor, waves, run_ahead=True, step_tokens=256)
    assert sum(loads) >= 1
    assert back["back"] == cold["cold"]


@pytest.mark.parametrize(("scheme", "cache"), [(Scheme(), "auto"), (MIXED, "auto"), (MIXED, "fp8"), (MIXED, "nvfp4")])
@pytest.mark.parametrize("dense_attention", [0, 1])
def test_a_checkpoint_follows_the_cpu_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: Scheme, cache: str, dense_attention: int
) -> None:
    """In bf16, greedily: at every position the CPU, given the same tokens, would have chosen the same, or nearly so.

    A near tie of the router may rightly fall the other way and change more, so a tenth of the positions is let off.
    """
    if dense_attention and cache not in ("auto", "bf16"):
        pytest.skip("dense attention takes plain caches")
    preset = replace(TINY, vocab_size=1024, layers=3, dense_attention=dense_attention)
    monkeypatch.setitem(make_checkpoint.PRESETS, "tiny-gpu", preset)  # type: ignore[arg-type]
    made = make_checkpoint.make_checkpoint(tmp_path / "m3", "tiny-gpu", scheme=scheme)
    rng = random.Random(7)
    prompts = [[rng.randrange(1024) for _ in range(count)] for count in (5, 400)]
    gpu = engine(made.path, "cuda", cache)
    chosen = [list(generated(gpu, [prompt], 64)) for prompt in prompts]
    gpu.close()
    cpu = engine(made.path, "cpu", "bf16" if cache == "auto" else cache)
    off = []
    for prompt, answers in zip(prompts, chosen, strict=True):
        tokens = [token for token, _ in answers]
        told = generated(cpu, [[*prompt, *tokens[:i]] for i in range(len(tokens))], 1)
        for (token, logprobs), (_, wanted) in zip(answers, told, strict=True):
            top = dict(zip(wanted.top_ids, wanted.top, strict=True))
            near = top.get(token, float("-inf"))
            off.append(max(abs(near - logprobs.token), wanted.top[0] - near))
    cpu.close()
    assert len(off) == 128
    assert sorted(off)[len(off) * 9 // 10] < 0.05, sorted(off)[-20:]


def engine(path: Path, device: str, cache: str) -> Engine:
    return build_engine(
        EngineConfig(
            model=ModelConfig(path=str(path), weights="auto" if device == "cuda" else "fp32"),
            cache=CacheConfig(memory_bytes=32 << 20, dtype=cache),  # type: ignore[arg-type]
            scheduler=SchedulerConfig(max_running=2, step_tokens=300),
            executor=ExecutorConfig(device=device),  # type: ignore[arg-type]
        )
    )


def generated(engine: Engine, prompts: list[list[int]], count: int) -> Iterator[tuple[int, TokenLogprobs]]:
    """Tokens of each prompt's greedy answer, one prompt after the other."""
    for prompt in prompts:
        params = SamplingParams(count, temperature=0.0, logprobs=20)
        engine.add(EngineRequest("r", pack_tokens(prompt), (), params))
        while engine.has_work():
            step = engine.step()
            for output in step.outputs if step is not None else ():
                assert output.error is None, output.error
                yield from zip(output.token_ids, output.logprobs, strict=True)
