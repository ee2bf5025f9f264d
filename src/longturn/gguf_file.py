"""The GGUF container: metadata and tensor table, parsed in tens of milliseconds. Knows nothing of models.

`gguf.GGUFReader` makes a numpy view for every string: 2.8 s for the two 49,000-string arrays of a small vocabulary.
Here strings are decoded only where they are asked for. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
(little-endian, versions 2 and 3).
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longturn.errors import ModelError

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_U64 = struct.Struct("<Q")

TENSOR_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
"""Type number -> (name, elements of a block, bytes of a block), for the types that Longturn reads."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where one tensor lies in the file."""

    name: str
    shape: tuple[int, ...]
    """Outermost dimension first, as numpy and torch have it; the last one is contiguous."""
    type: str
    """A name of `TENSOR_TYPES`."""
    offset_bytes: int
    """From the start of the file."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class SkippedArray:
    """Stands in the metadata for an array that was longer than the caller wanted."""

    length: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    path: Path
    metadata: Mapping[str, Any]
    """Python values: int, float, bool, str, list, or `SkippedArray`."""
    tensors: Mapping[str, GGUFTensor]


def read_gguf(path: Path, *, max_array: int | None = 1024) -> GGUFFile:
    """Parse the header of a GGUF file.

    Args:
        path: the file.
        max_array: longer arrays become `SkippedArray`; None reads all of them (the tokenizer needs that).

    Raises:
        ModelError: the file is not GGUF, is cut short, or holds a tensor type that Longturn does not read.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(path, data, max_array)
    except (struct.error, UnicodeDecodeError, OverflowError, IndexError) as error:
        raise ModelError(f"{path}: damaged GGUF file (header does not parse: {error})") from error
    except ValueError as error:  # mmap of an empty file
        raise ModelError(f"{path}: not a GGUF file ({error})") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error


def _parse(path: Path, data: mmap.mmap, max_array: int | None) -> GGUFFile:
    if data[:4] != _MAGIC:
        raise ModelError(f"{path}: not a GGUF file (it begins with {data[:4]!r})")
    version, tensor_count, kv_count = struct.unpack_from("<IQQ", data, 4)
    if version not in (2, 3):
        raise ModelError(f"{path}: GGUF version {version} is not supported (2 and 3 are)")
    size = len(data)
    if tensor_count > size or kv_count > size:
        raise ModelError(f"{path}: damaged GGUF file (counts exceed the file's size)")
    cursor = _Cursor(data, 24)
    metadata: dict[str, Any] = {}
    for _ in range(kv_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.u32(), max_array)
    raw: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(tensor_count):
        name = cursor.string()
        dims = struct.unpack(f"<{(rank := cursor.u32())}Q", cursor.take(8 * rank))
        raw.append((name, dims[::-1], cursor.u32(), cursor.u64()))
    alignment = int(metadata.get("general.alignment", 32))
    if alignment <= 0:
        raise ModelError(f"{path}: damaged GGUF file (alignment {alignment})")
    start = -(-cursor.at // alignment) * alignment
    tensors = {name: _tensor(path, name, shape, kind, start + offset, size) for name, shape, kind, offset in raw}
    return GGUFFile(path, metadata, tensors)


def _tensor(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int, size: int) -> GGUFTensor:
    if kind not in TENSOR_TYPES:
        known = ", ".join(entry[0] for entry in TENSOR_TYPES.values())
        raise ModelError(f"{path}: tensor {name} has GGUF type {kind}, which is not supported (supported: {known})")
    type_name, block, block_bytes = TENSOR_TYPES[kind]
    if not shape or shape[-1] % block:
        raise ModelError(f"{path}: damaged GGUF file (tensor {name} of shape {shape} is not whole {type_name} blocks)")
    nbytes = math.prod(shape) // block * block_bytes
    if offset + nbytes > size:
        raise ModelError(
            f"{path}: damaged GGUF file (cut short: tensor {name} ends at byte {offset + nbytes} of {size})"
        )
    return GGUFTensor(name, shape, type_name, offset, nbytes)


class _Cursor:
    """A position in the header; every read is checked against the end of the file."""

    __slots__ = ("at", "data", "end")

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self.data, self.at, self.end = data, at, len(data)

    def take(self, count: int) -> bytes:
        begin = self.at
        self.at = begin + count
        if self.at > self.end:
            raise struct.error("unexpected end of file")
        return self.data[begin : self.at]

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self) -> str:
        return self.take(self.u64()).decode()

    def value(self, kind: int, max_array: int | None) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array(max_array)
        if kind not in _SCALARS:
            raise struct.error(f"unknown metadata type {kind}")
        code = struct.Struct("<" + _SCALARS[kind])
        return code.unpack(self.take(code.size))[0]

    def array(self, max_array: int | None) -> Any:
        kind, length = self.u32(), self.u64()
        if length > self.end:
            raise struct.error("array longer than the file")
        skip = max_array is not None and length > max_array
        if kind in _SCALARS:
            packed = self.take(length * struct.calcsize("<" + _SCALARS[kind]))
            return SkippedArray(length) if skip else list(struct.unpack(f"<{length}{_SCALARS[kind]}", packed))
        if kind == _STRING:
            return self._skip_strings(length) if skip else [self.string() for _ in range(length)]
        return [self.value(kind, max_array) for _ in range(length)]

    def _skip_strings(self, length: int) -> SkippedArray:
        data, at, unpack = self.data, self.at, _U64.unpack_from
        for _ in range(length):
            at += 8 + unpack(data, at)[0]
        self.at = at
        return SkippedArray(length)
