"""The packed layout of 4- and 8-bit weights, written from published blocks without changing a bit of them.

Layout "lt16" (the same for every instruction set; `gemm.h` reads it). Rows go in groups of 16; of each group come

    quants  [block of 32 columns][vector of 64 bytes]; lane r (4 bytes) holds four consecutive columns of row r:
            Q4_1, 4 vectors: low nibbles are columns 4j .. 4j+3, high nibbles columns 16+4j .. 16+4j+3
            Q8_0, 8 vectors: columns 4j .. 4j+3
    scales  [block][16] fp16 d, in Q4_1 each followed by [16] fp16 m
    zeros up to a multiple of 64 bytes

Rows that the last group lacks are zeros. Weights are q * d + m (Q4_1) and q * d (Q8_0).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from longturn.errors import ModelError

Kind = Literal["q4_1", "q8_0"]
LAYOUT = "lt16"
"""Name of the layout: part of the key of any file that stores packed weights."""
BLOCK = 32
GROUP = 16
BLOCK_BYTES: dict[Kind, int] = {"q4_1": 20, "q8_0": 34}
_QUANT_BYTES: dict[Kind, int] = {"q4_1": 256, "q8_0": 512}
_SCALE_BYTES: dict[Kind, int] = {"q4_1": 64, "q8_0": 32}


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A weight matrix [rows, cols] in the packed layout; `data` may be a slice of a memory map."""

    kind: Kind
    rows: int
    cols: int
    data: npt.NDArray[np.uint8]
    """Flat, contiguous, `packed_bytes(kind, rows, cols)` long; 64-byte alignment is faster."""

    def __post_init__(self) -> None:
        need = packed_bytes(self.kind, self.rows, self.cols)
        if self.data.dtype != np.uint8 or self.data.shape != (need,) or not self.data.flags.c_contiguous:
            raise ModelError(
                f"packed {self.kind} matrix of {self.rows} x {self.cols} needs {need} contiguous bytes, "
                f"not {self.data.dtype} {self.data.shape}"
            )


def packed_bytes(kind: Kind, rows: int, cols: int) -> int:
    """Bytes of a packed matrix.

    Raises:
        ModelError: `cols` is not a multiple of 32, or a size is not positive.
    """
    if rows <= 0 or cols <= 0 or cols % BLOCK != 0:
        raise ModelError(f"packed weights need columns in multiples of {BLOCK}, not a matrix of {rows} x {cols}")
    return -(-rows // GROUP) * _group_bytes(kind, cols // BLOCK)


def pack_blocks(kind: Kind, blocks: npt.NDArray[np.uint8]) -> PackedMatrix:
    """Pack GGUF blocks.

    Args:
        kind: what the blocks are.
        blocks: uint8 [rows, cols / 32 * block bytes]; a Q4_1 block is fp16 d, fp16 m, 16 bytes of nibbles (column i
            low, column i + 16 high), a Q8_0 block fp16 d, 32 int8.
    """
    size = BLOCK_BYTES[kind]
    if blocks.dtype != np.uint8 or blocks.ndim != 2 or blocks.shape[1] % size != 0:
        raise ModelError(f"{kind} blocks must be uint8 [rows, multiple of {size}], not {blocks.dtype} {blocks.shape}")
    rows, count = blocks.shape[0], blocks.shape[1] // size
    groups = -(-rows // GROUP)
    out = np.zeros(packed_bytes(kind, rows, count * BLOCK), np.uint8).reshape(groups, -1)
    if rows % GROUP != 0:
        blocks = np.concatenate([blocks, np.zeros((groups * GROUP - rows, blocks.shape[1]), np.uint8)])
    source = blocks.reshape(groups, GROUP, count, size)
    header = 4 if kind == "q4_1" else 2
    vectors = (size - header) // 4
    quants = source[..., header:].reshape(groups, GROUP, count, vectors, 4).transpose(0, 2, 3, 1, 4)
    scales = source[..., :header].reshape(groups, GROUP, count, header // 2, 2).transpose(0, 2, 3, 1, 4)
    end = count * _QUANT_BYTES[kind]
    out[:, :end] = quants.reshape(groups, end)
    out[:, end : end + count * _SCALE_BYTES[kind]] = scales.reshape(groups, -1)
    return PackedMatrix(kind, rows, count * BLOCK, out.reshape(-1))


def unpack_blocks(matrix: PackedMatrix) -> npt.NDArray[np.uint8]:
    """The GGUF blocks again: the inverse of `pack_blocks`."""
    count, kind = matrix.cols // BLOCK, matrix.kind
    size = BLOCK_BYTES[kind]
    header = 4 if kind == "q4_1" else 2
    vectors = (size - header) // 4
    groups = -(-matrix.rows // GROUP)
    data = matrix.data.reshape(groups, -1)
    end = count * _QUANT_BYTES[kind]
    quants = data[:, :end].reshape(groups, count, vectors, GROUP, 4).transpose(0, 3, 1, 2, 4)
    scales = data[:, end : end + count * _SCALE_BYTES[kind]]
    scales = scales.reshape(groups, count, header // 2, GROUP, 2).transpose(0, 3, 1, 2, 4)
    out = np.empty((groups, GROUP, count, size), np.uint8)
    out[..., header:] = quants.reshape(groups, GROUP, count, size - header)
    out[..., :header] = scales.reshape(groups, GROUP, count, header)
    return out.reshape(groups * GROUP, count * size)[: matrix.rows]


def quantise_q8_0(weights: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Q8_0 blocks of float weights: uint8 [rows, cols / 32 * 34].

    Each block of 32 columns gets the fp16 scale nearest to max|w| / 127 and the nearest integers for that scale.

    Raises:
        ModelError: the shape is not [rows, multiple of 32], or a weight is not finite or too large for an fp16 scale.
    """
    if weights.ndim != 2 or weights.shape[1] % BLOCK != 0:
        raise ModelError(f"weights to pack must be [rows, multiple of {BLOCK}], not {weights.shape}")
    rows, count = weights.shape[0], weights.shape[1] // BLOCK
    blocks = np.ascontiguousarray(weights, np.float32).reshape(rows, count, BLOCK)
    with np.errstate(over="ignore", invalid="ignore"):
        scale = (np.abs(blocks).max(axis=-1) / np.float32(127)).astype(np.float16)
    if not np.isfinite(scale).all():
        raise ModelError("weights to pack are not finite, or too large for 8-bit blocks with an fp16 scale")
    divisor = scale.astype(np.float32)[..., None]
    quotient = np.divide(blocks, divisor, out=np.zeros_like(blocks), where=divisor > 0)
    out = np.empty((rows, count, 34), np.uint8)
    out[..., :2] = scale[..., None].view(np.uint8)
    out[..., 2:] = np.clip(np.rint(quotient), -127, 127).astype(np.int8).view(np.uint8)
    return out.reshape(rows, count * 34)


def pack_float(weights: npt.NDArray[Any]) -> PackedMatrix:
    """Quantise float weights [rows, cols] to 8-bit blocks and pack them."""
    return pack_blocks("q8_0", quantise_q8_0(weights))


def _group_bytes(kind: Kind, blocks: int) -> int:
    return -(-blocks * (_QUANT_BYTES[kind] + _SCALE_BYTES[kind]) // 64) * 64
