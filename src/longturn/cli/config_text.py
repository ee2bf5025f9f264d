"""A configuration as text: for result files, the names of curves, and people."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longturn.cli.options import settings
from longturn.config import EngineConfig, config_from_dict
from longturn.errors import ConfigError

DEFAULTS = "defaults"
"""The engine as it is without any option."""
PLACE = ("server.host", "server.port")
"""Where a server listens: replaced where one is started to be measured, and no switch."""
_SECRET = ("server.api_keys",)
_LOCAL = ("model.path", "cache_dir", "server.api_keys_file", "server.ssl_certfile", "server.ssl_keyfile")
"""Shown without their folders, which are this machine's."""


def short_name(name: str) -> str:
    """The last part of a setting's name where no other setting has it."""
    last = name.rpartition(".")[2]
    return last if sum(setting.name.rpartition(".")[2] == last for setting in settings()) == 1 else name


def flat(config: EngineConfig) -> dict[str, Any]:
    """Dotted name -> value of every setting."""

    def leaf(name: str) -> Any:
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        return value

    return {setting.name: leaf(setting.name) for setting in settings()}


def value_text(name: str, value: Any) -> str:
    """A setting's value for a result file: no key, and no folder of this machine."""
    if name in _SECRET:
        return "(not shown)"
    if name in _LOCAL and value is not None:
        return Path(value).name
    return str(value).lower() if isinstance(value, bool) else str(value)


def changed_settings(config: EngineConfig) -> dict[str, str]:
    """Settings that differ from the engine's defaults, as a point's flags have them."""
    defaults = flat(EngineConfig())
    found = {name: value for name, value in flat(config).items() if value != defaults[name] and name not in PLACE}
    return {name: value_text(name, value) for name, value in found.items()}


def engine_settings(config: EngineConfig) -> dict[str, str]:
    """Those of `changed_settings` that decide what an engine computes and how fast: no files, addresses or names."""
    found = changed_settings(config)
    return {
        name: text
        for name, text in found.items()
        if name not in (*_LOCAL, "model.served_name") and not name.startswith(("server.", "cache.events_"))
    }


def told_settings(tree: Mapping[str, Any]) -> dict[str, str]:
    """`engine_settings` of a configuration as `/server_info` shows it; none of one that this version does not know."""
    known = {section: values for section, values in tree.items() if section not in ("server", "cache_dir")}
    try:
        return engine_settings(config_from_dict(EngineConfig, known))
    except ConfigError:
        return {}


def in_words(config: EngineConfig) -> str:
    """A configuration as its options."""
    return ", ".join(f"{short_name(name)}={text}" for name, text in changed_settings(config).items()) or DEFAULTS
