"""Quantised products against exact arithmetic, and bit identity over batch, threads and instruction sets."""

from __future__ import annotations

import numpy as np
import pytest

from longturn.kernels.cpu.native import NativeLibrary
from longturn.kernels.cpu.packing import PackedMatrix, pack_blocks
from tests.kernels.cpu_models import dequantise, quantise_activations, random_blocks


def case(kind: str, rows: int, cols: int, tokens: int) -> tuple[np.ndarray, PackedMatrix, np.ndarray]:
    rng = np.random.default_rng(rows * cols + tokens)
    blocks = random_blocks(rng, kind, rows, cols)
    x = (rng.standard_normal((tokens, cols)) * rng.uniform(0.01, 10, (tokens, 1))).astype(np.float32)
    x[0, :32] = 0
    return x, pack_blocks(kind, blocks), dequantise(kind, blocks)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["q4_1", "q8_0"])
@pytest.mark.parametrize(("rows", "cols"), [(16, 32), (37, 96), (64, 576)])
@pytest.mark.parametrize("tokens", [1, 3, 8, 37])
def test_equals_exact_arithmetic(library: NativeLibrary, kind: str, rows: int, cols: int, tokens: int) -> None:
    x, packed, plain = case(kind, rows, cols, tokens)
    y = library.linear_q(x, packed)
    rounded = quantise_activations(x)
    # fp32 accumulation: each of the two chains a block rounds once, relative to the sum of magnitudes.
    magnitude = np.abs(rounded) @ np.abs(plain).T + np.abs(x).sum(axis=1, keepdims=True) * np.abs(plain).max()
    assert (np.abs(y - rounded @ plain.T) <= magnitude * (cols / 32 + 4) * 2.0**-23).all()
    # Against unrounded activations: half a step of each block's scale.
    steps = np.repeat(np.abs(x).reshape(tokens, -1, 32).max(axis=-1) / 2032, 32, axis=-1)
    assert (np.abs(y - x @ plain.T) <= 0.51 * steps @ np.abs(plain).T + magnitude * 1e-5).all()


@pytest.mark.parametrize("kind", ["q4_1", "q8_0"])
def test_extreme_quants_do_not_overflow(library: NativeLibrary, kind: str) -> None:
    """All weights at their limits (-128 among the 8-bit ones) against activations at their limits."""
    blocks = random_blocks(np.random.default_rng(0), kind, 16, 64)
    blocks.reshape(16, 2, -1)[:, :, 4 if kind == "q4_1" else 2 :] = 0xFF if kind == "q4_1" else 0x80
    for sign in (1, -1):
        x = np.full((20, 64), sign * 3.0, np.float32)
        y = library.linear_q(x, pack_blocks(kind, blocks))  # type: ignore[arg-type]
        assert np.allclose(y, x @ dequantise(kind, blocks).T, rtol=1e-5)


@pytest.mark.parametrize("kind", ["q4_1", "q8_0"])
def test_a_row_has_the_same_bits_in_any_company(library: NativeLibrary, kind: str) -> None:
    x, packed, _ = case(kind, 52, 288, 70)
    together = library.linear_q(x, packed)
    for size in (1, 2, 3, 5, 6, 7, 8, 15, 16, 17, 33):
        for first in range(0, 70, size):
            part = library.linear_q(x[first : first + size], packed)
            assert np.array_equal(part, together[first : first + size])
    assert np.array_equal(library.linear_q(x, packed, threads=3), together)
    assert np.array_equal(library.linear_q(x, packed, use_amx=False), together)


@pytest.mark.parametrize("kind", ["q4_1", "q8_0"])
def test_instruction_sets_agree_to_the_bit(cpu_libraries: dict[str, NativeLibrary], kind: str) -> None:
    x, packed, _ = case(kind, 40, 192, 21)
    results = {name: library.linear_q(x, packed) for name, library in cpu_libraries.items()}
    for name, result in results.items():
        assert np.array_equal(result, results["native"]), name


def test_nan_and_infinity_are_not_hidden(library: NativeLibrary) -> None:
    x, packed, _ = case("q4_1", 16, 64, 9)
    x[2, 40] = np.nan
    x[5, 1] = np.inf
    y = library.linear_q(x, packed)
    assert np.isnan(y[2]).all() and np.isnan(y[5]).all()
    assert np.isfinite(y[[0, 1, 3, 4, 6, 7, 8]]).all()
