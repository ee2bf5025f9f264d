"""Paged attention against a dense one, with shuffled pages full of other requests' leftovers."""

from __future__ import annotations

import numpy as np
import pytest

from longturn.kernels.cpu.native import NativeLibrary
from tests.kernels.cpu_models import i32

LAYERS, LAYER = 2, 1


def dense(q: np.ndarray, k: np.ndarray, v: np.ndarray, first: int, scale: float) -> np.ndarray:
    """float64 causal attention; q [tokens, heads, dim] begins at position `first` of k, v [length, kv_heads, dim]."""
    share = q.shape[1] // k.shape[1]
    out = np.empty(q.shape)
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            keys = k[: first + t + 1, h // share].astype(np.float64)
            s = keys @ q[t, h].astype(np.float64) * scale
            p = np.exp(s - s.max())
            out[t, h] = p @ v[: first + t + 1, h // share].astype(np.float64) / p.sum()
    return out


def filled(
    library: NativeLibrary, rng: np.random.Generator, dtype: type, length: int, kv_heads: int, dim: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """A cache of NaN with one row of random keys and values in shuffled pages: cache, pages, keys, values."""
    count = -(-length // 128)
    cache = np.full((count + 4, LAYERS, 2, kv_heads, 128 * dim), np.nan, dtype)
    pages = i32(rng.permutation(np.arange(1, count + 4))[:count])
    k, v = (rng.standard_normal((length, kv_heads, dim)).astype(dtype).astype(np.float32) for _ in "kv")
    library.write_kv(cache, LAYER, pages, k, v, first_position=0)
    return cache, pages, k, v


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("length", [1, 17, 127, 128, 129, 1000])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 4, 48), (14, 2, 80)])
def test_equals_dense_attention(
    library: NativeLibrary, dtype: type, length: int, heads: int, kv_heads: int, dim: int
) -> None:
    rng = np.random.default_rng(length + dim)
    cache, pages, k, v = filled(library, rng, dtype, length, kv_heads, dim)
    tokens = min(length, 24)
    q = (2 * rng.standard_normal((tokens, heads, dim))).astype(np.float32)
    first = length - tokens
    out = library.paged_attention(cache, LAYER, pages, q, first_position=first, scale=dim**-0.5)
    assert np.abs(out - dense(q, k, v, first, dim**-0.5)).max() < 5e-6
    assert np.isnan(cache[:, 0].astype(np.float32)).all(), "another layer was written"


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_decode_prefill_and_split_agree_to_the_bit(library: NativeLibrary, dtype: type) -> None:
    rng = np.random.default_rng(5)
    length, heads, kv_heads, dim = 300, 6, 2, 64
    cache, pages, _, _ = filled(library, rng, dtype, length, kv_heads, dim)
    q = rng.standard_normal((length, heads, dim)).astype(np.float32)
    whole = library.paged_attention(cache, LAYER, pages, q, first_position=0, scale=0.3)
    for first, count in ((0, 1), (1, 1), (127, 1), (128, 1), (299, 1), (120, 20), (100, 200), (0, 129), (255, 3)):
        for split in (False, True):
            part = library.paged_attention(
                cache, LAYER, pages, q[first : first + count], first_position=first, scale=0.3, split=split
            )
            assert np.array_equal(part, whole[first : first + count]), (first, count, split)


def test_instruction_sets_agree_to_the_bit(cpu_libraries: dict[str, NativeLibrary]) -> None:
    results = {}
    for name, library in cpu_libraries.items():
        rng = np.random.default_rng(6)
        cache, pages, _, _ = filled(library, rng, np.float16, 200, 2, 64)
        q = rng.standard_normal((200, 6, 64)).astype(np.float32)
        results[name] = library.paged_attention(cache, LAYER, pages, q, first_position=0, scale=0.125)
    for name, result in results.items():
        assert np.array_equal(result, results["native"]), name


def test_large_scores_do_not_overflow(library: NativeLibrary) -> None:
    rng = np.random.default_rng(7)
    cache, pages, k, v = filled(library, rng, np.float32, 260, 1, 64)
    q = (300 * rng.standard_normal((1, 1, 64))).astype(np.float32)
    out = library.paged_attention(cache, LAYER, pages, q, first_position=259, scale=1.0)
    assert np.allclose(out, dense(q, k, v, 259, 1.0), atol=2e-3)


def test_half_precision_is_rounded_as_numpy_does(library: NativeLibrary) -> None:
    rng = np.random.default_rng(8)
    values = (rng.standard_normal((128, 1, 64)) * 10.0 ** rng.uniform(-9, 4, (128, 1, 64))).astype(np.float32)
    cache = np.zeros((2, LAYERS, 2, 1, 128 * 64), np.float16)
    library.write_kv(cache, LAYER, i32([1]), values, values, first_position=0)
    with np.errstate(over="ignore"):
        expected = values[:, 0].astype(np.float16)
    assert np.array_equal(cache[1, LAYER, 1, 0].reshape(128, 64), expected)
    assert np.array_equal(cache[1, LAYER, 0, 0].reshape(8, 64, 16), expected.reshape(8, 16, 64).transpose(0, 2, 1))
