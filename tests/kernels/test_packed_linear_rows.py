"""MXFP8 weights through a ring for two to eight tokens: how they are dealt out, and the kernel on a Hopper card."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from longturn.kernels.packed_linear_rows import RingPlan, ring_linear, ring_plan
from longturn.kernels.packed_weights import WeightFormat, pack_mxfp8, random_packed

MXFP8 = WeightFormat.MXFP8
SHARED_BYTES = 227 * 1024  # of a program on compute capability 9.0
on_hopper = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1"
    or not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a card of compute capability 9.0",
)


@pytest.mark.parametrize(("rows", "width"), [(9728, 6144), (6144, 8192), (6144, 12288), (6144, 6144), (2048, 4096)])
def test_a_models_matrices_pass_each_multiprocessor_once(rows: int, width: int) -> None:
    plan = RingPlan.of(rows, width)
    assert plan is not None
    assert (plan.tiles - 1) * 16 * 132 < rows <= plan.tiles * 16 * 132
    turns, rest = divmod(width, plan.warps * 64)
    assert rest == 0 and turns % plan.stages == 0 and turns > plan.stages >= 3
    words, x = plan.tiles * 16 * plan.warps * 64, 8 * plan.warps * 64 * 2
    scales = plan.tiles * 16 * 2 ** (turns - 1).bit_length() * plan.warps * 2
    assert plan.stages * (words + x) + scales <= SHARED_BYTES


@pytest.mark.parametrize(
    ("rows", "width"),
    [
        (6152, 8192),  # a tile of 16 rows would be cut
        (6144, 6400),  # and a turn of 512 columns
        (6144, 2560),  # five turns, and the slots of the ring are taken in order
        (16 * 132 * 6, 6144),  # more tiles a program than have room
        (6144, 1024),  # two turns are no ring
        (6144, 2048),  # one round is none either
    ],
)
def test_what_is_not_dealt_out_evenly_has_no_plan(rows: int, width: int) -> None:
    assert RingPlan.of(rows, width) is None


def test_a_cpu_has_no_ring() -> None:
    assert (
        ring_plan(torch.zeros(4, 4096, dtype=torch.float16), random_packed(MXFP8, 16, 4096, scale=1.0, device="cpu"))
        is None
    )


@on_hopper
def test_two_to_eight_tokens_of_mxfp8_have_a_ring() -> None:
    x = torch.zeros(9, 4096, dtype=torch.float16, device="cuda")
    weight = random_packed(MXFP8, 32, 4096, scale=1.0, device="cuda")
    assert ring_plan(x[:2], weight) is not None and ring_plan(x[:8], weight) is not None
    assert ring_plan(x[:1], weight) is None and ring_plan(x, weight) is None
    assert ring_plan(x[:4].bfloat16(), weight) is None
    assert ring_plan(x[:4], random_packed(WeightFormat.NVFP4, 32, 4096, scale=1.0, device="cuda")) is None


@on_hopper
@pytest.mark.parametrize("tokens", [2, 3, 8])
@pytest.mark.parametrize(("rows", "width"), [(9728, 6144), (6144, 8192), (6144, 12288), (2128, 4096), (16, 4096)])
def test_ring_linear(tokens: int, rows: int, width: int) -> None:
    plan = RingPlan.of(rows, width)
    assert plan is not None
    byte = torch.arange(256, dtype=torch.uint8)
    numbers = byte[(byte & 0x7F) != 0x7F]
    codes = numbers[torch.randint(len(numbers), (rows, width))].view(torch.float8_e4m3fn)
    weight = pack_mxfp8(codes, torch.randint(118, 130, (rows, width // 32), dtype=torch.uint8)).to("cuda")
    x = torch.randn(tokens, width, device="cuda").half()
    base = torch.randn(tokens, rows, device="cuda")
    expected = x.double() @ weight.dequantised().double().T
    for residual in (None, base):
        out = torch.full((tokens + 1, rows), float("nan"), device="cuda")
        ring_linear(x, weight, out[:tokens], residual, plan, {"RESIDUAL": residual is not None, "PDL": False})
        full = expected if residual is None else expected + residual
        assert ((out[:tokens] - full).norm() / full.norm()).item() < 1e-5  # products of fp16 are exact, sums are fp32
        assert out[tokens].isnan().all()
    ring_linear(x, weight, base, base, plan, {"RESIDUAL": True, "PDL": False})  # in place
    assert torch.equal(base, out[:tokens])
