"""The record of an explanation: which switches lie between two configurations, and what each does to each figure."""

from __future__ import annotations

from typing import Literal

import msgspec

from longturn.report.schema import Environment, RecordFile

EXPLANATION_KIND = "longturn-explanation"
EXPLANATION_VERSION = 1


class EffectFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One ratio."""

    ratio: float
    margin: float | None
    """Half of the 95 % interval of the ratio's natural logarithm; None if no configuration ran twice."""
    share: float | None
    """Part of the whole logarithm; None where the whole is not told from noise."""
    verdict: Literal["real", "noise", "unknown"]


class SwitchFigures(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What one switch does to one figure. None where a run that it needs is missing."""

    name: str
    on_alone: EffectFigures | None
    """A with the switch, over A."""
    off_alone: EffectFigures | None
    """B over B without the switch."""
    in_sequence: EffectFigures | None
    """What it adds when the switches are thrown in this order."""
    mean_of_orders: EffectFigures | None
    """Mean over all orders; None unless every combination was measured."""


class FigureExplanation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How the ratio of one figure comes about."""

    figure: str
    title: str
    unit: str
    higher_is_better: bool
    a: float
    b: float
    """Geometric means of the runs of A and B."""
    total: EffectFigures
    switches: tuple[SwitchFigures, ...]
    interaction: EffectFigures | None
    """The whole over the product of the effects on alone: 1 where the switches do not touch one another."""
    run_spread: float | None
    """Standard deviation of one run around its configuration's mean, as a share of the figure."""
    degrees_of_freedom: int


class SwitchValues(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One switch: its settings in A and in B."""

    name: str
    off: dict[str, str]
    on: dict[str, str]


class ConfigurationRuns(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One combination of switches and what was measured with it."""

    on: tuple[str, ...]
    points: tuple[str, ...]
    """Files, one a run."""
    figures: dict[str, tuple[float, ...]]
    valid: bool
    """All its points are; an explanation of invalid points says so."""


class Explanation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    created: str
    """UTC, ISO 8601."""
    command: str
    """What a reader types to measure it again."""
    load: str
    """What every configuration was measured with."""
    model: str
    a: str
    b: str
    """The configurations in words."""
    switches: tuple[SwitchValues, ...]
    """In the order of the sequence."""
    runs: tuple[ConfigurationRuns, ...]
    figures: tuple[FigureExplanation, ...]
    environment: Environment | None
    kind: str = EXPLANATION_KIND
    version: int = EXPLANATION_VERSION


_FILE = RecordFile(Explanation, EXPLANATION_KIND, EXPLANATION_VERSION)
explanation_to_json, explanation_from_json = _FILE.to_json, _FILE.from_json
save_explanation, load_explanation = _FILE.save, _FILE.load
