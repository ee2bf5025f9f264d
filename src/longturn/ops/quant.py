"""GGUF's weight blocks in numpy: exact dequantisation. (Rounding to blocks is in `kernels/cpu/packing.py`.)

Q4_1: fp16 scale d, fp16 minimum m, 16 bytes of nibbles; weight j is m + d * (low nibble of byte j), weight j + 16 is
m + d * (high nibble of byte j). Q8_0: fp16 scale d, 32 int8; weight j is d * q[j]. Other types go through the `gguf`
library. Block layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from longturn.errors import ModelError

BLOCK = 32
Q4_1_BYTES = 20
Q8_0_BYTES = 34

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def dequantize(raw: Bytes, type_name: str) -> Floats:
    """Weights of raw rows [..., row bytes] as fp32 [..., row elements], bit for bit as the `gguf` library has them.

    Raises:
        ModelError: `type_name` is a type that cannot be dequantised.
    """
    raw = np.ascontiguousarray(raw)
    if type_name == "F32":
        return raw.view(np.float32)
    if type_name == "F16":
        return raw.view(np.float16).astype(np.float32)
    if type_name == "BF16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if type_name == "Q4_1":
        return _dequantize_q4_1(raw)
    if type_name == "Q8_0":
        return _dequantize_q8_0(raw)
    return _dequantize_other(raw, type_name)


def _dequantize_q4_1(raw: Bytes) -> Floats:
    blocks = raw.reshape(-1, Q4_1_BYTES)
    scale = blocks[:, 0:2].copy().view(np.float16).astype(np.float32)
    minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
    out = np.empty((len(blocks), BLOCK), np.float32)
    np.multiply(blocks[:, 4:] & 15, scale, out=out[:, :16], casting="unsafe")
    np.multiply(blocks[:, 4:] >> 4, scale, out=out[:, 16:], casting="unsafe")
    out += minimum
    return out.reshape(*raw.shape[:-1], -1)


def _dequantize_q8_0(raw: Bytes) -> Floats:
    blocks = raw.reshape(-1, Q8_0_BYTES)
    scale = blocks[:, 0:2].copy().view(np.float16).astype(np.float32)
    values = blocks[:, 2:].copy().view(np.int8).astype(np.float32)
    values *= scale
    return values.reshape(*raw.shape[:-1], -1)


def _dequantize_other(raw: Bytes, type_name: str) -> Floats:
    import gguf  # 0.2 s, and not needed for the common types

    try:
        kind = gguf.GGMLQuantizationType[type_name]
        return np.asarray(gguf.dequantize(raw, kind), np.float32)
    except (KeyError, NotImplementedError) as error:
        raise ModelError(f"GGUF type {type_name} cannot be dequantised") from error
