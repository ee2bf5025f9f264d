"""Kernels foreseen without a GPU, and compiled where a launch looks for them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = """
import glob, os, sys
from dataclasses import replace
from tests.executor.gpu.tiny import TINY
from longturn.executor.gpu.compile import Compilation, _source
from longturn.executor.gpu.steps import DeviceSteps, GpuLimits
from longturn.models.make_checkpoint import preset_config
from longturn.models.minimax_m3_config import minimax_m3_config
from longturn.models.minimax_m3_gpu import MiniMaxM3Gpu
from longturn.models.minimax_m3_gpu_weights import random_gpu_weights
from triton.compiler import compile
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

before = JITFunction.run, driver._active
config = minimax_m3_config(preset_config(replace(TINY, dense_attention=1))["text_config"])
weights = random_gpu_weights(config, device="meta")
steps = DeviceSteps(MiniMaxM3Gpu(weights, 40), GpuLimits(4, 128, 1024), masked=True)
kernels = steps.all_kernels((9, 0))
assert (JITFunction.run, driver._active) == before
names = [kernel.name for kernel in kernels]
assert len(set(kernel.key for kernel in kernels)) == len(kernels) > 30
assert names.index("sample_parts") < names.index("experts_in"), names  # what compiles longest comes first
assert {"_scatter", "_begin_decode", "_attend", "lay_out_lists", "experts_down", "finish_rows"} <= set(names)
assert names.count("sample_parts") == names.count("finish_rows") == 2, "with all features and with a temperature alone"
assert [k.key for k in steps.all_kernels((9, 0))] == [k.key for k in kernels]

small = [k for k in kernels if k.name in ("_scatter", "_token_ids", "_begin", "_add_norm", "_merge", "_begin_decode")]
compilation = Compilation(small)
foreign = [k for k in kernels if k.name == "_pick_rows"]
assert compilation.wait_for(small[:2]) == 0
assert compilation.wait_for([*small[:2], *foreign]) == len(foreign) == 1
assert compilation.wait_for(foreign) == 0
compilation.wait()
files = lambda: sorted(glob.glob(os.environ["TRITON_CACHE_DIR"] + "/*/*.cubin"))
made = files()
assert len(made) >= len(small), made
for kernel in small:
    source = _source(kernel)
    compile(source, target=kernel.target, options=kernel.options)
assert files() == made, "a launch would have compiled it again"
print("done", len(kernels), len(small))
"""


def test_what_is_foreseen_is_compiled_under_the_name_that_a_launch_looks_for(tmp_path: Path) -> None:
    """In a process of its own: tests beside this one set Triton up to interpret."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = Path(__file__).parents[3]
    paths = f"{root}{os.pathsep}{root / 'src'}"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("done")
