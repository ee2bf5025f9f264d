"""The persistent kernel for one token: its pieces anywhere, which models it serves, and the kernel on a Hopper card."""

from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from longturn.kernels.one_token_parts import _lanes_asm, segments, short_rows
from longturn.models.make_checkpoint import PRESETS, preset_config
from longturn.models.minimax_m3_config import minimax_m3_config
from longturn.models.minimax_m3_gpu import MiniMaxM3Gpu
from longturn.models.minimax_m3_gpu_weights import random_gpu_weights

on_hopper = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1"
    or not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a card of compute capability 9.0",
)


def _place(bases: list[list[int]], offset: int) -> tuple[int, ...]:
    at = [0] * len(bases[0])
    for bit, base in enumerate(bases):
        if offset >> bit & 1:
            at = [a ^ b for a, b in zip(at, base, strict=True)]
    return tuple(at)


@pytest.mark.parametrize("pieces", [2, 4])
def test_a_group_is_read_where_the_copy_engine_put_it(pieces: int) -> None:
    """Its 128-byte swizzle, by the book: of line n, 16-byte chunk c lies where chunk c xor (n mod 8) would."""
    wide, short = segments(pieces).offset_bases, short_rows().offset_bases
    for number in range(0, 8192, 7):
        line, column = divmod(number, 64)
        chunk, rest = divmod(column, 8)
        offset = line * 64 + (chunk ^ line % 8) * 8 + rest
        segment, at = divmod(number, 1024)
        assert _place(wide, offset) == (segment // pieces, segment % pieces, at)
        assert _place(short, offset) == divmod(number, 512)


def _run_lanes(program: str, registers: list[list[float]]) -> list[float]:
    """What lanes hold in $0 after the few instructions that `_lanes_asm` uses; registers[i][lane] is ${i + 1}."""
    lanes = range(32)
    value: dict[str, list[float]] = {f"${i + 1}": list(held) for i, held in enumerate(registers)}
    value["%laneid"] = [float(lane) for lane in lanes]
    for instruction in re.findall(r"[^;{}]+;", program):
        name, *operands = instruction.strip().rstrip(";").replace(",", " ").split()
        if name.startswith("."):
            continue
        to, *of = operands
        have = [value[o] if o in value else [float(int(o, 0))] * 32 for o in of]
        if name.startswith("mov"):
            value[to] = list(have[0])
        elif name == "and.b32":
            value[to] = [float(int(a) & int(b)) for a, b in zip(*have, strict=True)]
        elif name == "setp.ne.u32":
            value[to] = [float(a != b) for a, b in zip(*have, strict=True)]
        elif name == "selp.f32":
            value[to] = [a if p else b for a, b, p in zip(*have, strict=True)]
        elif name == "shfl.sync.bfly.b32":
            value[to] = [have[0][lane ^ int(have[1][lane])] for lane in lanes]
        elif name == "add.f32":
            value[to] = [a + b for a, b in zip(*have, strict=True)]
        else:
            raise AssertionError(f"an instruction that the test does not know: {instruction}")
    return value["$0"]


@pytest.mark.parametrize("count", [8, 16])
def test_sums_over_lanes(count: int) -> None:
    registers = [[float(100 * i + lane * lane) for lane in range(32)] for i in range(count)]
    got = _run_lanes(_lanes_asm(count), registers)
    assert got == [sum(registers[lane % count]) for lane in range(32)]
    assert _lanes_asm(count).count("shfl") <= count + 2


NOTED = """
import sys
import torch
from longturn.executor.gpu.compile import noting_kernels
from longturn.kernels.packed_weights import WeightFormat
from longturn.models.make_checkpoint import PRESETS, preset_config
from longturn.models.minimax_m3_config import minimax_m3_config
from longturn.models.minimax_m3_gpu import MiniMaxM3Gpu
from longturn.models.minimax_m3_gpu_weights import random_gpu_weights

def launched(preset, rows=1, blocks=40, capability=(9, 0), layers=None, **formats):
    config = minimax_m3_config(preset_config(PRESETS[preset], 4)["text_config"])
    with noting_kernels(capability) as noted, torch.inference_mode():
        model = MiniMaxM3Gpu(random_gpu_weights(config, device="meta", **formats), 40)
        ints = lambda *shape: torch.empty(shape, dtype=torch.int32, device="meta")
        x = torch.empty(rows, model.hidden, dtype=model.dtype, device="meta")
        model.decode(ints(rows), ints(rows), ints(rows, blocks), x, blocks, layers)
    return noted

kernels = launched("mini60")
(one,) = [k for k in kernels if k.name == "_one_token"]
assert one.options["launch_cooperative_grid"], one.options
others = [k.name for k in kernels]
assert others.count("_attend") == 1 and "_router_shared" in others, others  # the first layer, which is dense
assert not any(k.name == "_one_token" for k in launched("mini60", layers=1))
keys = [next(k.key for k in launched("mini60", blocks=b) if k.name == "_one_token") for b in (2, 65, 66, 257, 258)]
assert keys[0] == keys[1] == one.key and keys[2] == keys[3] and len(set(keys)) == 3, keys
for other in (
    launched("mini60", rows=2),
    launched("mini60", blocks=5000),
    launched("mini60", capability=(10, 0)),
    launched("mini60", experts=WeightFormat.NVFP4),
    launched("mini60", others=WeightFormat.MXFP8),
    launched("mini60", kv_dtype=torch.float8_e4m3fn),
    launched("slice8"),
    launched("tiny"),
):
    assert other and not any(k.name == "_one_token" for k in other)
print("done")
"""


def test_which_steps_take_it() -> None:
    """In a process of its own: tests beside this one set Triton up to interpret."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", NOTED],
        env=environment | {"PYTHONPATH": str(root / "src")},
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "done"


@on_hopper
def test_it_follows_the_chain_of_kernels() -> None:
    config = minimax_m3_config(preset_config(replace(PRESETS["mini60"], layers=3))["text_config"])
    weights = random_gpu_weights(config, device="cuda", seed=7)
    model = MiniMaxM3Gpu(weights, 160)
    assert model._one_token is not None and model._one_token.first == 1
    chain = copy.copy(model)
    chain._one_token = None
    model.cache.normal_()
    table = torch.randperm(159, device="cuda", dtype=torch.int32)[None] + 1
    token = torch.tensor([77], dtype=torch.int32, device="cuda")
    errors = {}
    for position in (-1, 0, 127, 128, 2048, 9000, 20000):
        x = torch.empty(1, config.hidden, dtype=torch.bfloat16, device="cuda")
        at = torch.tensor([position], dtype=torch.int32, device="cuda")
        blocks = max(position, 0) // 128 + 1
        chain.decode(token, at, table, x, blocks)
        wanted = x.float().clone()
        model.decode(token, at, table, x, blocks)
        errors[position] = ((x.float() - wanted).norm() / wanted.norm()).item()
        again = x.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model.decode(token, at, table, x, blocks)
        for _ in range(20):
            graph.replay()
            assert torch.equal(x, again), position
    # A near tie of the router, or of the last block chosen, may fall the other way.
    assert sorted(errors.values())[-2] < 1e-2, errors
