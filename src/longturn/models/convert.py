"""Rewrite a MiniMax-M3 checkpoint in another of its published formats."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from longturn.config import ModelConfig
from longturn.errors import ModelError
from longturn.models.checkpoint.base import open_checkpoint
from longturn.models.checkpoint.published import PublishedCheckpoint
from longturn.models.checkpoint.quant_config import Format
from longturn.models.checkpoint.scheme import Scheme
from longturn.models.checkpoint.shards import INDEX_NAME
from longturn.models.checkpoint.write import SHARD_BYTES, ShardWriter, new_directory, write_json
from longturn.source import read_json, resolve_source

Progress = Callable[[int, int, str], None]
"""Called with tensors done, tensors in all, and the name of the last one."""


@dataclass(frozen=True, slots=True)
class Converted:
    """What was written."""

    path: Path
    tensors: int
    quantised: int
    bytes_before: int
    bytes_after: int


def convert(
    source_path: Path,
    target: Path,
    scheme: Scheme,
    *,
    progress: Progress = lambda done, planned, name: None,
    shard_bytes: int = SHARD_BYTES,
) -> Converted:
    """Write `target` with the weights of `source_path` in the formats of `scheme`, and everything else as it is.

    The source may be quantised itself: its weights are dequantised first. Memory stays near `shard_bytes`.

    Raises:
        ModelError: the source is no MiniMax-M3, is damaged, or a weight does not fit the format.
        ConfigError: the target exists.
    """
    source = resolve_source(ModelConfig(path=str(source_path)))
    checkpoint = open_checkpoint(source)
    if not isinstance(checkpoint, PublishedCheckpoint):
        raise ModelError(f"{source_path}: architecture {source.architecture} cannot be converted (MiniMax-M3 can)")
    names = sorted(checkpoint.names(), key=_natural)
    quantised = 0
    with new_directory(target) as partial:
        writer = ShardWriter(partial, shard_bytes)
        for done, name in enumerate(names, 1):
            weight = checkpoint.load(name)
            if scheme.format_of(name) not in (None, Format.PLAIN):
                quantised += 1
            elif checkpoint.format(name) == Format.PLAIN:
                weight = weight.clone()  # the writer holds it until a shard is full, which is after the file's release
            else:
                weight = weight.to(torch.bfloat16)
            try:
                stored = scheme.encode(name, weight, _largest_of_pair(checkpoint, name, scheme))
            except ModelError as error:
                raise ModelError(f"{source_path}: {error}") from error
            for stored_name, tensor in stored.items():
                writer.add(stored_name, tensor)
            checkpoint.release()
            progress(done, len(names), name)
        writer.finish()
        _write_settings(source_path, partial, scheme, names)
    before = sum(checkpoint.stored_bytes(name) for name in names)
    return Converted(target, len(names), quantised, before, writer.total_bytes)


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Layers and experts in the order of their numbers, so that a layer lies in one or two files."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in name.split("."))


def _largest_of_pair(checkpoint: PublishedCheckpoint, name: str, scheme: Scheme) -> float | None:
    """An expert's gate and up projections share a tensor scale: kernels run them as one weight."""
    if scheme.format_of(name) != Format.NVFP4:
        return None
    base, _, leaf = name.removesuffix(".weight").rpartition(".")
    if leaf not in ("w1", "w3"):
        return None
    pair = [f"{base}.{part}.weight" for part in ("w1", "w3")]
    return max(float(checkpoint.load(part).abs().amax()) for part in pair if part in checkpoint.names())


def _write_settings(source: Path, target: Path, scheme: Scheme, names: list[str]) -> None:
    for entry in sorted(source.iterdir()):
        if entry.suffix == ".safetensors" or entry.name in (INDEX_NAME, "config.json", "hf_quant_config.json"):
            continue
        if entry.is_dir():
            if not entry.name.startswith("."):
                shutil.copytree(entry, target / entry.name)
        else:
            shutil.copy2(entry, target / entry.name)
    config = read_json(source / "config.json")
    for part in (config, config.get("text_config", {})):
        part.pop("quantization_config", None)
    if (declared := scheme.declare(names)) is not None:
        config["quantization_config"] = declared
        if scheme.flavour == "modelopt":
            quantization = {key: value for key, value in declared.items() if key != "quant_method"}
            write_json(
                target / "hf_quant_config.json", {"producer": {"name": "longturn"}, "quantization": quantization}
            )
    write_json(target / "config.json", config)
