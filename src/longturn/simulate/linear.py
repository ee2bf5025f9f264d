"""A platform known only by its steps: a file of a few constants that were fitted to measured steps of one model on one
machine, a CPU for example. Nothing in it says why a step takes its time.

    step = host + fixed + rows * row + contexts * context + [chunks: chunk + tokens * chunk token + pairs * pair]

`contexts` is the sum of the decode rows' contexts, `pairs` the pairs of a chunk's token and a position it attends to.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from longturn.config import Range
from longturn.engine.protocols import ExecutorInfo
from longturn.errors import ConfigError
from longturn.simulate.calibration import check_keys, read_record
from longturn.simulate.cost.formulas import pairs
from longturn.simulate.cost.step import StepShape
from longturn.simulate.deployment import scheduler_settings
from longturn.simulate.pricing import StepModel
from longturn.simulate.replicas import EngineSpec

_Ns = Annotated[float, Range(0)]


@dataclass(frozen=True, slots=True)
class StepConstants:
    """Nanoseconds, and how well they fit."""

    fixed_ns: _Ns
    row_ns: _Ns
    context_ns: _Ns
    """Per position that a decode row attends to."""
    chunk_ns: _Ns
    """Per step with chunks."""
    chunk_token_ns: _Ns
    pair_ns: _Ns
    host_ns: _Ns
    """From a step's end to the next one's begin, run-ahead or not."""
    request_ns: _Ns
    """From a client's send to the engine and from its results back, per request."""
    rms: _Ns
    """Relative, of the fit."""
    worst: _Ns
    steps: Annotated[int, Range(1)]
    """Measured steps that were fitted."""
    run: _Ns = 0.0
    """By how much, relative, tokens of a measured run came later or sooner than such steps alone say; 0 if no run was
    given. It joins `rms` in the band: a run has clients and neighbours beside it."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The engine that was measured."""

    name: str
    quantisation: str
    kv_cache: str
    pages: Annotated[int, Range(2)]
    page_bytes: Annotated[int, Range(1)]
    rows: Annotated[int, Range(1)]
    max_context_tokens: Annotated[int, Range(2)]
    vocab_size: Annotated[int, Range(2)]


@dataclass(frozen=True, slots=True)
class StepsPlatform:
    """One model on one machine."""

    name: str
    title: str
    chip: str
    source: str
    date: str
    model: ServedModel
    constants: StepConstants
    settings: Mapping[str, Any]
    """The scheduler's and cache's settings of the engine that was measured, by dotted name."""


class LinearModel:
    """Implements `pricing.StepModel`."""

    tokens_per_row = 1
    attend_limit = 0

    def __init__(self, constants: StepConstants) -> None:
        self._of = constants

    def step_ns(self, step: StepShape) -> int:
        return round(sum(self.parts_ns(step).values()))

    def exposed_ns(self, step: StepShape) -> int:
        return round(self._of.host_ns)

    def parts_ns(self, step: StepShape) -> Mapping[str, float]:
        one = self._of
        parts = {
            "host": one.host_ns,
            "fixed": one.fixed_ns,
            "rows": step.rows * one.row_ns,
            "contexts": step.context_tokens * one.context_ns,
        }
        if step.chunks:
            scored = sum(pairs(float(start + count)) - pairs(float(start)) for start, count in step.chunks)
            parts["chunks"] = one.chunk_ns + step.chunk_tokens * one.chunk_token_ns + scored * one.pair_ns
        return parts

    def band(self, step: StepShape) -> float:
        return self._of.rms + self._of.run


def linear_spec(platform: StepsPlatform, settings: Mapping[str, Any], *, scale: float = 1.0) -> EngineSpec:
    """The engine that was measured, with some settings changed. Raises ConfigError for settings that cannot be."""
    scheduler, cache = scheduler_settings({**platform.settings, **settings}, {})
    served = platform.model
    info = ExecutorInfo(
        rows=served.rows,
        pages=served.pages,
        page_bytes=served.page_bytes,
        max_context_tokens=served.max_context_tokens,
        vocab_size=served.vocab_size,
        device=f"{platform.chip}, simulated",
    )
    model: StepModel = LinearModel(platform.constants)
    return EngineSpec(info=info, model=model, scheduler=scheduler, cache=cache, engines=1, scale=scale)


def is_steps_platform(path: Path) -> bool:
    """Whether a platform file is of this kind: it has fitted steps and no kernels."""
    try:
        return "steps" in tomllib.loads(path.read_text())
    except (OSError, ValueError):
        return False


def load_steps_platform(path: Path) -> StepsPlatform:
    """Read a file that `steps_platform_text` wrote.

    Raises:
        ConfigError: it cannot be read, or a key is unknown, missing or out of range; the line names file and key.
    """
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"platform {path}: cannot be read as TOML ({error})") from None
    known = ("title", "chip", "source", "date", "model", "steps", "settings")
    check_keys(data, known, known, str(path))
    for key in known[:4]:
        if not isinstance(data[key], str) or not data[key].strip():
            raise ConfigError(f"{path}: {key} must be a text that is not empty")
    settings = data["settings"]
    if not isinstance(settings, Mapping):
        raise ConfigError(f"{path}: settings must be a table")
    return StepsPlatform(
        name=path.stem,
        title=data["title"],
        chip=data["chip"],
        source=data["source"],
        date=data["date"],
        model=read_record(ServedModel, data["model"], f"{path}: model"),
        constants=read_record(StepConstants, data["steps"], f"{path}: steps"),
        settings=dict(settings),
    )


def steps_platform_text(platform: StepsPlatform) -> str:
    """The file of a platform, TOML."""
    lines = [f"{key} = {_text(getattr(platform, key))}" for key in ("title", "chip", "source", "date")]
    lines += ["", "[model]", *(f"{key} = {_value(value)}" for key, value in asdict(platform.model).items())]
    lines += ["", "# Nanoseconds; rms and worst are relative."]
    constants = platform.constants
    lines += ["[steps]", *(f"{one.name} = {_value(getattr(constants, one.name))}" for one in fields(constants))]
    lines += ["", "[settings]", *(f'"{key}" = {_value(value)}' for key, value in sorted(platform.settings.items()))]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(float(f"{value:.6g}"))
    return _text(value) if isinstance(value, str) else str(value)


def _text(value: str) -> str:
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") + '"'
