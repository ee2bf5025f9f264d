"""The persistent kernels for one row and for few: their pieces anywhere, which models they serve, and the kernels on a
Hopper card."""

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
from longturn.kernels.one_token_rows_parts import (
    slice_pair,
    slices_in_rows,
    slices_of_tokens,
    tile_pairs,
    tile_rows,
)
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


def test_a_tile_is_read_where_the_copy_engine_put_it() -> None:
    """A box [columns / 64, rows, 64] leaves its lines in that order, with the same swizzle."""
    rows, pairs = tile_rows().offset_bases, tile_pairs().offset_bases
    for offset in range(0, 8192, 5):
        line, within = divmod(offset, 64)
        column = (within // 8 ^ line % 8) * 8 + within % 8
        chunk, row = divmod(line, 16)
        assert _place(rows, offset) == (chunk, row, column)
        chunk, row = divmod(line, 8)
        # Of 1,024 columns the second half lies 8 rows below the first.
        assert _place(pairs, offset) == (chunk % 8, chunk // 8 * 8 + row, column)


def test_numbers_of_tokens_are_read_where_they_were_stored() -> None:
    """Whoever stores them sees tokens and columns, or rows; products see pairs of slices of 512 columns. Eight rows of
    a product's operand, 16 bytes each, lie in different banks."""
    pair = slice_pair().offset_bases
    for slices in (4, 8):
        by_token = slices_of_tokens(slices).offset_bases
        for offset in range(0, 2048 * slices, 7):
            row, warp, k = _place(pair, offset % 4096)
            number, token = offset // 4096 * 2 + row // 4, row % 4
            assert _place(by_token, offset) == (token, number * 512 + warp * 64 + k)
    by_row = slices_in_rows().offset_bases
    for offset in range(0, 8192, 7):
        row, warp, k = _place(pair, offset % 4096)
        assert _place(by_row, offset) == (offset // 4096 * 8 + row, warp * 64 + k)
    at = {_place(pair, offset): offset for offset in range(0, 4096, 8)}
    for warp in range(8):
        for k in range(0, 64, 8):
            assert len({at[row, warp, k] % 64 // 8 for row in range(8)}) == 8


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
assert not any(k.name.startswith("_one_token") for k in launched("mini60", layers=1))
for rows in (2, 4):
    few = launched("mini60", rows=rows)
    (kernel,) = [k for k in few if k.name == "_one_token_rows"]
    assert kernel.options["launch_cooperative_grid"], kernel.options
    assert [k.name for k in few].count("_attend") == 1, few
    assert not any(k.name.startswith("_one_token") for k in launched("mini60", rows=rows, layers=1))
for rows in (1, 2):
    keys = [
        next(k.key for k in launched("mini60", rows, b) if k.name.startswith("_one_token"))
        for b in (2, 65, 66, 129, 130)
    ]
    assert keys[0] == keys[1] and keys[2] == keys[3] and len(set(keys)) == 3, keys
for other in (
    launched("mini60", rows=3),
    launched("mini60", rows=8),
    launched("mini60", blocks=5000),
    launched("mini60", rows=4, blocks=5000),
    launched("mini60", capability=(10, 0)),
    launched("mini60", experts=WeightFormat.NVFP4),
    launched("mini60", others=WeightFormat.MXFP8),
    launched("mini60", kv_dtype=torch.float8_e4m3fn),
    launched("slice8"),
    launched("tiny"),
):
    assert other and not any(k.name.startswith("_one_token") for k in other)
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
@pytest.mark.parametrize(
    "steps",
    [
        [[-1], [0], [127], [128], [2048], [9000], [20000]],
        [[0, 1], [-1, 127], [128, 2049], [20000, 700]],
        [[0, 127, 128, 129], [2048, -1, 9000, 2049], [-1, -1, -1, 5], [20000, 3, 4000, 700]],
    ],
    ids=["one row", "two rows", "four rows"],
)
def test_it_follows_the_chain_of_kernels(steps: list[list[int]]) -> None:
    config = minimax_m3_config(preset_config(replace(PRESETS["mini60"], layers=3))["text_config"])
    weights = random_gpu_weights(config, device="cuda", seed=7)
    model = MiniMaxM3Gpu(weights, 680)
    assert model._one_token is not None and model._one_token.first == 1
    chain = copy.copy(model)
    chain._one_token = None
    model.cache.normal_()
    rows = len(steps[0])
    table = (torch.randperm(679, device="cuda", dtype=torch.int32) + 1)[: rows * 160].view(rows, 160)
    token = torch.arange(77, 77 + rows, dtype=torch.int32, device="cuda")
    errors = []
    for step in steps:
        x = torch.empty(rows, config.hidden, dtype=torch.bfloat16, device="cuda")
        at = torch.tensor(step, dtype=torch.int32, device="cuda")
        blocks = max(*step, 0) // 128 + 1
        chain.decode(token, at, table, x, blocks)
        wanted = x.float().clone()
        model.decode(token, at, table, x, blocks)
        assert torch.isfinite(x).all(), step
        errors += ((x.float() - wanted).norm(dim=1) / wanted.norm(dim=1))[at >= 0].tolist()
        again = x.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            model.decode(token, at, table, x, blocks)
        for _ in range(20):
            graph.replay()
            assert torch.equal(x, again), step
    # A near tie of the router, or of the last block chosen, may fall the other way.
    assert sorted(errors)[-2] < 1e-2, errors
