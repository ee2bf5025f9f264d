"""Frontiers of points and their ratios, as JSON and as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longturn.bench.cost import cost_per_million_tokens, tokens_per_joule
from longturn.bench.frontier import Frontier, Place, frontier_of, non_dominated, ratios, shared_range
from longturn.cli.terminal import table
from longturn.report.page import DASH, rate_text, seconds_text
from longturn.report.point import Platform, Point
from longturn.report.series import Series
from longturn.report.sweep import baseline_index

_LEVELS = 7
_LONGEST_NAME = 48
"""A longer name would make its table wider than a terminal."""


def comparison(
    points: Sequence[Point],
    series: Sequence[Series],
    statistic: str,
    baseline: str | None = None,
    at: Sequence[float] | None = None,
) -> dict[str, Any]:
    """Frontiers of total throughput per chip, and their ratios to the baseline's, as JSON has them.

    Args:
        points: all points.
        series: their curves.
        statistic: of ITL, as interactivity has it: `mean`, `p50` ... `p99`.
        baseline: a configuration or a curve; the first curve if None.
        at: interactivities, tokens per second; some over the shared range of each pair if None.

    Raises:
        ResultError: no such baseline.
    """
    frontiers: list[Frontier | None] = []
    shown = []
    platforms = [points[one.points[0]].platform for one in series]
    for one, platform in zip(series, platforms, strict=True):
        usable = [(index, pair) for index in one.points if (pair := _pair(points[index], statistic)) is not None]
        pairs = [pair for _, pair in usable]
        frontiers.append(frontier_of(pairs))
        members = [
            {
                "concurrency": points[usable[k][0]].concurrency,
                "interactivity": pairs[k][0],
                "total_tokens_per_s_per_chip": pairs[k][1],
                **_money_and_energy(platform, pairs[k][1]),
            }
            for k in non_dominated(pairs)
        ]
        invalid = sum(not points[index].validity.valid for index in one.points)
        shown.append({"name": one.name, "source": one.source, "invalid_points": invalid, "frontier": members})
    chosen = baseline_index(series, points, baseline)
    base = frontiers[chosen]
    compared = []
    for index, frontier in enumerate(frontiers):
        if index == chosen or frontier is None or base is None:
            continue
        for ratio in ratios(frontier, base, at or _levels([frontier, base])):
            compared.append(
                {
                    "name": series[index].name,
                    "interactivity": ratio.interactivity,
                    "total_tokens_per_s_per_chip": ratio.value.throughput,
                    "place": ratio.value.place.value,
                    "baseline_total_tokens_per_s_per_chip": ratio.baseline.throughput,
                    "baseline_place": ratio.baseline.place.value,
                    "ratio": ratio.ratio,
                    "clamped": ratio.clamped,
                    **({} if ratio.value.clamped else _money_and_energy(platforms[index], ratio.value.throughput)),
                }
            )
    return {"statistic": statistic, "baseline": series[chosen].name, "configurations": shown, "matched": compared}


def _money_and_energy(platform: Platform, throughput: float) -> dict[str, Any]:
    """What follows from a throughput where price and power are given. One curve has one of each."""
    figures: dict[str, Any] = {}
    if platform.price_per_chip_hour is not None:
        figures["cost_per_million_tokens"] = cost_per_million_tokens(throughput, platform.price_per_chip_hour)
        figures["currency"] = platform.currency
    if platform.power_w_per_chip:
        figures["tokens_per_joule"] = tokens_per_joule(throughput, platform.power_w_per_chip)
    return figures


def _pair(point: Point, statistic: str) -> tuple[float, float] | None:
    """(interactivity, total throughput) of a valid point that has both."""
    speeds, total = point.metrics.interactivity, point.metrics.total_tokens_per_s
    if not point.validity.valid or speeds is None or not total:
        return None
    speed: float = getattr(speeds, statistic)
    return (speed, total) if speed > 0 else None


def _levels(frontiers: Sequence[Frontier]) -> list[float]:
    """Interactivities spread evenly over what two frontiers share; the edges between them where they share nothing."""
    shared = shared_range(frontiers)
    if shared is None:
        return sorted({edge for frontier in frontiers for edge in frontier.range})
    low, high = shared
    return [low + (high - low) * step / (_LEVELS - 1) for step in range(_LEVELS)] if high > low else [low]


def comparison_text(points: Sequence[Point], series: Sequence[Series], compared: dict[str, Any]) -> str:
    """Every point, then the ratios of a `comparison`, as tables. Long names stand before them once, with a number."""
    statistic = compared["statistic"]
    names = [one.name for one in series]
    shown = {name: name for name in names}
    if any(len(name) > _LONGEST_NAME for name in names):
        shown = {name: f"[{number}]" for number, name in enumerate(names, 1)}
    head = ["configuration", "live", "tok/s/user", "tok/s/chip", "TTFT", "ITL", "E2E", "standing"]
    rows = []
    for one in series:
        for index in one.points:
            point = points[index]
            metrics = point.metrics
            spreads = (metrics.ttft_ms, metrics.itl_ms, metrics.e2e_ms)
            standing = point.source if point.validity.valid else "invalid"
            rows.append(
                [
                    shown[one.name],
                    str(point.concurrency),
                    rate_text(getattr(metrics.interactivity, statistic) if metrics.interactivity else None),
                    rate_text(metrics.total_tokens_per_s),
                    *(seconds_text(getattr(spread, statistic) if spread else None) for spread in spreads),
                    standing,
                ]
            )
    lines = [f"{number} {name}" for name, number in shown.items() if number != name]
    lines += [*([""] if lines else []), f"latencies and interactivity: {statistic}", "", table(head, rows)]
    if compared["matched"]:
        lines += ["", f"at matched interactivity, against {shown[compared['baseline']]}:", ""]
        cells = [
            [
                shown[item["name"]],
                rate_text(item["interactivity"]),
                _reached(item["total_tokens_per_s_per_chip"], item["place"]),
                _reached(item["baseline_total_tokens_per_s_per_chip"], item["baseline_place"]),
                DASH if item["clamped"] else f"{item['ratio']:.2f}×",
                f"{item['cost_per_million_tokens']:.3g} {item['currency']}" if "currency" in item else DASH,
                f"{item['tokens_per_joule']:.3g}" if "tokens_per_joule" in item else DASH,
            ]
            for item in compared["matched"]
        ]
        lines.append(
            table(
                ["configuration", "tok/s/user", "tok/s/chip", "baseline", "ratio", "per M tokens", "tokens/J"],
                cells,
            )
        )
    return "\n".join(lines)


def _reached(throughput: float, place: str) -> str:
    """A value of a frontier; outside its range what is known of it, which is no figure to compare with."""
    if place == Place.ABOVE.value:
        return "not reached"
    return f"≥ {rate_text(throughput)}" if place == Place.BELOW.value else rate_text(throughput)
