"""The executor on a real GPU against the CPU backend: graphs, run-ahead, prefix cache, preemption."""

from __future__ import annotations

import os
import random

import pytest
import torch

if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("no GPU, or Triton interprets", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")  # not before: other tests set how it is imported

from tests.executor.gpu.tiny import cpu_executor, gpu_executor, request, run, tiny_model

from longturn.models.minimax_m3_gpu_weights import GpuWeights


@pytest.mark.parametrize(("run_ahead", "dense_attention"), [(False, 1), (True, 0)])
def test_greedy_output_equals_the_cpu_backends(run_ahead: bool, dense_attention: int) -> None:
    """64 tokens each, in fp32: short and sparse prompts, in chunks beside decodes, cached, more than fit at once."""
    rng = random.Random(5)
    prompts = [[rng.randrange(256) for _ in range(count)] for count in (1, 40, 127, 128, 129, 300, 700)]
    first = [request(f"r{i}", tokens, 64) for i, tokens in enumerate(prompts)]
    warm = [request(f"w{i}", [*tokens, 5, 6, 7], 64) for i, tokens in enumerate(prompts)]
    again = [request("same", prompts[-1][:512], 64), request("again", prompts[-1][:640], 64)]
    waves, sizes = [first, warm, again], {"pages": 14, "rows": 3, "context": 1024}
    cpu = tiny_model(dense_attention=dense_attention)
    wanted = list(run(cpu_executor(cpu, **sizes), waves, run_ahead=run_ahead, step_tokens=256))
    executor = gpu_executor(GpuWeights.of(cpu, "cuda"), **sizes, step_tokens=256, graphs=True)
    assert list(run(executor, waves, run_ahead=run_ahead, step_tokens=256)) == wanted
