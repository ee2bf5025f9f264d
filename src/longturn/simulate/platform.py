"""Chips and the racks they come in: specifications with their sources, and the calibration of their kernels.

A platform is one TOML file. `[spec]` holds values per chip, each with unit, source and date, because launch figures,
shipping figures and third-party figures differ. `[calibration.<family>]` holds what was fitted (`longturn.simulate.fit`
writes it). Users give files of their own by path.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from longturn.errors import ConfigError
from longturn.simulate.calibration import KernelFamily, check_keys, read_family

_PLATFORMS = Path(__file__).parent / "platforms"

# Every specification, with its unit. Those in the second table may be absent.
_NEEDED: Mapping[str, str] = MappingProxyType(
    {
        "bf16_flops": "FLOP/s",
        "fp8_flops": "FLOP/s",
        "hbm_bytes": "B",
        "hbm_bandwidth": "B/s",
        "link_bandwidth": "B/s",
        "scale_up_chips": "chips",
        "host_link_bandwidth": "B/s",
        "host_memory_bytes": "B",
        "sms": "SMs",
    }
)
_OPTIONAL: Mapping[str, str] = MappingProxyType(
    {
        "nvfp4_flops": "FLOP/s",
        "shared_memory_bytes": "B",
        "locality_domains": "domains",
        "locality_sms": "SMs",
        "locality_plain_bandwidth": "B/s",
        "locality_placed_bandwidth": "B/s",
        "sustained_compute": "share",
        "power": "W",
        "owning_price": "USD/h",
        "rental_price": "USD/h",
    }
)
_WHOLE = frozenset({"chips", "SMs", "domains"})
WeightRate = Literal["bf16", "fp8", "nvfp4"]


@dataclass(frozen=True, slots=True)
class Quantity:
    """A value per chip, with where it comes from."""

    value: float
    unit: str
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class Platform:
    """One kind of chip in one kind of machine."""

    name: str
    title: str
    spec: Mapping[str, Quantity]
    families: Mapping[str, KernelFamily]
    default_family: str

    def value(self, key: str) -> float:
        """A specification.

        Raises:
            ConfigError: the platform file does not state it.
        """
        if key not in self.spec:
            raise ConfigError(f"platform {self.name}: no {key} is known")
        return self.spec[key].value

    def flops(self, rate: str) -> float:
        """Dense peak in FLOP/s of multiplications in `rate` (bf16, fp8, nvfp4)."""
        return self.value(f"{rate}_flops")

    def family(self, name: str | None = None) -> KernelFamily:
        """A kernel family by name; the default one for None.

        Raises:
            ConfigError: the platform has no calibration of that family.
        """
        name = self.default_family if name is None else name
        if name not in self.families:
            known = ", ".join(sorted(self.families))
            raise ConfigError(f"platform {self.name}: no calibration of kernel family '{name}' (known: {known})")
        return self.families[name]

    def scaled(self, **factors: float) -> Platform:
        """The same platform with some specifications multiplied: for what-ifs and tests.

        Raises:
            ConfigError: there is no such specification.
        """
        spec = dict(self.spec)
        for key, factor in factors.items():
            old = spec.get(key)
            if old is None:
                raise ConfigError(f"platform {self.name}: no {key} is known")
            spec[key] = Quantity(old.value * factor, old.unit, f"{old.source}, times {factor:g}", old.date)
        return Platform(self.name, self.title, MappingProxyType(spec), self.families, self.default_family)


def platform_names() -> tuple[str, ...]:
    """Names of the platforms that ship with Longturn."""
    return tuple(sorted(path.stem for path in _PLATFORMS.glob("*.toml")))


def platform_path(name: str) -> Path:
    """The file of a platform: one that ships, or a path that a user gives.

    Raises:
        ConfigError: there is no such platform and no such file.
    """
    path = _PLATFORMS / f"{name}.toml"
    if not path.is_file():
        path = Path(name)
        if not path.is_file():
            raise ConfigError(f"unknown platform '{name}' (a .toml file, or one of: {', '.join(platform_names())})")
    return path


def load_platform(name: str) -> Platform:
    """Read a platform by name, or from a file.

    Raises:
        ConfigError: the file is missing or damaged, or has an unknown key, a missing one or an impossible value; the
            line names the file and the key.
    """
    path = platform_path(name)
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"platform {path}: cannot be read as TOML ({error})") from None
    return read_platform(data, path.stem, str(path.name if path.parent == _PLATFORMS else path))


def read_platform(data: Mapping[str, Any], name: str, where: str) -> Platform:
    """A platform from the contents of its file. Raises ConfigError as `load_platform`."""
    known = ("title", "default_family", "spec", "calibration")
    check_keys(data, known, known, where)
    if not isinstance(data["title"], str) or not data["title"].strip():
        raise ConfigError(f"{where}: title must be a text that is not empty")
    spec = _read_spec(data["spec"], f"{where}: spec")
    if not isinstance(data["calibration"], Mapping) or not data["calibration"]:
        raise ConfigError(f"{where}: calibration must hold at least one kernel family")
    families = {
        family: read_family(part, family, f"{where}: calibration.{family}")
        for family, part in data["calibration"].items()
    }
    if data["default_family"] not in families:
        raise ConfigError(f"{where}: default_family '{data['default_family']}' has no calibration")
    return Platform(name, data["title"], spec, MappingProxyType(families), data["default_family"])


def load_spec(path: Path) -> Platform:
    """A platform without its calibration, which may be missing: what a fit starts from. Raises ConfigError."""
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"platform {path}: cannot be read as TOML ({error})") from None
    known = ("title", "default_family", "spec", "calibration")
    check_keys(data, known, known[:3], str(path))
    spec = _read_spec(data["spec"], f"{path}: spec")
    return Platform(path.stem, str(data["title"]), spec, MappingProxyType({}), str(data["default_family"]))


def _read_spec(data: Any, where: str) -> Mapping[str, Quantity]:
    units = {**_NEEDED, **_OPTIONAL}
    check_keys(data, tuple(units), tuple(_NEEDED), where)
    return MappingProxyType({key: _quantity(value, units[key], f"{where}.{key}") for key, value in data.items()})


def _quantity(data: Any, unit: str, where: str) -> Quantity:
    names = ("value", "unit", "source", "date")
    check_keys(data, names, names, where)
    value = data["value"]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e20:
        raise ConfigError(f"{where}.value must be a number above 0, not {value!r}")
    if unit in _WHOLE and value != int(value):
        raise ConfigError(f"{where}.value must be a whole number, not {value!r}")
    if data["unit"] != unit:
        raise ConfigError(f"{where}.unit must be '{unit}', not {data['unit']!r}")
    for key in ("source", "date"):
        if not isinstance(data[key], str) or not data[key].strip():
            raise ConfigError(f"{where}.{key} must be a text that is not empty")
    return Quantity(float(value), unit, data["source"], data["date"])
