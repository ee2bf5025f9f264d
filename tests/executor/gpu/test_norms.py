"""In which type the GPU keeps the weights of norms."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from tests.executor.gpu.tiny import tiny_model

from longturn.models.minimax_m3_gpu_weights import GpuWeights


def test_norms_are_narrow_only_where_that_loses_nothing() -> None:
    model = tiny_model()
    exact = model.norm.bfloat16().float()
    inexact = exact + 2.0**-20
    for norm, dtype in ((exact, torch.bfloat16), (inexact, torch.float32)):
        kept = GpuWeights.of(replace(model, norm=norm, head=model.head.bfloat16())).norm
        assert kept.dtype == dtype and torch.equal(kept.float(), norm)
    assert GpuWeights.of(replace(model, norm=exact)).norm.dtype == torch.float32, "a model in fp32 stays in it"
