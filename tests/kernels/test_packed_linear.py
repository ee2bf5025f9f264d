"""Quantised weights streamed for one token: how they are dealt out anywhere, the kernel on a Hopper card."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from longturn.kernels.packed_linear import StreamPlan, stream_linear, streams
from longturn.kernels.packed_weights import PackedWeight, WeightFormat, pack_mxfp8, pack_nvfp4, random_packed
from longturn.ops.gemma_norm import gemma_rms_norm

MXFP8, NVFP4 = WeightFormat.MXFP8, WeightFormat.NVFP4
on_hopper = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1"
    or not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a card of compute capability 9.0",
)


@pytest.mark.parametrize("form", [MXFP8, NVFP4])
@pytest.mark.parametrize(("rows", "width"), [(9856, 6144), (6144, 8192), (6144, 6144), (5760, 2048), (2048, 4096)])
def test_a_models_matrices_are_dealt_out_at_once(form: WeightFormat, rows: int, width: int) -> None:
    plan = StreamPlan.of(form, rows)
    assert plan.fits(form, rows, width)
    programs = rows // (16 * plan.row_warps)
    assert programs * 16 * plan.row_warps == rows
    assert programs <= 3 * 132  # of four warps and up to 168 registers a thread, three fit a multiprocessor
    chunks, rest = divmod(width, plan.slices * plan.words * form)
    assert rest == 0 and chunks % 2 == 0 and chunks >= 2


@pytest.mark.parametrize(
    ("plan", "rows", "width"),
    [
        (StreamPlan(4, 1, 128), 6152, 8192),  # a tile of 16 rows would be cut
        (StreamPlan(2, 2, 128), 6160, 8192),  # and of 32
        (StreamPlan(4, 1, 128), 6144, 3072),  # three chunks, but they come in pairs
        (StreamPlan(4, 1, 128), 6144, 6656),  # x is not whole pieces
        (StreamPlan(8, 1, 128), 6144, 8192),  # a chunk of all slices is more than a piece
        (StreamPlan(4, 1, 32), 6144, 8192),  # a lane's 16 bytes twice are 64 words a row
    ],
)
def test_what_is_not_dealt_out_evenly_does_not_fit(plan: StreamPlan, rows: int, width: int) -> None:
    assert not plan.fits(MXFP8, rows, width)


def test_a_cpu_streams_nothing() -> None:
    weight = random_packed(MXFP8, 16, 64, scale=1.0, device="cpu")
    assert not streams(torch.zeros(1, 64, dtype=torch.bfloat16), weight)


@on_hopper
def test_one_token_of_quantised_weights_is_what_streams() -> None:
    x, weight = (
        torch.zeros(1, 64, dtype=torch.bfloat16, device="cuda"),
        random_packed(MXFP8, 16, 64, scale=1.0, device="cuda"),
    )
    assert streams(x, weight)
    assert streams(x.half(), weight)
    assert not streams(x.float(), weight)
    assert not streams(x.expand(2, 64), weight)
    assert not streams(x, PackedWeight.plain(weight.dequantised()))


def every_byte(form: WeightFormat, width: int) -> PackedWeight:
    """256 rows with each byte of codes, groups of random scales."""
    byte = torch.arange(256, dtype=torch.uint8)
    if form is NVFP4:
        scales = torch.randint(1, 0x7E, (256, width // 16), dtype=torch.uint8).view(torch.float8_e4m3fn)
        return pack_nvfp4(byte[torch.randint(256, (256, width // 2))], scales, 0.5)
    numbers = byte[(byte & 0x7F) != 0x7F]
    codes = numbers[torch.randint(len(numbers), (256, width))]
    return pack_mxfp8(codes.view(torch.float8_e4m3fn), torch.randint(118, 130, (256, width // 32), dtype=torch.uint8))


@on_hopper
@pytest.mark.parametrize("form", [MXFP8, NVFP4])
@pytest.mark.parametrize("plan", [(4, 1, 128), (2, 2, 128), (4, 1, 64), (2, 2, 64), (1, 4, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stream_linear(form: WeightFormat, plan: tuple[int, int, int], dtype: torch.dtype) -> None:
    dealt, width = StreamPlan(*plan), 4096
    if not dealt.fits(form, 256, width):
        pytest.skip("not dealt out evenly")
    weight = every_byte(form, width).to("cuda")
    x = torch.randn(1, width, device="cuda").to(dtype)
    base = torch.randn(1, 256, device="cuda")
    expected = x.double() @ weight.dequantised().double().T
    for residual in (None, base):
        out = torch.full((1, 256), float("nan"), device="cuda")
        stream_linear(x, weight, out, None, residual, 1e-6, dealt, {"RESIDUAL": residual is not None, "PDL": False})
        full = expected if residual is None else expected + residual
        assert ((out - full).norm() / full.norm()).item() < 1e-5  # products of fp16 are exact, sums are fp32


@on_hopper
@pytest.mark.parametrize("form", [MXFP8, NVFP4])
def test_stream_linear_normalises(form: WeightFormat) -> None:
    x, norm = 300 * torch.randn(1, 6144, device="cuda").bfloat16(), torch.randn(6144, device="cuda").bfloat16()
    weight = random_packed(form, 9856, 6144, scale=6144**-0.5, device="cuda")
    out = torch.full((1, 9856), float("nan"), device="cuda")
    plan = StreamPlan.of(form, 9856)
    stream_linear(x, weight, out, norm, None, 1e-6, plan, {"RESIDUAL": False, "PDL": False})
    expected = gemma_rms_norm(x.float(), norm, 1e-6) @ weight.dequantised().T
    assert ((out - expected).norm() / expected.norm()).item() < 1e-3  # x is rounded to fp16 before the product
