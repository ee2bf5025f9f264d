"""A device's table of kernel plans: what `longturn tune` measured to be better than a kernel's own choice.

Every kernel's plan record chooses well for an H200 by itself (`MoePlan.default` and its like). A table changes fields
of it for one kernel, one shape and one number of rows. It is read once, when an executor starts; nothing is tuned while
requests wait.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from longturn.errors import ConfigError

_log = logging.getLogger(__name__)

Plan = TypeVar("Plan")
Value = int | bool | None
VERSION = 1


@dataclass(frozen=True, slots=True)
class Entry:
    """Fields of one plan that are to differ from the kernel's own choice."""

    kernel: str
    """`projection`, `out`, `head`, `moe_one`, `moe_few`, `msa`, `moe_many`, `msa_many`, `sample`."""
    shape: str
    """Extents and formats, as the model names them."""
    rows: int
    """Rows of a decode step, or tokens of a step of many."""
    fields: Mapping[str, Value]


@dataclass(frozen=True, slots=True)
class PlanTable:
    """Entries for one device."""

    device: str = ""
    """As torch names it."""
    entries: tuple[Entry, ...] = ()
    _of: Mapping[tuple[str, str], tuple[Entry, ...]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        of: dict[tuple[str, str], tuple[Entry, ...]] = {}
        for entry in sorted(self.entries, key=lambda e: e.rows):
            key = entry.kernel, entry.shape
            of[key] = (*of.get(key, ()), entry)
        object.__setattr__(self, "_of", of)

    def apply(self, kernel: str, shape: str, rows: int, default: Plan) -> Plan:
        """`default`, a kernel's plan record, with the fields of the entry for `rows`: that of the fewest rows that are
        enough, unless they are more than twice as many."""
        for entry in self._of.get((kernel, shape), ()):
            if rows <= entry.rows <= 2 * rows:
                return dataclasses.replace(default, **entry.fields)  # type: ignore[type-var]
        return default

    def with_entry(self, entry: Entry) -> PlanTable:
        """This table with `entry` in place of the one for the same kernel, shape and rows."""
        key = entry.kernel, entry.shape, entry.rows
        kept = tuple(e for e in self.entries if (e.kernel, e.shape, e.rows) != key)
        return PlanTable(self.device, (*kept, entry))

    def without(self, kernel: str, shape: str, rows: int) -> PlanTable:
        """This table but for one entry."""
        return PlanTable(
            self.device, tuple(e for e in self.entries if (e.kernel, e.shape, e.rows) != (kernel, shape, rows))
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        entries = [dataclasses.asdict(entry) for entry in self.entries]
        return {"version": VERSION, "device": self.device, "plans": entries}


SHIPPED: Mapping[str, PlanTable] = {}
"""Tables by device that come with the package. None is needed for an H200, for which kernels choose as was measured."""


def table_path(directory: Path, device: str) -> Path:
    """The file of a device's table in a cache directory."""
    name = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "device"
    return directory / "plans" / f"{name}.json"


def load_table(path: Path, device: str, plans: Mapping[str, type]) -> PlanTable:
    """The table stored at `path`; the shipped one, or an empty one, where there is none.

    A file that cannot be used is passed over with a warning, since kernels run well without it.

    Args:
        plans: plan records by kernel; entries for other kernels, or with fields that they do not have, are left out.
    """
    shipped = SHIPPED.get(device, PlanTable(device))
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return shipped
    except (OSError, ValueError) as error:
        _log.warning("plans in %s are not used: %s", path, error)
        return shipped
    try:
        if data["version"] != VERSION or data["device"] != device:
            raise ValueError(f"they are version {data['version']} for {data['device']}, not {VERSION} for {device}")
        entries = [Entry(e["kernel"], e["shape"], int(e["rows"]), dict(e["fields"])) for e in data["plans"]]
    except (KeyError, TypeError, ValueError) as error:
        _log.warning("plans in %s are not used: %s: %s", path, type(error).__name__, error)
        return shipped
    known = tuple(entry for entry in entries if _fits(entry, plans.get(entry.kernel)))
    if len(known) < len(entries):
        _log.warning("%d of %d plans in %s are for other kernels", len(entries) - len(known), len(entries), path)
    return PlanTable(device, known)


def _fits(entry: Entry, plan: type | None) -> bool:
    if plan is None:
        return False
    names = {f.name for f in dataclasses.fields(plan)}
    return entry.fields.keys() <= names and all(v is None or isinstance(v, int) for v in entry.fields.values())


def store_table(path: Path, table: PlanTable) -> None:
    """Write the table, at once whole. Raises ConfigError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".plans-")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(table.as_dict(), file, indent=1)
            file.write("\n")
        Path(name).replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write plans to {path}: {error.strerror or error}") from error
