"""Draft models that ship as presets (`drafts.toml`), each with where its sizes and acceptance lengths come from."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

from longturn.errors import ConfigError
from longturn.simulate.cost.options import Drafter

_FILE = Path(__file__).parent / "drafts.toml"


def drafter_names() -> tuple[str, ...]:
    """Names of the draft models that ship."""
    return tuple(sorted(tomllib.loads(_FILE.read_text())))


def load_drafter(name: str, drafts: int) -> Drafter:
    """A draft model that proposes `drafts` tokens a step.

    Raises:
        ConfigError: there is no such draft model, or it was not measured with so many drafts.
    """
    entry = tomllib.loads(_FILE.read_text()).get(name)
    if entry is None:
        raise ConfigError(f"unknown draft model '{name}' (known: {', '.join(drafter_names())})")
    known = {field.name for field in dataclasses.fields(Drafter)}
    values = {key: value for key, value in entry.items() if key in known}
    drafter = Drafter(drafts=drafts, **{**values, "acceptance": tuple(values["acceptance"])})
    if not 0 < drafts <= len(drafter.acceptance):
        raise ConfigError(f"draft model {name}: 1 to {len(drafter.acceptance)} drafts, not {drafts}")
    return drafter
