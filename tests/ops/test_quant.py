"""Block formats against the gguf library, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from longturn.errors import ModelError
from longturn.gguf_file import TENSOR_TYPES
from longturn.ops.quant import dequantize

gguf = pytest.importorskip("gguf")


def random_blocks(type_name: str, rows: int, blocks: int) -> np.ndarray:
    """Random bytes whose fp16 scales are finite: every second byte's high bits are bounded."""
    _, _, block_bytes = next(entry for entry in TENSOR_TYPES.values() if entry[0] == type_name)
    raw = np.random.default_rng(0).integers(0, 256, (rows, blocks * block_bytes), np.uint8)
    return raw & 0xBB  # clears bit 6 of every byte: no fp16, bf16 or fp32 exponent can be all ones


@pytest.mark.parametrize("type_name", [entry[0] for entry in TENSOR_TYPES.values()])
def test_every_listed_type_equals_the_library(type_name: str) -> None:
    raw = random_blocks(type_name, rows=6, blocks=3 if type_name not in ("F32", "F16", "BF16") else 40)
    got = dequantize(raw, type_name)
    kind = gguf.GGMLQuantizationType[type_name]
    want = raw.view(np.float32) if type_name == "F32" else gguf.dequantize(raw, kind)
    assert got.dtype == np.float32
    assert (
        got.shape == want.shape == (6, raw.shape[1] // gguf.GGML_QUANT_SIZES[kind][1] * gguf.GGML_QUANT_SIZES[kind][0])
    )
    assert np.array_equal(got.view(np.uint32), np.ascontiguousarray(want, np.float32).view(np.uint32))


def test_listed_sizes_equal_the_library() -> None:
    for number, (name, elements, nbytes) in TENSOR_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == (name, elements, nbytes)


def test_unknown_type() -> None:
    with pytest.raises(ModelError, match="GGUF type IQ9_X cannot be dequantised"):
        dequantize(np.zeros((1, 32), np.uint8), "IQ9_X")
