"""safetensors files as published: headers checked, contents memory-mapped, every stored type readable as it lies.

Beside the `safetensors` library this reads 8-bit scale types alike on all its versions, says which file and which key
are damaged and what was expected, and can give memory back while a large model is being loaded. Format:
https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longturn.errors import ModelError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,  # raw bytes: ops/mxfp8.py gives them their meaning
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies."""

    file: Path
    dtype: str
    """As the file spells it, such as `BF16` or `F8_E4M3`."""
    shape: tuple[int, ...]
    begin: int
    """Offset from the start of the file, in bytes."""
    end: int


class Shards:
    """The tensors of one or several safetensors files."""

    def __init__(self, directory: Path, files: tuple[Path, ...]) -> None:
        """Read and check the headers.

        Args:
            directory: what messages about missing tensors name, and where an index may lie.
            files: safetensors files.

        Raises:
            ModelError: a header is damaged, a tensor lies in two files, or the index names one that its file lacks.
        """
        self.path = directory
        self.tensors: dict[str, StoredTensor] = {}
        self._maps: dict[Path, mmap.mmap] = {}
        for file in files:
            for name, tensor in read_header(file).items():
                if name in self.tensors:
                    raise ModelError(f"{file}: tensor {name} is in {self.tensors[name].file.name} too")
                self.tensors[name] = tensor
        self._check_index()

    def names(self) -> Set[str]:
        return self.tensors.keys()

    def find(self, name: str) -> StoredTensor:
        """Raises ModelError if there is no such tensor."""
        if name not in self.tensors:
            raise ModelError(f"{self.path}: tensor {name} is missing")
        return self.tensors[name]

    def load(self, name: str) -> Tensor:
        """The tensor as stored: a view of the mapped file, which must not be written to.

        Raises:
            ModelError: it is missing, or of a type that cannot be read.
        """
        tensor = self.find(name)
        if tensor.dtype not in DTYPES:
            raise ModelError(
                f"{tensor.file}: tensor {name} has type {tensor.dtype}, which is not supported "
                f"(supported: {', '.join(DTYPES)})"
            )
        dtype = DTYPES[tensor.dtype]
        count = math.prod(tensor.shape)
        if not count:
            return torch.empty(tensor.shape, dtype=dtype)
        if tensor.begin % dtype.itemsize:
            # The format asks for no alignment and torch does.
            raw = torch.frombuffer(
                self._map(tensor.file), dtype=torch.uint8, offset=tensor.begin, count=count * dtype.itemsize
            )
            return raw.clone().view(dtype).view(tensor.shape)
        return torch.frombuffer(self._map(tensor.file), dtype=dtype, offset=tensor.begin, count=count).view(
            tensor.shape
        )

    def release(self) -> None:
        """Give back the memory of what was read so far. Tensors stay valid: they are read from the file again."""
        for mapped in self._maps.values():
            if hasattr(mmap, "MADV_DONTNEED"):
                mapped.madvise(mmap.MADV_DONTNEED)

    def _map(self, file: Path) -> mmap.mmap:
        if file not in self._maps:
            with file.open("rb") as stream:
                # Copy-on-write, since torch wants writable memory; nobody writes, so no page is ever copied.
                self._maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[file]

    def _check_index(self) -> None:
        path = self.path / INDEX_NAME
        if not path.is_file():
            return
        try:
            weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise ModelError(f"{path}: not a valid index ({error})") from error
        for name, file in weight_map.items():
            if name not in self.tensors:
                raise ModelError(f"{self.path / file}: tensor {name} is missing, which {INDEX_NAME} says it has")


def read_header(file: Path) -> dict[str, StoredTensor]:
    """The table of contents of one file.

    Raises:
        ModelError: the file cannot be read or its header is damaged.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(MAX_HEADER_BYTES, size - 8):
                raise ModelError(
                    f"{file}: damaged safetensors file (a header of {length} bytes in a file of {size} bytes)"
                )
            header = json.loads(stream.read(length))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8
        raise ModelError(f"{file}: damaged safetensors file (header is no JSON: {error})") from error
    if not isinstance(header, dict):
        raise ModelError(f"{file}: damaged safetensors file (header is not a JSON object)")
    return {
        name: _entry(file, name, entry, 8 + length, size) for name, entry in header.items() if name != "__metadata__"
    }


def _entry(file: Path, name: str, entry: Any, data: int, size: int) -> StoredTensor:
    try:
        dtype, shape = str(entry["dtype"]), tuple(int(extent) for extent in entry["shape"])
        begin, end = (data + int(offset) for offset in entry["data_offsets"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(f"{file}: damaged safetensors file (entry of tensor {name}: {error!r})") from error
    if not data <= begin <= end <= size or min(shape, default=0) < 0:
        raise ModelError(
            f"{file}: damaged safetensors file (tensor {name} ends at byte {end} of {size}: is the file whole?)"
        )
    if dtype in DTYPES and end - begin != (expected := math.prod(shape) * DTYPES[dtype].itemsize):
        raise ModelError(
            f"{file}: damaged safetensors file (tensor {name} has {end - begin} bytes, expected {expected} for "
            f"{dtype} {list(shape)})"
        )
    return StoredTensor(file, dtype, shape, begin, end)
