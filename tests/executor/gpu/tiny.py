"""A MiniMax-M3 small enough for Triton's interpreter, on the CPU backend and on the GPU executor's kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from tests.executor.gpu.random_model import random_minimax_m3

from longturn.config import CacheConfig, SchedulerConfig
from longturn.engine.clock import SystemClock
from longturn.engine.hashing import page_hashes
from longturn.engine.loop import Engine
from longturn.engine.protocols import Executor
from longturn.engine.records import EngineRequest, SamplingParams, pack_tokens
from longturn.executor.cpu import CpuExecutor
from longturn.executor.gpu.executor import GpuExecutor
from longturn.executor.gpu.steps import GpuLimits
from longturn.executor.torch_model import TorchCpuModel
from longturn.grammar_library import Vocabulary
from longturn.kernels.sampling_table import SamplePlan
from longturn.kernels.small_linear import LinearPlan
from longturn.models.make_checkpoint import Preset, preset_config
from longturn.models.minimax_m3 import MiniMaxM3, MiniMaxM3Layer, MoeWeights, PackedExperts, StackedExperts
from longturn.models.minimax_m3_cache import minimax_m3_kv
from longturn.models.minimax_m3_config import minimax_m3_config
from longturn.models.minimax_m3_gpu import MiniMaxM3Gpu
from longturn.models.minimax_m3_gpu_plans import GpuPlans
from longturn.models.minimax_m3_gpu_weights import GpuWeights
from longturn.ops.nvfp4 import quantize_weight

TINY = Preset(
    hidden=128, layers=2, heads=2, kv_heads=1, head_dim=128, rotary_dim=64, index_dim=128, top_blocks=2,
    dense_ffn=128, expert_ffn=64, experts=8, top_experts=2, vocab_size=256, context=65536,
)  # fmt: skip
"""Two chosen blocks, so that 257 tokens are enough to be sparse."""


def tiny_model(*, dense_attention: int = 0, seed: int = 3) -> MiniMaxM3:
    """In fp32 on the CPU; the first `dense_attention` layers attend to everything."""
    preset = replace(TINY, dense_attention=dense_attention)
    config = minimax_m3_config(preset_config(preset)["text_config"])
    return random_minimax_m3(config, dtype=torch.float32, device="cpu", seed=seed)


def with_packed_experts(model: MiniMaxM3) -> MiniMaxM3:
    """The same model with its experts in NVFP4, as a checkpoint would have them."""

    def packed(layer: MiniMaxM3Layer) -> MiniMaxM3Layer:
        if not isinstance(layer.mlp, MoeWeights) or not isinstance(layer.mlp.experts, StackedExperts):
            return layer
        stacked = layer.mlp.experts
        gates, ups = zip(*(w13.chunk(2) for w13 in stacked.gate_up), strict=True)
        parts = (tuple(quantize_weight(w.contiguous()) for w in part) for part in (gates, ups, stacked.down))
        return replace(layer, mlp=replace(layer.mlp, experts=PackedExperts(*parts)))

    return replace(model, layers=tuple(map(packed, model.layers)))


def with_cache(model: MiniMaxM3, dtype: torch.dtype) -> MiniMaxM3:
    """The same model with keys and values of this type, and an index key in fp8 if it has fewer bits."""
    return replace(model, kv=minimax_m3_kv(model.config, dtype))


def cpu_executor(model: MiniMaxM3, *, pages: int, rows: int, context: int) -> CpuExecutor:
    return CpuExecutor(TorchCpuModel(model, pages=pages, max_context_tokens=context, threads=1), rows)


def gpu_executor(
    weights: GpuWeights, *, pages: int, rows: int, context: int, step_tokens: int, graphs: bool = False,
    vocabulary: Callable[[], Vocabulary] | None = None,
) -> GpuExecutor:  # fmt: skip
    few_programs = weights.head.device.type == "cpu"  # the interpreter takes milliseconds for each
    linear = LinearPlan(rows=128) if few_programs else LinearPlan()
    sample_plan = SamplePlan(parts=2, width=16) if few_programs else SamplePlan()
    limits = GpuLimits(rows, step_tokens, context, graphs, sample_plan)
    model = MiniMaxM3Gpu(weights, pages, GpuPlans(linear, linear))
    executor = GpuExecutor(model, limits, description="test", vocabulary=vocabulary)
    if graphs:
        executor.capture()
    return executor


def request(name: str, tokens: list[int], max_tokens: int, **sampling: float) -> EngineRequest:
    prompt, key = pack_tokens(tokens), b"k" * 32
    params = SamplingParams(max_tokens, **{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
    return EngineRequest(name, prompt, page_hashes(prompt, key), params, hash_key=key)


def run(
    executor: Executor, waves: list[list[EngineRequest]], *, run_ahead: bool, step_tokens: int
) -> Iterator[dict[str, tuple[int, ...]]]:
    """Outputs of each wave of requests, one wave after the other on one engine, which must end in balance."""
    config = SchedulerConfig(
        max_running=executor.info.rows, step_tokens=step_tokens, target_itl_ms=0, run_ahead=run_ahead,
        expected_output_tokens=1,
    )  # fmt: skip
    engine = Engine(executor, config, CacheConfig(), SystemClock())
    for wave in waves:
        out: dict[str, list[int]] = {r.request_id: [] for r in wave}
        for r in wave:
            engine.add(r)
        while engine.has_work():
            step = engine.step()
            for output in step.outputs if step is not None else ():
                assert output.error is None, output.error
                out[output.request_id] += output.token_ids
        engine.check_invariants()
        yield {name: tuple(tokens) for name, tokens in out.items()}
    engine.close()
