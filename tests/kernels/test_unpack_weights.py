"""Quantised weights back to plain ones, in Triton's interpreter: exactly what they hold, every column in its place."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when triton and each kernel are imported, so it must precede both
pytest.importorskip("triton", reason="triton is not installed")
if tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
    pytest.skip("the interpreter of Triton 3.6 needs numpy below 2.4", allow_module_level=True)

from longturn.kernels.packed_weights import WeightFormat, random_packed
from longturn.kernels.unpack_weights import unpack


@pytest.mark.parametrize("form", [WeightFormat.NVFP4, WeightFormat.MXFP8])
@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 96), (9, 2048)])
def test_unpacked_is_what_the_weight_holds(form: WeightFormat, shape: tuple[int, ...]) -> None:
    torch.manual_seed(len(shape))
    weight = random_packed(form, *shape, scale=0.1, device="cpu")
    out = torch.full(shape, float("nan"))
    unpack(weight, out)
    torch.testing.assert_close(out, weight.dequantised(), rtol=1e-6, atol=0)


def test_plain_weights_and_other_shapes_are_refused() -> None:
    weight = random_packed(WeightFormat.NVFP4, 4, 64, scale=0.1, device="cpu")
    with pytest.raises(ValueError, match="cannot unpack"):
        unpack(weight, torch.empty(4, 32))
    with pytest.raises(ValueError, match="cannot unpack"):
        unpack(random_packed(WeightFormat.PLAIN, 4, 64, scale=0.1, device="cpu"), torch.empty(4, 64))
