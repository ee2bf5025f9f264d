"""Two configurations, the switches between them, and the configuration of each combination of switches."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longturn.bench.attribution import Combination, needed
from longturn.cli.config_text import DEFAULTS, PLACE, flat, in_words, short_name
from longturn.cli.options import config_from_args, config_from_options, full_name
from longturn.config import EngineConfig, config_from_dict
from longturn.errors import ConfigError

_LONGEST_CURVE = 60


@dataclass(frozen=True, slots=True)
class Switch:
    """Settings that are thrown together."""

    name: str
    off: Mapping[str, Any]
    """Setting -> value in A."""
    on: Mapping[str, Any]
    """Setting -> value in B."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """A, B and what lies between them."""

    a: EngineConfig
    b: EngineConfig
    switches: tuple[Switch, ...]
    """In the order of the sequence."""

    @property
    def names(self) -> list[str]:
        return [switch.name for switch in self.switches]

    def combinations(self) -> list[Combination]:
        """What is to be measured."""
        return needed(self.names)

    def config(self, on: Combination) -> EngineConfig:
        """A with some switches thrown."""
        values = flat(self.a)
        for switch in self.switches:
            values |= switch.on if switch.name in on else switch.off
        return _nested(values)

    def label(self, on: Combination) -> str:
        """A combination in words."""
        names = [name for name in self.names if name in on]
        if not names:
            return "A"
        return "B" if len(names) == len(self.switches) else "A with " + " + ".join(names)

    def curve(self, on: Combination) -> str:
        """Name of a combination's points, which must also tell something on a page of other results: its options, or
        its label where those are long."""
        words = in_words(self.config(on))
        return words if len(words) <= _LONGEST_CURVE else self.label(on)


def compare(
    a: str | None,
    b: str | None,
    switches: Sequence[str],
    together: Sequence[str] = (),
    order: Sequence[str] = (),
) -> Comparison:
    """From what the command line says.

    Args:
        a: a YAML or JSON file of settings, `NAME=VALUE[,NAME=VALUE]`, or `defaults`; the defaults if None.
        b: the same; the same as `a` if None.
        switches: `NAME=OFF:ON`, set in A and in B on top of that.
        together: `NAME,NAME`: settings that count as one switch.
        order: names of switches in the order of the sequence; others follow as they come.

    Raises:
        ConfigError: something does not parse, is no setting, or nothing differs.
    """
    values_a = flat(read_config(a or DEFAULTS, "A"))
    values_b = flat(read_config(b, "B")) if b is not None else dict(values_a)
    first: list[str] = []
    for text in switches:
        name, equals, states = text.partition("=")
        off, colon, on = states.partition(":")
        if not (equals and colon):
            raise ConfigError(f"--switch needs NAME=OFF:ON, not '{text}'")
        name = full_name(name.strip(), "--switch")
        values_a[name] = flat(read_config(f"{name}={off}", "--switch"))[name]
        values_b[name] = flat(read_config(f"{name}={on}", "--switch"))[name]
        first.append(name)
    # Through the configuration once more: an option may have been read that the other side does not allow.
    config_a, config_b = _nested(values_a), _nested(values_b)
    differing = [name for name in values_a if values_a[name] != values_b[name] and name not in PLACE]
    same = [name for name in first if name not in differing]
    if same:
        raise ConfigError(f"--switch: '{same[0]}' has the same value off and on")
    if not differing:
        raise ConfigError("A and B are the same configuration: nothing to explain (name B, or --switch NAME=OFF:ON)")
    groups = _groups([*dict.fromkeys(first), *(name for name in differing if name not in first)], together)
    found = [
        Switch(
            name,
            {setting: values_a[setting] for setting in members},
            {setting: values_b[setting] for setting in members},
        )
        for name, members in groups.items()
    ]
    return Comparison(config_a, config_b, tuple(_ordered(found, order)))


def _groups(names: Sequence[str], together: Sequence[str]) -> dict[str, list[str]]:
    """Name of each switch -> its settings."""
    groups: dict[str, list[str]] = {}
    taken: set[str] = set()
    joined = [[full_name(part.strip(), "--together") for part in text.split(",")] for text in together]
    for members in joined:
        missing = [name for name in members if name not in names]
        twice = [name for name in members if name in taken]
        if missing or twice:
            why = f"'{missing[0]}' does not differ" if missing else f"'{twice[0]}' is in two groups"
            raise ConfigError(f"--together: {why}")
        taken.update(members)
    for name in names:
        members = next((group for group in joined if name in group), [name])
        groups.setdefault("+".join(map(short_name, members)), members)
    return groups


def _ordered(switches: Sequence[Switch], order: Sequence[str]) -> list[Switch]:
    by_name = {switch.name: switch for switch in switches}
    wanted = []
    for name in order:
        short = name if name in by_name else name.rpartition(".")[2]
        if short not in by_name:
            raise ConfigError(f"--order: no switch '{name}' (there are: {', '.join(by_name)})")
        if by_name[short] in wanted:
            raise ConfigError(f"--order: '{name}' is there twice")
        wanted.append(by_name[short])
    return wanted + [switch for switch in switches if switch not in wanted]


def read_config(text: str, flag: str) -> EngineConfig:
    """A configuration from a file of settings, options, or `defaults`.

    Raises:
        ConfigError: neither a file nor options, or a setting is unknown or out of range.
    """
    if text == DEFAULTS:
        return EngineConfig()
    if Path(text).is_file():
        return config_from_args(argparse.Namespace(config=text, model_dir=None, sets=[]))
    options = text.split(",")
    if not all(option.partition("=")[0].strip() and "=" in option for option in options):
        raise ConfigError(f"{flag}: '{text}' is no file of settings, no NAME=VALUE, and not '{DEFAULTS}'")
    return config_from_options(options, flag)


def _nested(values: Mapping[str, Any]) -> EngineConfig:
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *path, last = name.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[last] = value
    return config_from_dict(EngineConfig, tree)


def run_digest(config: EngineConfig, load: str, version: str) -> str:
    """Name of the runs of one configuration under one load: 12 hex digits. Where it listens does not matter."""
    values = {name: value for name, value in flat(config).items() if name not in PLACE}
    text = json.dumps([values, load, version], default=str, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
