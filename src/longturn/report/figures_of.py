"""Figures of a point by name, for comparing points: `total`, `ttft.p50`, `interactivity.p90` ..."""

from __future__ import annotations

from dataclasses import dataclass

from longturn.report.point import Measured, Point, Speeds, Spread
from longturn.report.schema import ResultError

_STATISTICS = ("mean", "p50", "p75", "p90", "p95", "p99")
_RATES = {"total": "total_tokens_per_s", "input": "input_tokens_per_s", "output": "output_tokens_per_s"}
_TIMES = {"ttft": "TTFT", "itl": "ITL", "e2e": "end to end", "job": "job time"}
_HIT_RATE = "hit_rate"
_INTERACTIVITY = "interactivity"


@dataclass(frozen=True, slots=True)
class FigureKind:
    """A figure that can be asked for."""

    name: str
    title: str
    unit: str
    """`tok/s`, `ms`, or empty for a share."""
    higher_is_better: bool


def figure_kind(name: str) -> FigureKind:
    """What a name stands for.

    Raises:
        ResultError: no figure has that name.
    """
    base, _, statistic = name.partition(".")
    if name in _RATES:
        return FigureKind(name, f"{name} throughput per chip", "tok/s", True)
    if name == _HIT_RATE:
        return FigureKind(name, "cache hit rate", "", True)
    if base == _INTERACTIVITY and statistic in _STATISTICS:
        return FigureKind(name, f"{statistic} interactivity", "tok/s", True)
    if base in _TIMES and statistic in _STATISTICS:
        return FigureKind(name, f"{statistic} {_TIMES[base]}", "ms", False)
    raise ResultError(
        f"no figure '{name}' (there are: {', '.join([*_RATES, _HIT_RATE])}, and {', '.join([_INTERACTIVITY, *_TIMES])} "
        f"with one of {', '.join(_STATISTICS)}, such as ttft.p50)"
    )


def figure_of(point: Point, kind: FigureKind) -> float | None:
    """The figure, in its unit; None where the point lacks it."""
    metrics, (base, _, statistic) = point.metrics, kind.name.partition(".")
    if kind.name in _RATES:
        rate: float | None = getattr(metrics, _RATES[kind.name])
        return rate
    if kind.name == _HIT_RATE:
        return metrics.hit_rate
    spread = metrics.interactivity if base == _INTERACTIVITY else _times(metrics, base)
    value: float | None = None if spread is None else getattr(spread, statistic)
    return value


def _times(metrics: Measured, base: str) -> Spread | Speeds | None:
    if base == "job":
        return metrics.jobs.time_ms if metrics.jobs else None
    spread: Spread | None = getattr(metrics, f"{base}_ms")
    return spread
