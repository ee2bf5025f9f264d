"""A published checkpoint whose weights may be quantised: each under its plain name, dequantised when it is asked for.

What the files hold decides: a weight's type and the tensors beside it tell its format and its sign conventions
without doubt. The configuration must not contradict them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from longturn.errors import ModelError
from longturn.models.checkpoint.quant_config import Format, QuantConfig, quant_config
from longturn.models.checkpoint.shards import Shards, StoredTensor
from longturn.ops import mxfp8, nvfp4
from longturn.ops.mxfp8 import Mxfp8Weight
from longturn.ops.nvfp4 import Nvfp4Weight
from longturn.source import ModelSource

Weight = Tensor | Nvfp4Weight | Mxfp8Weight

_PLAIN_TYPES = ("F32", "F16", "BF16", "F64")
# Scales of activations and of an 8-bit cache. Activations are not quantised here, and this cache has no scales.
_UNUSED = (".input_scale", ".input_global_scale", ".k_scale", ".v_scale")


@dataclass(frozen=True, slots=True)
class _Entry:
    """One logical tensor."""

    format: Format
    shape: tuple[int, ...]
    """Of the values, not of the packed bytes."""
    parts: Mapping[str, str]
    """Names in the files by role: `values`, `scales`, `global`."""
    global_divides: bool = False


class PublishedCheckpoint:
    """Implements `checkpoint.base.Checkpoint` over safetensors files of any supported format."""

    def __init__(self, path: Path, files: tuple[Path, ...], declared: Mapping[str, Any] | None = None) -> None:
        """
        Args:
            path: the directory.
            files: its safetensors files.
            declared: its `quantization_config`, if any.

        Raises:
            ModelError: a file is damaged, the quantisation is unknown, or weights and scales do not fit together.
        """
        self.shards = Shards(path, files)
        try:
            self.quant: QuantConfig = quant_config(declared)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from error
        self._entries = self._group()
        for name, entry in self._entries.items():
            said = self.quant.declared(name.removesuffix(".weight")) if entry.format != Format.PLAIN else None
            if entry.format != Format.PLAIN and said is None and self.quant.method == "none":
                raise ModelError(
                    f"{self._file(entry)}: tensor {name} is {entry.format}, but no quantization_config says so"
                )
            if said is not None and said != entry.format:
                raise ModelError(f"{self._file(entry)}: tensor {name} is {entry.format}, but is declared to be {said}")

    @classmethod
    def of(cls, source: ModelSource) -> PublishedCheckpoint:
        files = tuple(file for file in source.files if file.suffix == ".safetensors")
        return cls(source.path, files, source.config.get("quantization_config"))

    @property
    def path(self) -> Path:
        return self.shards.path

    def names(self) -> Set[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._find(name).shape

    def format(self, name: str) -> Format:
        """How a tensor is stored."""
        return self._find(name).format

    def stored_bytes(self, name: str) -> int:
        """Bytes of a tensor in the files, scales included."""
        found = [self.shards.find(part) for part in self._find(name).parts.values()]
        return sum(tensor.end - tensor.begin for tensor in found)

    def weight(self, name: str) -> Weight:
        """The tensor as it is stored: packed with its scales where it is quantised. Views of the file."""
        entry = self._find(name)
        values = self.shards.load(entry.parts["values"])
        if entry.format == Format.PLAIN:
            return values
        scales = self.shards.load(entry.parts["scales"])
        if entry.format == Format.MXFP8:
            return Mxfp8Weight(values, scales)
        return Nvfp4Weight(values, scales, self.shards.load(entry.parts["global"]), entry.global_divides)

    def load(self, name: str) -> Tensor:
        """The tensor, dequantised to fp32 if it is quantised; else as stored, a view of the file."""
        weight = self.weight(name)
        return weight if isinstance(weight, Tensor) else weight.dequantize()

    def release(self) -> None:
        """Give back the memory of what was read so far."""
        self.shards.release()

    # --- grouping ----------------------------------------------------------------------------------------------------

    def _find(self, name: str) -> _Entry:
        if name not in self._entries:
            raise ModelError(f"{self.path}: tensor {name} is missing")
        return self._entries[name]

    def _file(self, entry: _Entry) -> Path:
        return self.shards.find(entry.parts["values"]).file

    def _group(self) -> dict[str, _Entry]:
        """Put weights and their scales together."""
        entries: dict[str, _Entry] = {}
        used: set[str] = set()
        for name, tensor in self.shards.tensors.items():
            if (entry := self._quantised(name, tensor)) is not None:
                entries[name.removesuffix("_packed")] = entry
                used.update(entry.parts.values())
        for name, tensor in self.shards.tensors.items():
            if name in used or name.endswith(_UNUSED):
                continue
            if tensor.dtype not in _PLAIN_TYPES:
                raise ModelError(
                    f"{tensor.file}: tensor {name} has type {tensor.dtype}, expected one of {', '.join(_PLAIN_TYPES)} "
                    "or a weight with its scales"
                )
            entries[name] = _Entry(Format.PLAIN, tensor.shape, {"values": name})
        return entries

    def _quantised(self, name: str, tensor: StoredTensor) -> _Entry | None:
        if name.endswith(".weight_packed"):  # compressed-tensors
            base = name.removesuffix("_packed")
            return self._nvfp4(name, tensor, f"{base}_scale", f"{base}_global_scale", divides=True)
        if not name.endswith(".weight"):
            return None
        if tensor.dtype == "U8":  # ModelOpt
            return self._nvfp4(name, tensor, f"{name}_scale", f"{name}_scale_2", divides=False)
        if tensor.dtype == "F8_E4M3":
            # MiniMax says `_inv`, though the scale multiplies; others call the same thing `weight_scale`.
            inverse = f"{name}_scale_inv"
            scales = inverse if inverse in self.shards.tensors else f"{name}_scale"
            rows, width = self._matrix(name, tensor)
            self._expect(scales, name, ("U8", "F8_E8M0"), (rows, self._groups(name, tensor, width, mxfp8.GROUP)))
            return _Entry(Format.MXFP8, (rows, width), {"values": name, "scales": scales})
        return None

    def _nvfp4(self, name: str, tensor: StoredTensor, scales: str, tensor_scale: str, *, divides: bool) -> _Entry:
        if tensor.dtype != "U8":
            raise ModelError(f"{tensor.file}: tensor {name} has type {tensor.dtype}, expected U8")
        rows, packed = self._matrix(name, tensor)
        self._expect(scales, name, ("F8_E4M3",), (rows, self._groups(name, tensor, 2 * packed, nvfp4.GROUP)))
        self._expect(tensor_scale, name, ("F32",), None)
        value = float(self.shards.load(tensor_scale).reshape(()))
        if not (math.isfinite(value) and value > 0):
            raise ModelError(f"{tensor.file}: tensor {tensor_scale} is {value}, expected a positive number")
        parts = {"values": name, "scales": scales, "global": tensor_scale}
        return _Entry(Format.NVFP4, (rows, 2 * packed), parts, divides)

    def _matrix(self, name: str, tensor: StoredTensor) -> tuple[int, int]:
        if len(tensor.shape) != 2:
            raise ModelError(f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, expected two dimensions")
        return tensor.shape[0], tensor.shape[1]

    def _groups(self, name: str, tensor: StoredTensor, width: int, group: int) -> int:
        if width % group:
            raise ModelError(f"{tensor.file}: tensor {name} has rows of {width} values, expected a multiple of {group}")
        return width // group

    def _expect(self, name: str, of: str, dtypes: tuple[str, ...], shape: tuple[int, int] | None) -> None:
        """Check the scales `name` of weight `of`; shape None is a single number."""
        if name not in self.shards.tensors:
            raise ModelError(f"{self.shards.find(of).file}: tensor {name} is missing, the scales of {of}")
        tensor = self.shards.tensors[name]
        if tensor.dtype not in dtypes:
            raise ModelError(f"{tensor.file}: tensor {name} has type {tensor.dtype}, expected {' or '.join(dtypes)}")
        if shape is None and math.prod(tensor.shape) != 1:
            raise ModelError(f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, expected one number")
        if shape is not None and tensor.shape != shape:
            raise ModelError(f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, expected {list(shape)}")
