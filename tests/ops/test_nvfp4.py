"""NVFP4 against values decoded bit by bit, and rounding against a search over all values."""

from __future__ import annotations

import math
import random

import pytest
import torch

from longturn.ops import nvfp4


def e2m1(code: int) -> float:
    """A 4-bit code by the definition: sign, two exponent bits with bias 1, one mantissa bit."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    value = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -value if sign else value


def e4m3(byte: int) -> float:
    """An 8-bit code by the definition: sign, four exponent bits with bias 7, three mantissa bits; no infinities."""
    sign, exponent, mantissa = byte >> 7, byte >> 3 & 15, byte & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    value = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if sign else value


def same(got: float, want: float) -> bool:
    """Equal to the bit, the sign of zero too; NaN equals NaN."""
    if math.isnan(want):
        return math.isnan(got)
    return got == want and math.copysign(1, got) == math.copysign(1, want)


def test_all_sixteen_codes_in_both_nibbles() -> None:
    for low in range(16):
        for high in range(16):
            even, odd = nvfp4.unpack_e2m1(torch.tensor([low | high << 4], dtype=torch.uint8)).tolist()
            assert same(even, e2m1(low)) and same(odd, e2m1(high))


def test_all_256_block_scales() -> None:
    """Every scale byte, with every code, under both conventions of the tensor's scale."""
    codes = torch.tensor([(2 * i) | (2 * i + 1) << 4 for i in range(8)], dtype=torch.uint8)
    scales = torch.arange(256, dtype=torch.uint8).view(256, 1)
    for divides in (True, False):
        weight = nvfp4.Nvfp4Weight(
            codes.expand(256, 8), scales.view(torch.float8_e4m3fn), torch.tensor([0.37]), divides
        )
        assert weight.shape == (256, 16)
        got = weight.dequantize()
        tensor_scale = float(torch.tensor(0.37))
        for byte in range(256):
            block = torch.tensor(e4m3(byte))
            factor = block / tensor_scale if divides else block * tensor_scale
            for code in range(16):
                want = float(torch.tensor(e2m1(code)) * factor)
                assert same(float(got[byte, code]), want), (byte, code)


def test_rounding_is_to_the_nearest_value_and_ties_to_even() -> None:
    values = [e2m1(code) for code in range(8)]
    points = [i / 64 for i in range(64 * 7)]  # holds every midpoint exactly
    points += [math.nextafter(p, d) for p in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0) for d in (0.0, 9.0)]
    for x in points:
        x32 = float(torch.tensor(x))
        # the nearest value; of two equally near ones the one with an even code
        want = min(range(8), key=lambda code: (abs(values[code] - x32), code % 2))
        for sign in (1.0, -1.0):
            (byte,) = nvfp4.pack_e2m1(torch.tensor([sign * x, 0.0])).tolist()
            assert byte & 7 == want, x
            assert byte >> 3 & 1 == (sign < 0)
            assert byte >> 4 == 0


def test_pack_and_unpack_are_inverse() -> None:
    packed = torch.arange(256, dtype=torch.uint8).view(4, 64)
    assert torch.equal(nvfp4.pack_e2m1(nvfp4.unpack_e2m1(packed)), packed)


@pytest.mark.parametrize("divides", [True, False])
@pytest.mark.parametrize("scale", [1e-30, 1e-2, 1.0, 1e4])
def test_weight_error_is_bounded_by_half_a_step(divides: bool, scale: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.empty(32, 64).normal_(0, scale, generator=generator)
    weight[3] *= 100  # rows of very different size share the tensor's scale
    weight[5, :16] = 0
    quantised = nvfp4.quantize_weight(weight, global_divides=divides)
    got = quantised.dequantize()
    assert torch.equal(got[5, :16], torch.zeros(16))
    blocks = weight.view(32, 4, 16)
    factors = quantised.block_scales()[..., None]
    # A value of 6 is the most a code has; a scale rounded down by up to 1/16 clips what was at the edge.
    step = torch.where(blocks.abs() / factors > 4, 1.0, torch.where(blocks.abs() / factors > 2, 0.5, 0.25))
    assert bool(((got.view(32, 4, 16) - blocks).abs() <= step * factors * 1.0001 + 1e-45).all())
    assert float((got - weight).double().norm() / weight.double().norm()) < 0.12
    assert float(quantised.scales.float().max()) == 448.0, "the largest block uses the largest scale"


def test_a_shared_largest_value_gives_one_tensor_scale() -> None:
    one, two = torch.full((1, 16), 0.5), torch.full((1, 16), 2.0)
    scales = [nvfp4.quantize_weight(w, largest=2.0).global_scale for w in (one, two)]
    assert torch.equal(*scales)


def test_zero_weight() -> None:
    for divides in (True, False):
        assert not nvfp4.quantize_weight(torch.zeros(2, 32), global_divides=divides).dequantize().any()


def test_cache_entries() -> None:
    rng = random.Random(5)
    x = torch.tensor([[rng.gauss(0, 3) for _ in range(32)] for _ in range(50)])
    codes, scales = nvfp4.quantize_lane(x)
    assert codes.shape == (50, 16) and codes.dtype == torch.uint8
    assert scales.shape == (50, 2) and scales.dtype == torch.float8_e4m3fn
    got = nvfp4.dequantize_lane(codes, scales)
    assert float((got - x).norm() / x.norm()) < 0.12
    again = nvfp4.dequantize_lane(*nvfp4.quantize_lane(got))
    # A block whose largest value was clipped or rounded down may change its scale once more, others must stay.
    kept = (got.view(50, 2, 16).abs().amax(-1) / scales.float()) == 6.0
    assert kept.float().mean() > 0.5
    assert torch.equal(again.view(50, 2, 16)[kept], got.view(50, 2, 16)[kept])
    assert nvfp4.dequantize_lane(*nvfp4.quantize_lane(torch.full((1, 16), float("nan")))).isnan().all()
