"""Which points may share a curve.

A configuration's name is a person's word. Points under one name that were measured under other conditions (another
quantisation, load client, trace, price ...) get curves of their own, named by what differs: a curve through both would
show a trade-off that no system has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longturn.report.point import Point

_UNTOLD = frozenset(
    ("unknown", "unknown unknown", "unknown client", "as the model", "no preset", "no price", "no power")
)
"""Conditions that nobody has told. They keep points apart, and say nothing in a name."""


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    source: str
    points: tuple[int, ...]
    """Indices into the points that were grouped."""


def conditions(point: Point) -> dict[str, str]:
    """What points must share to be compared, as text. Layout, flags and concurrency are what a sweep varies."""
    platform, traces, speculation = point.platform, point.traces, point.speculation
    price, power = platform.price_per_chip_hour, platform.power_w_per_chip
    scale = "" if traces.scale_context == 1 else f", context × {traces.scale_context:g}"
    longest = "" if traces.max_context is None else f", at most {traces.max_context:,} tokens"
    return {
        "source": point.source,
        "engine": f"{point.engine.name} {point.engine.version}",
        "model": point.model.name,
        "quantisation": point.model.quantisation,
        "KV cache": point.model.kv_cache or "as the model",
        "chip": platform.chip,
        "traces": f"{traces.name}{scale}{longest}",
        "preset": traces.preset or "no preset",
        "load client": point.client or "unknown client",
        "speculation": ("no" if speculation.mode == "off" else speculation.mode) + " speculation",
        "price": "no price" if price is None else f"{price:g} {platform.currency} per chip-hour",
        "power": "no power" if power is None else f"{power:g} W per chip",
    }


def group(points: Sequence[Point]) -> list[Series]:
    """The points as curves, in the order in which each first appears."""
    keys = [tuple(conditions(point).values()) for point in points]
    groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for index, point in enumerate(points):
        groups.setdefault((point.configuration, keys[index]), []).append(index)
    series = []
    for (configuration, key), members in groups.items():
        others = [other for name, other in groups if name == configuration]
        differing = [
            value
            for column, value in enumerate(key)
            if value != "measured" and value not in _UNTOLD and any(other[column] != value for other in others)
        ]
        series.append(
            Series(
                name=" · ".join([configuration, *differing]),
                source=points[members[0]].source,
                points=tuple(sorted(members, key=lambda index: (points[index].concurrency, index))),
            )
        )
    return series


def differences(points: Sequence[Point]) -> dict[str, list[str]]:
    """Conditions that are not the same for all points, with their values: a reader sees them before any ratio."""
    values: dict[str, list[str]] = {}
    for point in points:
        for name, value in conditions(point).items():
            known = values.setdefault(name, [])
            if value not in known:
                known.append(value)
    return {name: known for name, known in values.items() if len(known) > 1}
