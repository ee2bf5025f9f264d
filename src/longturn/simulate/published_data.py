"""Reading `published.toml`: groups of points that others published or that were measured."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longturn.errors import ConfigError
from longturn.simulate.cost.routing import REFERENCE_SPREAD, Routing

_FILE = Path(__file__).parent / "published.toml"
OWN_RUNS = Path(__file__).parent / "own_runs.toml"
"""What was measured with Longturn itself."""


@dataclass(frozen=True, slots=True)
class Group:
    """Points with one source and one setting; `published.toml` says what each kind holds."""

    name: str
    kind: str
    source: str
    date: str
    values: Mapping[str, Any]

    def text(self, key: str) -> str:
        """Raises ConfigError if the group has no such text."""
        value = self.values.get(key)
        if not isinstance(value, str):
            raise ConfigError(f"published group '{self.name}': no text '{key}'")
        return value

    def number(self, key: str) -> int:
        """Raises ConfigError if the group has no such whole number."""
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ConfigError(f"published group '{self.name}': no whole number '{key}'")
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """Raises ConfigError if the group has no such list of numbers."""
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(entry, (int, float)) for entry in value):
            raise ConfigError(f"published group '{self.name}': no list of numbers '{key}'")
        return tuple(float(entry) for entry in value)

    def texts(self, key: str) -> tuple[str, ...]:
        """Raises ConfigError if the group has no such list of texts."""
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise ConfigError(f"published group '{self.name}': no list of texts '{key}'")
        return tuple(value)

    @property
    def judged(self) -> bool:
        """Whether the model claims these points; else they are shown, and not counted."""
        return bool(self.values.get("judged", self.values.get("use") == "judged"))

    @property
    def routing(self) -> Routing:
        """How tokens chose experts; of random weights evenly."""
        return Routing(spread=float(self.values.get("routing_spread", REFERENCE_SPREAD)))

    @property
    def note(self) -> str:
        return str(self.values.get("note", self.values.get("reason", "")))


def groups(*kinds: str, path: Path = _FILE) -> tuple[Group, ...]:
    """All groups of some kinds (of all, if none is named), in the file's order.

    Raises:
        ConfigError: the file cannot be read, or a group lacks its name, kind, source or date.
    """
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as TOML ({error})") from None
    found = []
    for entry in data.get("group", []):
        missing = [key for key in ("name", "kind", "source", "date") if not isinstance(entry.get(key), str)]
        if missing:
            raise ConfigError(f"{path.name}: a group lacks {', '.join(missing)}")
        if not kinds or entry["kind"] in kinds:
            found.append(Group(entry["name"], entry["kind"], entry["source"], entry["date"], entry))
    return tuple(found)
