"""Traces from files and folders, whatever their format."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Sequence
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import msgspec

from longturn.bench.traces.errors import TraceError
from longturn.bench.traces.mooncake import parse_mooncake
from longturn.bench.traces.tree import SessionTree
from longturn.bench.traces.weka import parse_weka

ENDINGS = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
"""What is read from a folder."""


def load_traces(paths: Sequence[Path], *, split: bool = True) -> list[SessionTree]:
    """Read files, and folders with everything below them, in the order of their names.

    Args:
        paths: files or folders; a file that is reached twice is read once.
        split: look for agents in flattened captures.

    Raises:
        TraceError: nothing there, a file that cannot be read or is no trace, or one session id in two files.
    """
    trees: list[SessionTree] = []
    seen: dict[str, str] = {}
    for path in _files(paths):
        for tree in parse_trace(_read(path), str(path), split=split):
            if tree.id in seen:
                other = seen[tree.id]
                place = f"twice in {other}" if other == tree.source else f"in {other} and in {tree.source}"
                raise TraceError(f"session id {tree.id!r} is {place}")
            seen[tree.id] = tree.source
            trees.append(tree)
    return trees


def parse_trace(data: bytes, source: str, *, split: bool = True) -> list[SessionTree]:
    """Read one file's content; the format is told by the fields of its first object.

    Raises:
        TraceError: no known format, or the format is broken.
    """
    whole = _object(data)
    if whole is not None and "requests" in whole:
        return [parse_weka(data, source, split=split)]
    lines = [(number, line) for number, line in enumerate(data.splitlines(), 1) if line.strip()]
    if not lines:
        raise TraceError(f"{source}: empty file")
    number, line = lines[0]
    first = whole if whole is not None else _object(line)
    if first is None:
        raise TraceError(f"{source}: line {number} is no JSON object: {line[:40].decode(errors='replace')!r}")
    if "requests" in first:
        return [parse_weka(text, f"{source}: line {number}", split=split) for number, text in lines]
    if "input_length" in first or "hash_ids" in first:
        return parse_mooncake(data, source)
    found = ", ".join(sorted(first)[:6]) or "none"
    raise TraceError(
        f"{source}: no known trace format: neither 'requests' nor 'input_length' among its fields ({found})"
    )


def shipped_traces() -> list[str]:
    """Names of the small invented traces that come with the package."""
    return sorted(item.name for item in _fixtures().iterdir() if item.name.endswith(ENDINGS))


def load_shipped(name: str, *, split: bool = True) -> list[SessionTree]:
    """A trace by its name among `shipped_traces()`.

    Raises:
        TraceError: there is no such trace.
    """
    if name not in shipped_traces():
        raise TraceError(f"no shipped trace '{name}' (there are: {', '.join(shipped_traces())})")
    return parse_trace(_fixtures().joinpath(name).read_bytes(), name, split=split)


def _fixtures() -> Traversable:
    return resources.files("longturn.bench.traces").joinpath("fixtures")


def _files(paths: Sequence[Path]) -> list[Path]:
    found: dict[Path, Path] = {}
    for path in paths:
        if path.is_dir():
            below = sorted(item for item in path.rglob("*") if item.name.endswith(ENDINGS) and item.is_file())
            if not below:
                raise TraceError(f"{path}: no traces in it (looked for {', '.join('*' + end for end in ENDINGS)})")
        elif path.exists():
            below = [path]
        else:
            raise TraceError(f"{path}: no such file or folder")
        for item in below:
            found.setdefault(item.resolve(), item)
    return list(found.values())


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}: damaged gzip file: {error}") from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error


def _object(data: bytes) -> dict[str, msgspec.Raw] | None:
    """The fields of a JSON object, undecoded; None if it is something else."""
    try:
        return msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
