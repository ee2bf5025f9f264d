"""Hugging Face directories: one or several safetensors files, memory-mapped, read tensor by tensor."""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from longturn.errors import ModelError
from longturn.source import ModelSource

_FLOATING = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class SafetensorsCheckpoint:
    """The tensors of a directory's safetensors files."""

    def __init__(self, source: ModelSource) -> None:
        self._path = source.path
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._open: dict[str, Any] = {}
        for file in source.files:
            if file.suffix != ".safetensors":
                continue
            try:
                handle: Any = safe_open(file, framework="pt")
                for name in handle.keys():  # noqa: SIM118 (not a mapping)
                    part = handle.get_slice(name)
                    if part.get_dtype() not in _FLOATING:
                        raise ModelError(
                            f"{file}: tensor {name} has type {part.get_dtype()}, which is not supported "
                            f"(supported: {', '.join(_FLOATING)})"
                        )
                    self._shapes[name] = tuple(part.get_shape())
                    self._open[name] = handle
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file}: damaged safetensors file ({error})") from error

    @property
    def path(self) -> Path:
        return self._path

    def names(self) -> Set[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise ModelError(f"{self._path}: tensor {name} is missing")
        return self._shapes[name]

    def load(self, name: str) -> Tensor:
        self.shape(name)
        try:
            tensor: Tensor = self._open[name].get_tensor(name)
            return tensor
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{self._path}: tensor {name} cannot be read ({error})") from error
