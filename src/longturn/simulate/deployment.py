"""From a platform, a model and a layout to simulated engines: replicas, pages, rows, settings."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from longturn.config import CacheConfig, SchedulerConfig, config_from_dict
from longturn.engine.protocols import ExecutorInfo
from longturn.errors import ConfigError
from longturn.simulate.acceptance import Acceptance
from longturn.simulate.cost.memory import MEMORY_SHARE, chip_memory, transfer_ns
from longturn.simulate.cost.model import StepCost
from longturn.simulate.cost.options import CostOptions
from longturn.simulate.formats import Formats
from longturn.simulate.layout import Layout, parse_layout
from longturn.simulate.platform import Platform
from longturn.simulate.pricing import PlatformModel
from longturn.simulate.replicas import EngineSpec
from longturn.simulate.shapes import ModelShape

SCHEDULER: Mapping[str, Any] = {
    "max_running": 256,
    "step_tokens": 8192,
    "target_itl_ms": 0.0,
    "max_waiting": 4096,
}
"""Settings for accelerators, where those of `SchedulerConfig` are for a CPU: published recipes compute 8,192 to 16,384
tokens a step and 256 requests or more, and aim at no time for a step."""
COPIED_TOGETHER = 16
"""Pages that share the fixed time of a copy, as the executor groups them."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """Some replicas of one layout."""

    replicas: int
    layout: Layout

    @property
    def chips(self) -> int:
        return self.replicas * self.layout.chips

    @property
    def name(self) -> str:
        return self.layout.name if self.replicas == 1 else f"dp{self.replicas}{self.layout.name}"


def parse_deployment(text: str) -> Deployment:
    """A layout as `parse_layout` reads it, for one replica; with `dp2` before it for two behind a router. `dp2` alone
    is two replicas of one chip.

    Raises:
        ConfigError: anything else.
    """
    match = re.fullmatch(r"dp([1-9]\d{0,3})(.*)", text)
    if match is None:
        return Deployment(1, parse_layout(text))
    return Deployment(int(match[1]), parse_layout(match[2] or "tp1"))


@dataclass(frozen=True, slots=True)
class Target:
    """What is simulated, beside how it lies on chips."""

    platform: Platform
    shape: ModelShape
    formats: Formats
    options: CostOptions
    settings: Mapping[str, Any] = field(default_factory=dict)
    """`scheduler` and `cache` settings as `longturn serve` has them, by dotted name."""
    host_bytes: int = 0
    """Host memory for each chip's pages; 0: no second tier."""
    memory_share: float = MEMORY_SHARE
    acceptance: Acceptance = field(default_factory=Acceptance)
    """Of the drafter in `options`."""


def scheduler_settings(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> tuple[SchedulerConfig, CacheConfig]:
    """The engine's settings.

    Args:
        settings: dotted names and values.
        defaults: of the scheduler, where they are not `SchedulerConfig`'s.

    Raises:
        ConfigError: an unknown name, or a value out of range.
    """
    parts: dict[str, dict[str, Any]] = {"scheduler": dict(defaults), "cache": {}}
    for name, value in settings.items():
        section, _, key = name.partition(".")
        if section not in parts or not key:
            raise ConfigError(f"--set {name}: a simulation has the settings scheduler.* and cache.* only")
        if name in ("cache.memory_bytes", "cache.dtype"):
            raise ConfigError(f"--set {name}: a simulated cache is what platform, layout and formats leave for it")
        parts[section][key] = value
    return (
        config_from_dict(SchedulerConfig, parts["scheduler"], where="scheduler."),
        config_from_dict(CacheConfig, parts["cache"], where="cache."),
    )


def engine_spec(target: Target, deployment: Deployment, *, scale: float = 1.0) -> EngineSpec:
    """Engines of a deployment on a platform.

    Args:
        target: see there.
        deployment: see there.
        scale: all steps take this many times as long.

    Raises:
        ConfigError: the layout cannot hold the model or does not fit (by how much is in the line), no constants for
            the formats, or a setting out of range.
    """
    layout, options = deployment.layout, target.options
    scheduler, cache = scheduler_settings(target.settings, SCHEDULER)
    if not scheduler.run_ahead:
        options = dataclasses.replace(options, host=dataclasses.replace(options.host, overlap=False))
    cost = StepCost(target.platform, target.shape, layout, target.formats, options)
    memory = chip_memory(
        target.platform, target.shape, layout, target.formats, options.drafter, share=target.memory_share
    )
    there = target.platform.value("host_memory_bytes")
    if target.host_bytes > there:
        raise ConfigError(
            f"platform {target.platform.name} has {there / 1e9:.0f} GB of host memory a chip, "
            f"{target.host_bytes / 1e9:.0f} GB are asked for"
        )
    info = ExecutorInfo(
        rows=scheduler.max_running,
        pages=memory.pages,
        page_bytes=memory.page_bytes,
        max_context_tokens=target.shape.max_context,
        vocab_size=target.shape.vocab,
        device=f"{layout.chips} x {target.platform.name}, simulated",
        copies_pages=True,
        host_pages=target.host_bytes // memory.page_bytes,
    )
    # The setting is a time between tokens, and a verified step brings several.
    target_itl_ms = scheduler.target_itl_ms * target.acceptance.mean
    return EngineSpec(
        info=info,
        model=PlatformModel(cost),
        scheduler=dataclasses.replace(scheduler, target_itl_ms=target_itl_ms),
        cache=cache,
        engines=deployment.replicas * layout.attention_dp,
        lockstep=layout.attention_dp,
        copy_ns=transfer_ns(target.platform, memory.page_bytes, COPIED_TOGETHER) // COPIED_TOGETHER,
        acceptance=target.acceptance,
        scale=scale,
    )
