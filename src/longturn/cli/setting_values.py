"""Values of settings as people write them: in YAML files, behind `--set`, and byte counts with units."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from longturn.errors import ConfigError

_UNITS = {"": 1} | {
    prefix + binary: base**power
    for binary, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("kmgt", start=1)
}


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of a YAML file, nested by section.

    Raises:
        ConfigError: it cannot be read, or holds something else.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        tree = yaml.safe_load(text)
        twice = _named_twice(yaml.compose(text, Loader=yaml.SafeLoader), depth=2)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    # PyYAML's dates and integers raise ValueError; it recurses into what is nested.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not YAML: {_yaml_complaint(error)}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ConfigError(f"{path}: must hold settings by name, not {type(tree).__name__}")
    if twice is not None:
        raise ConfigError(f"{path}: line {twice.start_mark.line + 1}: '{twice.value}' stands there a second time")
    # Two levels, as deep as settings are: a file can nest itself without end.
    return {
        name: {key: _plain(f"{name}.{key}", inner) for key, inner in value.items()}
        if isinstance(value, dict)
        else value
        for name, value in tree.items()
    }


def _named_twice(node: Any, depth: int) -> Any:
    """The second of two equal keys of a mapping, or None. YAML's readers take the last one and drop what stood under
    the first, which would be a setting that silently does nothing."""
    if depth == 0 or getattr(node, "id", "") != "mapping":
        return None
    seen: set[str] = set()
    for key, value in node.value:
        if key.id == "scalar" and key.value in seen:
            return key
        seen.add(str(key.value))
        inner = _named_twice(value, depth - 1)
        if inner is not None:
            return inner
    return None


def _plain(name: str, value: Any) -> Any:
    """A setting's value, byte counts as numbers: `memory_bytes: 2Gi` is what `--set` takes, too."""
    return _bytes_of(name, value) if isinstance(value, str) and name.endswith("_bytes") else value


def _bytes_of(name: str, text: str) -> int:
    try:
        return byte_count(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"'{name}': {error}") from error


def _yaml_complaint(error: Exception) -> str:
    """What is wrong and where, in one line; PyYAML's own text shows the document in several."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def set_value(name: str, text: str) -> Any:
    """What `--set NAME=TEXT` gives the setting. Raises ConfigError if the text is no value."""
    import yaml

    if name.strip().endswith("_bytes") and not text.strip().isdigit():
        return _bytes_of(name.strip(), text)
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # as in `read_settings`
        raise ConfigError(f"--set {name}: '{text}' is not a YAML value") from error


def byte_count(text: str) -> int:
    """A number of bytes, with a unit if it has one: 1000000, 512M, 512MiB, 2Gi."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    if match is None or match[2] not in _UNITS:  # a lone `i` matches too
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of bytes such as 1000000, 512MiB or 2G")
    return int(float(match[1]) * _UNITS[match[2]])
