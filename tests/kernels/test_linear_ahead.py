"""Linear layers whose weights wait in shared memory: the plans anywhere, the kernel on a Hopper card."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from longturn.kernels.linear_ahead import ROWS, SLICES, AheadPlan, ahead_plan, linear_ahead
from longturn.ops.gemma_norm import gemma_rms_norm

on_hopper = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1"
    or not torch.cuda.is_available()
    or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a card of compute capability 9.0",
)


@pytest.mark.parametrize("tokens", [1, 2, 4, 7, 16, 32])
@pytest.mark.parametrize(("rows", "width"), [(2048, 4096), (5760, 2048), (640, 1280), (6336, 1024), (16, 256)])
def test_a_plan_fits_the_chip(tokens: int, rows: int, width: int) -> None:
    plan = AheadPlan.of(tokens, rows, width)
    assert plan is not None
    assert plan.tiles * ROWS * 132 >= rows
    assert plan.tokens >= tokens
    assert width // SLICES % plan.chunk == 0
    assert plan.chunk >= 64  # a tile's rows are 128 bytes of shared memory
    pieces = width // SLICES // plan.chunk
    assert 1 <= plan.buffers <= pieces
    assert plan.buffers == pieces or plan.buffers >= 2
    shared = 2 * (plan.tiles * ROWS * width + SLICES * plan.tokens * plan.chunk * plan.buffers)
    assert shared <= 224 * 1024


@pytest.mark.parametrize(
    ("tokens", "rows", "width"), [(0, 2048, 4096), (33, 2048, 4096), (1, 6144, 8192), (1, 2048, 192), (1, 128, 64)]
)
def test_what_does_not_fit_has_no_plan(tokens: int, rows: int, width: int) -> None:
    assert AheadPlan.of(tokens, rows, width) is None


def test_a_cpu_has_no_plan() -> None:
    x, weight = torch.zeros(1, 256, dtype=torch.bfloat16), torch.zeros(16, 256, dtype=torch.bfloat16)
    assert ahead_plan(x, weight, norm=False) is None


@on_hopper
@pytest.mark.parametrize("tokens", [1, 3, 4, 16, 31])
@pytest.mark.parametrize(("rows", "width"), [(2048, 4096), (5760, 2048), (650, 1280)])
@pytest.mark.parametrize("residual", [False, True])
def test_linear_ahead(tokens: int, rows: int, width: int, residual: bool) -> None:
    x = torch.randn(tokens, width, device="cuda").bfloat16()
    weight = torch.randn(rows, width, device="cuda").bfloat16()
    base = torch.randn(tokens, rows, device="cuda") if residual else None
    plan = ahead_plan(x, weight, norm=False)
    assert plan is not None
    out = torch.full((tokens, rows), float("nan"), device="cuda")
    linear_ahead(x, weight, out, None, base, 1e-6, plan, {"RESIDUAL": residual, "PDL": False})
    expected = x.float() @ weight.float().T + (0 if base is None else base)
    assert ((out - expected).norm() / expected.norm()).item() < 1e-4


@on_hopper
def test_linear_ahead_normalises_one_token() -> None:
    x, norm = torch.randn(1, 2048, device="cuda").bfloat16(), torch.randn(2048, device="cuda").bfloat16()
    weight = torch.randn(5760, 2048, device="cuda").bfloat16()
    plan = ahead_plan(x, weight, norm=True)
    assert plan is not None
    out = torch.full((1, 5760), float("nan"), device="cuda")
    linear_ahead(x, weight, out, norm, None, 1e-6, plan, {"RESIDUAL": False, "PDL": False})
    expected = gemma_rms_norm(x.float(), norm, 1e-6) @ weight.float().T
    assert ((out - expected).norm() / expected.norm()).item() < 4e-3  # x is rounded between norm and product
