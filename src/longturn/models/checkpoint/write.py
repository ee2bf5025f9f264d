"""Write model directories: shard by shard with bounded memory, and whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from longturn.errors import ConfigError, ModelError
from longturn.models.checkpoint.shards import INDEX_NAME

SHARD_BYTES = 1 << 30
"""Size at which a file is closed; also about what a writer holds in memory."""


@contextlib.contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to fill, which appears under `path` when the block ends well and is removed when it does not.

    Raises:
        ConfigError: `path` exists already.
        ModelError: it cannot be written.
    """
    if path.exists():
        raise ConfigError(f"{path}: exists already; name a directory that does not")
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        try:
            partial.mkdir(parents=True)
            yield partial
            partial.rename(path)
        except OSError as error:
            raise ModelError(f"{path}: cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


class ShardWriter:
    """Collects tensors into numbered safetensors files with an index."""

    def __init__(self, directory: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._directory = directory
        self._shard_bytes = shard_bytes
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[tuple[Path, list[str]]] = []
        self.total_bytes = 0
        """Bytes of all tensors added so far."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor; it must not change until it is written."""
        size = tensor.numel() * tensor.dtype.itemsize
        if self._pending and self._pending_bytes + size > self._shard_bytes:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += size
        self.total_bytes += size

    def finish(self) -> None:
        """Write what is left, give the files their final names, and write the index."""
        self._flush()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._shards, 1):
            final = f"model-{number:05d}-of-{count:05d}.safetensors"
            path.rename(self._directory / final)
            weight_map.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(self._directory / INDEX_NAME, index)

    def _flush(self) -> None:
        if not self._pending:
            return
        path = self._directory / f"shard-{len(self._shards) + 1}.safetensors"
        save_file(self._pending, path, metadata={"format": "pt"})
        path.chmod(0o644)  # the library makes files that only their owner can read
        self._shards.append((path, list(self._pending)))
        self._pending, self._pending_bytes = {}, 0
