"""Norm, SwiGLU, embedding and rotation against formulas written out in float64, and RoPE scalings by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from longturn.errors import ModelError
from longturn.ops.linear import embed, linear, swiglu
from longturn.ops.norm import rms_norm
from longturn.ops.rope import apply_rope, rope_cos_sin, rope_of
from longturn.ops.rope_frequencies import RopeFrequencies, rope_frequencies


def test_rms_norm() -> None:
    x, weight = torch.randn(5, 3, 16), torch.rand(16) + 0.5
    want = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), want, rtol=1e-6, atol=1e-6)
    tiny = rms_norm(torch.full((1, 4), 1e-6), torch.ones(4), 1.0)
    torch.testing.assert_close(tiny, torch.full((1, 4), 1e-6))
    huge = torch.full((1, 64), 300.0, dtype=torch.float16)  # squares overflow fp16
    torch.testing.assert_close(rms_norm(huge, torch.ones(64, dtype=torch.float16), 1e-6), torch.ones_like(huge))


def test_linear_and_swiglu_and_embed() -> None:
    x, weight, bias = torch.randn(3, 8), torch.randn(6, 8), torch.randn(6)
    want = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(linear(x, weight, bias).double(), want, rtol=1e-5, atol=1e-5)
    gate, up = want[:, :3], want[:, 3:]
    want = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(swiglu(linear(x, weight, bias)).double(), want, rtol=1e-5, atol=1e-5)
    assert embed(torch.tensor([4, 0], dtype=torch.int32), weight).equal(weight[[4, 0]])


def test_rotation_is_a_complex_product() -> None:
    """Dimension pairs (i, i + half) as complex numbers, times exp(i * position * frequency)."""
    frequencies = RopeFrequencies(np.array([1.0, 0.1, 0.01], np.float32), scale=1.5)
    rope = rope_of(frequencies)
    positions = torch.tensor([0, 1, 77, 8191], dtype=torch.int32)
    x = torch.randn(4, 2, 8)  # 6 rotated dimensions, 2 that pass
    got = apply_rope(x, *rope_cos_sin(positions, rope))
    turn = torch.polar(torch.tensor(1.5).double(), positions.double()[:, None] * rope.inv_freq.double())
    want = torch.complex(x[..., :3].double(), x[..., 3:6].double()) * turn[:, None]
    torch.testing.assert_close(got[..., :3].double(), want.real, rtol=0, atol=2e-3)
    torch.testing.assert_close(got[..., 3:6].double(), want.imag, rtol=0, atol=2e-3)
    assert got[..., 6:].equal(x[..., 6:])
    torch.testing.assert_close(got[0, :, :6], 1.5 * x[0, :, :6])
    for table, values in zip(frequencies.table(8192), rope_cos_sin(positions, rope), strict=True):
        assert table.dtype == np.float32
        np.testing.assert_allclose(table[positions], values, rtol=0, atol=1e-6)


def test_scalings_by_hand() -> None:
    def frequencies(**config: Any) -> list[float]:
        return rope_frequencies({"max_position_embeddings": 1000, **config}, 4).inv_freq.tolist()

    assert frequencies() == pytest.approx([1.0, 0.01])
    assert frequencies(rope_theta=100.0) == pytest.approx([1.0, 0.1])
    assert frequencies(rope_scaling={"type": "linear", "factor": 4}) == pytest.approx([0.25, 0.0025])
    assert frequencies(rope_freq_factors=[1.0, 8.0]) == pytest.approx([1.0, 0.00125])
    assert rope_frequencies({"partial_rotary_factor": 0.5}, 8).rotary_dim == 4
    # turns over 1000 positions: 159.2 (kept), 1.592 (blended (1.592 - 1) / (4 - 1) of the way)
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    keep = (10 / (2 * math.pi) - 1) / 3
    assert frequencies(rope_parameters=llama3) == pytest.approx([1.0, 0.01 * keep + 0.01 / 8 * (1 - keep)])
    yarn = rope_frequencies({"rope_scaling": {"type": "yarn", "factor": 4.0}, "max_position_embeddings": 1000}, 4)
    assert yarn.scale == pytest.approx(0.1 * math.log(4) + 1)
    # dimension that turns 32 times: floor(4 ln(1000 / 64 pi) / 2 ln 10^4) = 0; once: ceil(1.10) = 2; ramp 0, 1/2
    assert yarn.inv_freq.tolist() == pytest.approx([1.0, 0.01 * 0.5 + 0.0025 * 0.5])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, "'su' is not supported"),
        ({"rope_scaling": {"type": "yarn"}}, "'yarn' needs a positive factor"),
        ({"rope_theta": -1.0}, "positive rope_theta"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "max_position_embeddings"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_freq_factors": [1.0]}, "1 RoPE frequency factors for 2"),
        ({"partial_rotary_factor": 2.0}, "partial_rotary_factor"),
    ],
)
def test_impossible_parameters(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        rope_frequencies(config, 4)
