"""A prompt that left the GPU executor's pool for host memory and came back, in Triton's interpreter."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

os.environ["TRITON_INTERPRET"] = "1"  # read when triton and each kernel are imported, so it must precede both
pytest.importorskip("triton", reason="triton is not installed")
if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
    pytest.skip("the interpreter of Triton 3.6 needs numpy below 2.4", allow_module_level=True)

from tests.executor.gpu.tiny import request, run, tiny_model

from longturn.executor.gpu.executor import GpuExecutor
from longturn.executor.gpu.steps import GpuLimits
from longturn.kernels.sampling_table import SamplePlan
from longturn.kernels.small_linear import LinearPlan
from longturn.models.minimax_m3_gpu import MiniMaxM3Gpu
from longturn.models.minimax_m3_gpu_plans import GpuPlans
from longturn.models.minimax_m3_gpu_weights import GpuWeights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padded rows divide 0 by 0, and nobody reads them
@pytest.mark.interpreted
def test_a_page_that_left_and_came_back_gives_the_same_tokens() -> None:
    rng = random.Random(1)
    prompt, filler = ([rng.randrange(256) for _ in range(count)] for count in (131, 200))
    linear = LinearPlan(rows=128)
    model = MiniMaxM3Gpu(GpuWeights.of(tiny_model()), 3, GpuPlans(linear, linear))
    limits = GpuLimits(1, 256, 256, False, SamplePlan(parts=2, width=16), host_pages=4)
    executor = GpuExecutor(model, limits, description="test")
    loaded: list[int] = []
    launch = executor.launch

    def noting(plan: object) -> object:
        loaded.append(len(plan.load_pages))  # type: ignore[attr-defined]
        return launch(plan)  # type: ignore[arg-type]

    executor.launch = noting  # type: ignore[method-assign, assignment]
    waves = [[request("cold", prompt, 3)], [request("filler", filler, 1)], [request("back", prompt, 3)]]
    cold, _, back = run(executor, waves, run_ahead=True, step_tokens=256)
    assert sum(loaded) == 1
    assert back["back"] == cold["cold"]
