"""The rules of a replay of session trees, as named presets.

`agentx` has the values that InferenceX's continuous integration passes, `agentx-mvp` those of the scenario
`inferencex-agentx-mvp` by default: results of one are not comparable with results of the other. `quick` is for minutes
and for small machines, and comparable with neither.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from longturn.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rules:
    """How session trees are replayed. What is None does not limit."""

    preset: str
    duration_s: float
    """Nothing is sent after it."""
    least_duration_s: float
    """A shorter measurement is not comparable."""
    window: tuple[float, float]
    """Where the first session of a lane may start: the start point t* is drawn between these shares of the time from
    its first request to its last."""
    seed: int | None
    """None: drawn anew for each run, and written into the result."""
    warmup_requests: int
    """Requests before t* that each lane sends with one output token, beyond the last one of each live agent."""
    warmup_grace_s: float | None
    """Longest time for the whole warm-up."""
    tree_idle_s: float | None
    """A session with nothing in flight has all its timers moved so that it sends again after this time."""
    system_idle_s: float | None
    """The same for all sessions together."""
    error_limit: float | None
    """Share of failed requests above which the run is stopped and invalid."""
    drain_s: float
    """Longest time for requests in flight at the end."""
    comparable: bool
    """Whether others publish results under these rules."""


PRESETS: tuple[Rules, ...] = (
    Rules(
        preset="agentx",
        duration_s=3600.0,
        least_duration_s=3600.0,
        window=(0.25, 0.75),
        seed=42,
        warmup_requests=10,
        warmup_grace_s=1800.0,
        tree_idle_s=300.0,
        system_idle_s=10.0,
        error_limit=0.10,
        drain_s=300.0,
        comparable=True,
    ),
    Rules(
        preset="agentx-mvp",
        duration_s=1800.0,
        least_duration_s=900.0,
        window=(0.0, 1.0),
        seed=None,
        warmup_requests=0,
        warmup_grace_s=None,
        tree_idle_s=None,
        system_idle_s=10.0,
        error_limit=None,
        drain_s=300.0,
        comparable=True,
    ),
    Rules(
        preset="quick",
        duration_s=120.0,
        least_duration_s=0.0,
        window=(0.25, 0.75),
        seed=42,
        warmup_requests=0,
        warmup_grace_s=300.0,
        tree_idle_s=2.0,
        system_idle_s=0.5,
        error_limit=0.10,
        drain_s=60.0,
        comparable=False,
    ),
)


def rules_of(preset: str, duration_s: float | None = None) -> Rules:
    """A preset's rules, with another duration if one is given.

    Raises:
        ConfigError: there is no such preset, or the duration is not above 0.
    """
    for rules in PRESETS:
        if rules.preset == preset:
            break
    else:
        raise ConfigError(f"unknown preset '{preset}' (known: {', '.join(rules.preset for rules in PRESETS)})")
    if duration_s is None:
        return rules
    if not 0 < duration_s < float("inf"):
        raise ConfigError(f"--duration must be more than 0, not {duration_s}")
    return dataclasses.replace(rules, duration_s=duration_s)
