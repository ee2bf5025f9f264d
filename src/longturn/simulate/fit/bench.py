"""A platform file of a user's own card, from what `longturn bench step` measured there.

Its decode steps become a kernel family beside those of a platform that ships, which lends specifications, chunks and
collectives.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from longturn.errors import ConfigError
from longturn.simulate.calibration import KernelFamily, Residual
from longturn.simulate.cost.step import step_shape
from longturn.simulate.fit.emit import MARKER, family_toml
from longturn.simulate.fit.measured import MeasuredStep, fit_measured
from longturn.simulate.formats import formats_named
from longturn.simulate.layout import parse_layout
from longturn.simulate.platform import load_platform, platform_path
from longturn.simulate.shapes import load_shape

FAMILY = "measured"
SMALL_KERNEL_NS = 900.0
"""Least time of a kernel in a captured graph, as for Longturn's own kernels on an H200."""
_PRESETS = {"mini60": "m3-mini60", "slice8": "m3-slice8"}
"""Presets of `bench step` whose formats (bf16) and shapes the fit knows."""
_DECODE = re.compile(r"decode:([1-9]\d*)x([1-9]\d*)")


def bench_steps(paths: Sequence[Path]) -> list[MeasuredStep]:
    """The decode steps in files that `longturn bench step --out` wrote.

    Raises:
        ConfigError: a file cannot be read, is something else, or has a preset that cannot be fitted.
    """
    found = []
    for path in paths:
        try:
            rows = json.loads(path.read_text())["points"]
            steps = [(str(row["preset"]), match, float(row["value"])) for row in rows
                     if (match := _DECODE.fullmatch(row["point"])) is not None]  # fmt: skip
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path}: is not what `longturn bench step --out` writes") from None
        for preset, match, value_ms in steps:
            if preset not in _PRESETS:
                raise ConfigError(f"{path}: preset '{preset}' cannot be fitted (known: {', '.join(_PRESETS)})")
            if not 0 < value_ms < 1e6:
                raise ConfigError(f"{path}: {match[0]} took {value_ms} ms")
            shape = load_shape(_PRESETS[preset])
            step = step_shape([int(match[2])] * int(match[1]), attend_limit=shape.attend_limit)
            found.append(MeasuredStep(shape, parse_layout("tp1"), step, value_ms * 1e6))
    return found


def fitted_platform(name: str, steps: Sequence[MeasuredStep], date: str) -> tuple[str, Residual]:
    """The file of platform `name` with a kernel family fitted to `steps`, its default there, and how well it fits.

    Raises:
        ConfigError: no such platform, too few steps, or no constants that the rest can be borrowed from.
    """
    path = platform_path(name)
    platform = load_platform(name)
    source = f"longturn bench step, {len(steps)} decode steps"
    formats = formats_named("bf16")
    base = platform.family()
    family = fit_measured(platform, base, FAMILY, formats, steps, source, date, SMALL_KERNEL_NS)
    head, marker, _ = path.read_text().partition(MARKER)
    if not marker:
        raise ConfigError(f"platform {path}: no line '{MARKER}', below which a calibration could be written")
    head = re.sub(r"(?m)^default_family = .*$", f'default_family = "{FAMILY}"', head)
    families: list[KernelFamily] = [family, *(one for key, one in platform.families.items() if key != FAMILY)]
    text = head + MARKER + "\n\n" + "\n".join(map(family_toml, families))
    return text, family.attention["bf16-bf16"].decode
