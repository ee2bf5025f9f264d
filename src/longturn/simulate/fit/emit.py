"""Writing the calibration part of a platform file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longturn.errors import ConfigError
from longturn.simulate.calibration import CollectiveConstants, KernelFamily, Residual

MARKER = "# --- calibration: everything below is written by `longturn simulate fit` ---"


def family_toml(family: KernelFamily) -> str:
    """One kernel family as TOML; `read_family` reads it back."""
    root = f'calibration."{family.name}"'
    lines = [
        f"[{root}]",
        f"source = {json.dumps(family.source)}",
        f"date = {json.dumps(family.date)}",
        f"small_kernel_ns = {_number(family.small_kernel_ns)}",
        f"gemm_note = {json.dumps(family.gemm_note)}",
        *([f"chunk_sizes = {json.dumps(family.chunk_sizes)}"] if family.chunk_sizes else []),
        "",
    ]
    for room, table in (("attention", family.attention), ("experts", family.experts)):
        for key, record in table.items():
            lines += [f"[{root}.{room}.{key}]", *_record(record), ""]
    for room, collective in (("all_reduce", family.all_reduce), ("all_to_all", family.all_to_all)):
        lines += [f"[{root}.{room}]", *_collective(collective, f"{root}.{room}"), ""]
    return "\n".join(lines)


def write_calibration(path: Path, families: list[KernelFamily]) -> None:
    """Replace everything below the marker of a platform file.

    Raises:
        ConfigError: the file cannot be read or written, or has no marker line: what is hand-written is not touched.
    """
    try:
        text = path.read_text()
        head, found, _ = text.partition(MARKER)
        if not found:
            raise ConfigError(f"platform {path}: no line '{MARKER}', below which a calibration could be written")
        path.write_text(head + MARKER + "\n\n" + "\n".join(family_toml(family) for family in families))
    except OSError as error:
        raise ConfigError(f"platform {path}: cannot be written ({error})") from None


def _record(record: Any) -> Iterator[str]:
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if value == field.default:
            continue  # what no measurement shows
        if isinstance(value, Residual):
            yield f"{field.name} = {{ rms = {value.rms}, worst = {value.worst}, points = {value.points} }}"
        elif isinstance(value, str):
            yield f"{field.name} = {json.dumps(value)}"
        else:
            yield f"{field.name} = {_number(value)}"


def _collective(collective: CollectiveConstants, root: str) -> Iterator[str]:
    yield f"basis = {json.dumps(collective.basis)}"
    yield f"note = {json.dumps(collective.note)}"
    yield f"link_bytes_s = {_number(collective.link_bytes_s)}"
    for ranks, knots in collective.ranks.items():
        yield ""
        yield f"[{root}.ranks.{ranks}]"
        yield f"bytes = [{', '.join(str(value) for value in knots.bytes)}]"
        yield f"ns = [{', '.join(_number(value) for value in knots.ns)}]"


def _number(value: float) -> str:
    """A TOML number; whole ones without a fraction, so that files stay readable."""
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else f"{float(value):.6g}"
