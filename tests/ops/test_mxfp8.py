"""MXFP8 against values decoded bit by bit."""

from __future__ import annotations

import math

import pytest
import torch

from longturn.ops import mxfp8


def e4m3(byte: int) -> float:
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    value = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def test_all_scales() -> None:
    got = mxfp8.e8m0_to_fp32(torch.arange(256, dtype=torch.uint8)).tolist()
    assert got[:255] == [math.ldexp(1.0, byte - 127) for byte in range(255)]
    assert math.isnan(got[255])


def test_all_256_values() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(8, 32)
    for scale in (100, 127, 130):
        weight = mxfp8.Mxfp8Weight(values, torch.full((8, 1), scale, dtype=torch.uint8))
        assert weight.shape == (8, 32)
        for byte, value in enumerate(weight.dequantize().flatten().tolist()):
            want = e4m3(byte) * 2.0 ** (scale - 127)
            assert value == want or (math.isnan(value) and math.isnan(want)), byte
            assert math.copysign(1, value) == math.copysign(1, want) or math.isnan(want)


@pytest.mark.parametrize("scale", [1e-36, 1e-3, 1.0, 3e5])
def test_quantised_values_are_the_nearest(scale: float) -> None:
    weight = torch.empty(16, 96).normal_(0, scale, generator=torch.Generator().manual_seed(1))
    weight[2, :32] = 0
    weight[3, 32:64] = 448.0 * 2.0**-20  # the largest code exactly: must not take a larger scale
    quantised = mxfp8.quantize_weight(weight)
    assert quantised.scales.shape == (16, 3)
    got = quantised.dequantize().view(16, 3, 32)
    factors = mxfp8.e8m0_to_fp32(quantised.scales).double()[..., None]
    finite = torch.tensor([e4m3(byte) for byte in range(256) if not math.isnan(e4m3(byte))], dtype=torch.float64)
    for row in range(16):
        for block in range(3):
            wanted = weight.view(16, 3, 32)[row, block].double()
            nearest = (finite * factors[row, block] - wanted[:, None]).abs().amin(-1)
            assert torch.equal((got[row, block].double() - wanted).abs(), nearest)
    biggest = (weight.view(16, 3, 32).abs().amax(-1) / factors[..., 0])[weight.view(16, 3, 32).any(-1)]
    assert bool(((biggest > 224) & (biggest <= 448)).all()), "the smallest scale that clips nothing"
    assert int(quantised.scales[3, 1]) == 127 - 20
    assert not got[2, 0].any()
