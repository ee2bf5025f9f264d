"""The texts and prompts that quality is measured on: shipped ones, or files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from longturn.errors import ConfigError

SHIPPED = "longturn-quality-1"
"""Name of the shipped set; a changed set gets another number, since its figures are not comparable."""
_TEXTS = ("prose", "code", "session", "data")


@dataclass(frozen=True, slots=True)
class NamedText:
    name: str
    text: str


def shipped_texts() -> tuple[NamedText, ...]:
    """Prose, code, an agent's session and structured data: about 3,400 tokens."""
    folder = resources.files("longturn.bench").joinpath("quality_set")
    return tuple(NamedText(name, folder.joinpath(f"{name}.txt").read_text(encoding="utf-8")) for name in _TEXTS)


def shipped_prompts() -> tuple[NamedText, ...]:
    """Short questions of one message each."""
    data = resources.files("longturn.bench").joinpath("quality_set", "prompts.json").read_text(encoding="utf-8")
    return _prompts(data, "prompts.json")


def read_texts(paths: Sequence[Path]) -> tuple[NamedText, ...]:
    """Files of plain text, each a text of its own.

    Raises:
        ConfigError: a file cannot be read, is not UTF-8, or is empty.
    """
    return tuple(NamedText(path.name, _read(path)) for path in paths)


def read_prompts(path: Path) -> tuple[NamedText, ...]:
    """A JSON list of {"name": ..., "text": ...}, or a text file with one prompt a line.

    Raises:
        ConfigError: the file cannot be read or has no prompts.
    """
    data = _read(path)
    if path.suffix == ".json":
        return _prompts(data, str(path))
    lines = [line.strip() for line in data.splitlines() if line.strip()]
    return tuple(NamedText(f"line {number}", line) for number, line in enumerate(lines, start=1))


def digest(texts: Iterable[NamedText]) -> str:
    """16 hex digits that change with any text or its place."""
    parts = [f"{len(item.text)}:{item.text}" for item in texts]
    return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error
    if not text.strip():
        raise ConfigError(f"{path}: holds no text")
    return text


def _prompts(data: str, name: str) -> tuple[NamedText, ...]:
    try:
        items: Any = json.loads(data)
    except ValueError as error:
        raise ConfigError(f"{name}: not JSON ({error})") from error
    if not isinstance(items, list) or not items:
        raise ConfigError(f"{name}: must be a list of prompts")
    found = []
    for number, item in enumerate(items, start=1):
        text = item.get("text") if isinstance(item, dict) else None
        if not isinstance(text, str) or not text.strip():
            raise ConfigError(f"{name}: prompt {number} has no text")
        found.append(NamedText(str(item.get("name", f"prompt {number}")), text))
    return tuple(found)
