"""Show what a checkpoint is: family, size, formats, and the bytes of cache that a token takes."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from longturn.cli.terminal import size_text, table

if TYPE_CHECKING:
    from longturn.models.inspect import Summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="model directory or GGUF file; the embedded one if absent"
    )


def run(args: argparse.Namespace) -> int:
    from longturn.config import ModelConfig
    from longturn.models.inspect import inspect_model

    found = inspect_model(ModelConfig(path=args.model))
    print(json.dumps(dataclasses.asdict(found)) if args.json else text(found))
    return 0


def text(found: Summary) -> str:
    """The summary for people."""
    active = ""
    if found.active_parameters != found.parameters:
        active = f", {_short(found.active_parameters)} active for a token"
    rows = {
        "model": found.path,
        "family": f"{found.family} ({found.architecture})",
        "size": f"{_short(found.parameters)} parameters{active}",
        "layers": f"{found.layers}: {found.layer_kinds}",
        "context": f"{found.context_tokens:,} tokens",
        "vocabulary": f"{found.vocab_size:,}",
        "quantisation": found.quantisation,
    }
    if found.skipped_tensors:
        rows["not served"] = f"{found.skipped_tensors:,} tensors of vision or draft, {size_text(found.skipped_bytes)}"
    lines = [f"{key:<14}{value}" for key, value in rows.items()]
    formats = [[f.format, f"{f.tensors:,}", _short(f.parameters), size_text(f.bytes)] for f in found.formats]
    total = ["all", f"{sum(f.tensors for f in found.formats):,}", _short(found.parameters)]
    total.append(size_text(sum(f.bytes for f in found.formats)))
    lines += ["", table(["weights", "tensors", "parameters", "stored"], formats, total)]
    cache = []
    for size in found.cache:
        kv, index = size.kv_bytes_per_token, size.index_bytes_per_token
        cache.append([size.type, f"{kv:,.0f}", f"{index:,.0f}", f"{kv + index:,.0f}"])
    lines += ["", table(["cache", "K and V, bytes/token", "index key", "all"], cache)]
    return "\n".join(lines)


def _short(count: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= size:
            return f"{count / size:,.2f}{unit}"
    return str(count)
