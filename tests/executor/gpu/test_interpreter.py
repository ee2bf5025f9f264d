"""The whole GPU executor in Triton's interpreter, against the CPU backend: the same engine, the same tokens."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("a GPU is there, and test_device.py runs the kernels themselves", allow_module_level=True)
os.environ["TRITON_INTERPRET"] = "1"  # read when triton and each kernel are imported, so it must precede both
pytest.importorskip("triton", reason="triton is not installed")
if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
    pytest.skip("the interpreter of Triton 3.6 needs numpy below 2.4", allow_module_level=True)

from tests.executor.gpu.tiny import (
    cpu_executor,
    gpu_executor,
    request,
    run,
    tiny_model,
    with_cache,
    with_packed_experts,
)

from longturn.config import CacheConfig, SchedulerConfig
from longturn.engine.clock import SystemClock
from longturn.engine.loop import Engine
from longturn.executor.gpu import layout
from longturn.executor.grammar import GrammarError
from longturn.grammar_library import Vocabulary
from longturn.kernels import step_state
from longturn.models.minimax_m3_gpu_weights import GpuWeights
from longturn.ops.kv_lane import FP8, NVFP4

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_the_host_and_the_scatter_kernel_agree_on_the_header() -> None:
    assert layout.HEADER_WORDS == step_state.HEADER_WORDS


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padded rows divide 0 by 0, and nobody reads them
@pytest.mark.interpreted
def test_chunked_cached_and_run_ahead_steps_equal_the_cpu_backend() -> None:
    """A short prompt beside a sparse one in chunks; then the sparse one again, cached, and once cached whole."""
    rng = random.Random(1)
    short, sparse = ([rng.randrange(256) for _ in range(count)] for count in (20, 270))
    waves = [
        [request("short", short, 3), request("sparse", sparse, 3)],
        [request("warm", [*sparse[:257], 1, 2, 3], 3), request("whole", sparse[:256], 2)],
    ]
    sizes = {"pages": 40, "rows": 3, "context": 1024}
    model = tiny_model()
    wanted = list(run(cpu_executor(model, **sizes), waves, run_ahead=True, step_tokens=160))
    executor = gpu_executor(GpuWeights.of(model), **sizes, step_tokens=160)
    executor.start()  # other shapes run over padding when they first come, beside rows that decode
    later = list(executor._later)
    assert later
    assert list(run(executor, waves, run_ahead=True, step_tokens=160)) == wanted
    assert len(executor._later) < len(later)


@pytest.mark.parametrize("dtype", [FP8, NVFP4])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.interpreted
def test_caches_of_fewer_bits_equal_the_cpu_backend(dtype: torch.dtype) -> None:
    """Chunks, a decode, and pages found again."""
    rng = random.Random(4)
    prompt = [rng.randrange(256) for _ in range(270)]
    waves = [[request("cold", prompt, 3)], [request("warm", [*prompt[:257], 1, 2], 2)]]
    sizes = {"pages": 10, "rows": 2, "context": 512}
    model = with_cache(tiny_model(), dtype)
    wanted = list(run(cpu_executor(model, **sizes), waves, run_ahead=True, step_tokens=160))
    got = run(gpu_executor(GpuWeights.of(model), **sizes, step_tokens=160), waves, run_ahead=True, step_tokens=160)
    assert list(got) == wanted


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.interpreted
def test_preempted_sampled_and_penalised_rows_equal_the_cpu_backend() -> None:
    """Three rows in a pool too small for them, read step by step, with temperature, truncation and penalties; the
    model's first layer has dense attention, and its experts are in NVFP4."""
    rng = random.Random(2)
    prompts = [[rng.randrange(256) for _ in range(126)] for _ in range(3)]
    ways = [{}, {"temperature": 0.9, "top_k": 20, "seed": 7}, {"temperature": 0.7, "repetition_penalty": 1.3}]
    waves = [[request(f"r{i}", p, 4, **way) for i, (p, way) in enumerate(zip(prompts, ways, strict=True))]]
    sizes = {"pages": 6, "rows": 3, "context": 256}
    model = with_packed_experts(tiny_model(dense_attention=1))
    wanted = list(run(cpu_executor(model, **sizes), waves, run_ahead=False, step_tokens=64))
    got = run(gpu_executor(GpuWeights.of(model), **sizes, step_tokens=64), waves, run_ahead=False, step_tokens=64)
    assert list(got) == wanted


class OnlyOdd:
    """A grammar that allows odd tokens not yet used; the fourth one may not come."""

    def __init__(self, generated: Sequence[int]) -> None:
        self.used = list(generated)

    def mask(self) -> np.ndarray:
        if len(self.used) >= 3:
            raise GrammarError("no fourth token")
        allowed = np.zeros(256, np.uint8)
        allowed[1::2] = 1
        allowed[self.used] = 0
        return np.packbits(allowed, bitorder="little").view("<i4")

    def advance(self, token: int) -> None:
        self.used.append(token)


def no_vocabulary() -> Vocabulary:
    raise AssertionError("only a grammar library needs it")


class OddGrammars:
    def row(self, text: str, generated: Sequence[int]) -> OnlyOdd:
        assert text == "odd"
        return OnlyOdd(generated)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_rows_with_a_grammar_follow_it_alone() -> None:
    """Beside a free row, with steps run ahead; the grammar's end is that request's error."""
    rng = random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(count)] for count in (9, 12)]
    model = tiny_model()
    executor = gpu_executor(
        GpuWeights.of(model), pages=10, rows=2, context=256, step_tokens=32, vocabulary=no_vocabulary
    )
    executor._packer._grammars = OddGrammars()  # type: ignore[assignment]
    config = SchedulerConfig(max_running=2, step_tokens=32, target_itl_ms=0, expected_output_tokens=1)
    engine = Engine(executor, config, CacheConfig(), SystemClock())
    free = request("free", prompts[0], 5)
    bound = request("bound", prompts[1], 6)
    engine.add(free)
    engine.add(replace(bound, sampling=replace(bound.sampling, grammar="odd")))
    tokens: dict[str, list[int]] = {"free": [], "bound": []}
    errors: dict[str, str | None] = {}
    while engine.has_work():
        step = engine.step()
        for output in step.outputs if step is not None else ():
            tokens[output.request_id] += output.token_ids
            if output.finish is not None:
                errors[output.request_id] = output.error
    engine.check_invariants()
    assert errors == {"free": None, "bound": "no fourth token"}
    assert len(tokens["bound"]) == 3 == len(set(tokens["bound"])) and all(t % 2 for t in tokens["bound"])
    alone = run(cpu_executor(model, pages=10, rows=2, context=256), [[free]], run_ahead=True, step_tokens=32)
    assert tuple(tokens["free"]) == next(alone)["free"]
