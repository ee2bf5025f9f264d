"""Values of a model's configuration, checked as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longturn.errors import ModelError


class ConfigReader:
    """Typed access to a configuration, with errors that name the key."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least `least`; `default` where the key is missing or null. Raises ModelError."""
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ModelError(f"the model's configuration has no valid {key} (it is {value!r})")
        return value

    def number(self, key: str, default: float) -> float:
        """A number; `default` where the key is missing or null. Raises ModelError."""
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise ModelError(f"the model's configuration has no valid {key} (it is {value!r})")
        return float(value)

    def must_be(self, key: str, allowed: tuple[Any, ...]) -> None:
        """Raises ModelError where the key is there with any other value."""
        if key in self.config and self.config[key] not in allowed:
            wanted = " or ".join(repr(value) for value in allowed)
            raise ModelError(f"{key} {self.config[key]!r} is not supported (supported: {wanted})")
