"""A platform file of a user's own card, from what `longturn bench step` measured there.

Its steps become a kernel family beside those of a platform that ships, which lends specifications, collectives, and
what whole steps cannot show.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longturn.errors import ConfigError
from longturn.simulate.calibration import KernelFamily, Residual
from longturn.simulate.cost.step import StepShape, step_shape
from longturn.simulate.fit.chunks import FEWEST_CHUNKS, MeasuredChunks, fit_chunks
from longturn.simulate.fit.emit import MARKER, family_toml
from longturn.simulate.fit.measured import MeasuredStep, fit_measured
from longturn.simulate.formats import formats_named
from longturn.simulate.layout import parse_layout
from longturn.simulate.platform import load_platform, platform_path
from longturn.simulate.published import prefill_steps
from longturn.simulate.shapes import ModelShape, load_shape

FAMILY = "measured"
LENDER = "longturn"
"""Whose kernels `bench step` runs: this family lends the rest where the platform has it."""
SMALL_KERNEL_NS = 900.0
"""Least time of a kernel in a captured graph, as for Longturn's own kernels on an H200."""
_PRESETS = {"mini60": "m3-mini60", "slice8": "m3-slice8"}
"""Presets of `bench step` whose formats (bf16) and shapes the fit knows."""
_POINT = re.compile(r"(decode|turn|mixed|prefill):([1-9]\d*)x([1-9]\d*)(?:\+([1-9]\d*))?")
_STEP_TOKENS = 8192
"""Most tokens of a step of `bench step`, if its command does not say."""


@dataclass(frozen=True, slots=True)
class BenchSteps:
    """What the files hold."""

    decode: tuple[MeasuredStep, ...]
    chunks: tuple[MeasuredChunks, ...]
    """Turns, mixed steps and prompts."""


@dataclass(frozen=True, slots=True)
class FittedPlatform:
    """A platform file, and how well it fits."""

    text: str
    decode: Residual
    chunks: Residual | None
    """None if there were too few of them: their constants are borrowed."""


def bench_steps(paths: Sequence[Path]) -> BenchSteps:
    """The steps in files that `longturn bench step --out` wrote; first tokens and starts are left out.

    Raises:
        ConfigError: a file cannot be read, is something else, or has steps that cannot be fitted.
    """
    decode: list[MeasuredStep] = []
    chunks: list[MeasuredChunks] = []
    for path in paths:
        try:
            data = json.loads(path.read_text())
            rows = [(str(row["preset"]), match, _value(row, match[1])) for row in data["points"]
                    if (match := _POINT.fullmatch(row["point"])) is not None]  # fmt: skip
            command = [str(word) for word in data.get("command", [])]
            step_tokens = int(command[command.index("--step-tokens") + 1]) if "--step-tokens" in command else None
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from None
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise ConfigError(f"{path}: is not what `longturn bench step --out` writes") from None
        if "--experts" in command:
            raise ConfigError(f"{path}: steps that choose among fewer experts (--experts) cannot be fitted")
        for preset, match, value in rows:
            if preset not in _PRESETS:
                raise ConfigError(f"{path}: preset '{preset}' cannot be fitted (known: {', '.join(_PRESETS)})")
            if not 0 < value < 1e9:
                raise ConfigError(f"{path}: {match[0]} took {value} {'tok/s' if match[1] == 'prefill' else 'ms'}")
            shape = load_shape(_PRESETS[preset])
            rows_, context, new = int(match[2]), int(match[3]), int(match[4] or 0)
            if match[1] == "decode":
                step = step_shape([context] * rows_, attend_limit=shape.attend_limit)
                decode.append(MeasuredStep(shape, parse_layout("tp1"), step, value * 1e6))
            else:
                ns = rows_ * context / value * 1e9 if match[1] == "prefill" else value * 1e6
                steps = _chunked(match[1], shape, rows_, context, new, step_tokens or _STEP_TOKENS)
                chunks.append(MeasuredChunks(shape, parse_layout("tp1"), steps, ns))
    return BenchSteps(tuple(decode), tuple(chunks))


def _value(row: dict[str, Any], kind: str) -> float:
    """A point's figure: of a turn the device's time if it is there, since the rest is the request's own on the host."""
    device = row.get("device_ms") if kind == "turn" else None
    return float(row["value"] if device is None else device)


def _chunked(
    kind: str, shape: ModelShape, rows: int, context: int, new: int, step_tokens: int
) -> tuple[StepShape, ...]:
    """The steps of a turn, a mixed step or prompts."""
    if kind == "prefill":
        return prefill_steps(context, step_tokens, rows)
    contexts = [context] * rows if kind == "mixed" else []
    return (step_shape(contexts, [(context, new)], attend_limit=shape.attend_limit, chunk_samples=1),)


def fitted_platform(name: str, steps: BenchSteps, date: str) -> FittedPlatform:
    """The file of platform `name` with a kernel family fitted to `steps`, its default there.

    Raises:
        ConfigError: no such platform, too few decode steps, or no constants that the rest can be borrowed from.
    """
    path = platform_path(name)
    platform = load_platform(name)
    source = f"longturn bench step, {len(steps.decode)} decode steps, {len(steps.chunks)} with chunks"
    formats = formats_named("bf16")
    base = platform.family(LENDER if LENDER in platform.families else None)
    family = fit_measured(platform, base, FAMILY, formats, steps.decode, source, date, SMALL_KERNEL_NS)
    chunks = None
    if len(steps.chunks) >= FEWEST_CHUNKS:
        note = f"{len(steps.decode)} decode steps, {len(steps.chunks)} with chunks; the rest as in {base.name}"
        family = fit_chunks(platform, family, formats, steps.chunks, note)
        chunks = family.attention["bf16-bf16"].prefill
    head, marker, _ = path.read_text().partition(MARKER)
    if not marker:
        raise ConfigError(f"platform {path}: no line '{MARKER}', below which a calibration could be written")
    head = re.sub(r"(?m)^default_family = .*$", f'default_family = "{FAMILY}"', head)
    families: list[KernelFamily] = [family, *(one for key, one in platform.families.items() if key != FAMILY)]
    text = head + MARKER + "\n\n" + "\n".join(map(family_toml, families))
    return FittedPlatform(text, family.attention["bf16-bf16"].decode, chunks)
