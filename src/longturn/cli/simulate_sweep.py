"""What a sweep found: the frontier over all layouts, and the best one at given interactivities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longturn.bench.frontier import frontier_of
from longturn.cli.simulate_run import figures_pair, frontier_indices
from longturn.cli.terminal import table
from longturn.report.page import rate_text, seconds_text
from longturn.report.point import Point


def winners(points: Sequence[Point], at: Sequence[float]) -> list[dict[str, Any]]:
    """For each interactivity (P90, tok/s) the configuration with the most throughput per chip there.

    A configuration counts where its own frontier reaches that interactivity; between its points it is interpolated.
    """
    groups: dict[str, list[tuple[float, float]]] = {}
    for point in points:
        if (pair := figures_pair(point)) is not None:
            groups.setdefault(point.configuration, []).append(pair)
    frontiers = {name: frontier for name, pairs in groups.items() if (frontier := frontier_of(pairs)) is not None}
    found = []
    for wanted in at:
        # A slower point serves as well: whoever is faster than asked for is fast enough.
        able = {name: one.at(wanted).throughput for name, one in frontiers.items() if wanted <= one.range[1]}
        order = sorted(able, key=lambda name: (-able[name], name))
        found.append(
            {
                "interactivity": wanted,
                "configuration": order[0] if order else None,
                "total_tokens_per_s_per_chip": able[order[0]] if order else None,
                "next": order[1] if len(order) > 1 else None,
                "ahead": able[order[0]] / able[order[1]] if len(order) > 1 else None,
            }
        )
    return found


def sweep_text(points: list[Point], best: Sequence[dict[str, Any]]) -> str:
    """The frontier of all points, and the winners."""
    rows = []
    for index in frontier_indices(points):
        point = points[index]
        speeds, ttft = point.metrics.interactivity, point.metrics.ttft_ms
        rows.append(
            [
                point.configuration,
                str(point.concurrency),
                rate_text(speeds.p90 if speeds else None),
                rate_text(point.metrics.total_tokens_per_s),
                seconds_text(ttft.p90 if ttft else None),
                "–" if point.band is None else f"±{point.band.relative:.0%}",
            ]
        )
    head = ["frontier", "trees", "tok/s/user p90", "tok/s/chip", "TTFT p90", "step time"]
    lines = [table(head, rows) if rows else "no valid point has both figures"]
    for one in best:
        if one["configuration"] is None:
            lines.append(f"at {one['interactivity']:g} tok/s/user: no layout is that fast")
            continue
        ahead = "" if one["ahead"] is None else f", {one['ahead']:.2f} times {one['next']}"
        lines.append(
            f"at {one['interactivity']:g} tok/s/user: {one['configuration']}, "
            f"{one['total_tokens_per_s_per_chip']:,.0f} tok/s/chip{ahead}"
        )
    return "\n".join(lines)
