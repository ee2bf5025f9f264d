"""The packed layout: exact, reversible, and read by the kernels as `gguf` reads the blocks."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from longturn.errors import ModelError
from longturn.kernels.cpu.native import NativeLibrary
from longturn.kernels.cpu.packing import PackedMatrix, pack_blocks, pack_float, quantise_q8_0, unpack_blocks
from tests.kernels.cpu_models import dequantise, random_blocks

TYPES = {"q4_1": gguf.GGMLQuantizationType.Q4_1, "q8_0": gguf.GGMLQuantizationType.Q8_0}


@pytest.mark.parametrize("kind", ["q4_1", "q8_0"])
@pytest.mark.parametrize(("rows", "cols"), [(16, 32), (48, 576), (5, 96), (33, 64)])
def test_blocks_come_back_unchanged(kind: str, rows: int, cols: int) -> None:
    blocks = random_blocks(np.random.default_rng(rows + cols), kind, rows, cols)
    assert np.array_equal(unpack_blocks(pack_blocks(kind, blocks)), blocks)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["q4_1", "q8_0"])
def test_kernel_dequantises_as_gguf_does(library: NativeLibrary, kind: str) -> None:
    blocks = random_blocks(np.random.default_rng(1), kind, 21, 160)
    packed = pack_blocks(kind, blocks)  # type: ignore[arg-type]
    expected = gguf.dequantize(blocks, TYPES[kind])
    for row in range(21):
        assert np.array_equal(library.dequantise_row(packed, row), expected[row])
    # The tests' own oracle agrees, up to the rounding of fp32.
    assert np.allclose(dequantise(kind, blocks), expected, rtol=1e-6, atol=1e-7)


def test_quantised_floats_are_within_half_a_step() -> None:
    rng = np.random.default_rng(2)
    weights = (rng.standard_normal((17, 96)) * rng.uniform(1e-6, 3, (17, 1))).astype(np.float32)
    weights[3] = 0
    blocks = quantise_q8_0(weights)
    back = dequantise("q8_0", blocks).reshape(17, -1, 32)
    step = np.abs(weights).reshape(17, -1, 32).max(axis=-1, keepdims=True) / 127
    # The scale is rounded to fp16, a relative 2^-11 (or 2^-25 absolute), which the largest quants carry 127 times.
    bound = step * (0.5 + 127 * 2.0**-11) + 127 * 2.0**-25
    assert (np.abs(back - weights.reshape(17, -1, 32)) <= bound).all()
    assert (back.reshape(17, -1)[3] == 0).all()


@pytest.mark.parametrize("bad", [np.full((2, 32), np.nan), np.full((2, 32), 1e9), np.zeros((2, 31)), np.zeros(32)])
def test_unpackable_weights_are_named(bad: np.ndarray) -> None:
    with pytest.raises(ModelError, match="weights to pack"):
        pack_float(bad)


def test_wrong_bytes_are_refused() -> None:
    with pytest.raises(ModelError, match="needs 320 contiguous bytes"):
        PackedMatrix("q4_1", 16, 32, np.zeros(319, np.uint8))
    with pytest.raises(ModelError, match="multiple of 34"):
        pack_blocks("q8_0", np.zeros((2, 33), np.uint8))
