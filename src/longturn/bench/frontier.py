"""Frontiers: the best throughput at each interactivity, and how two of them compare.

A frontier is the non-dominated set of a sweep. Between its points lies a monotone cubic: Hermite pieces with the
tangents of Steffen (Astronomy and Astrophysics 239, 443, 1990), which never overshoot their neighbours. The two
ends are a choice: here the curve has no curvature there, which is what the field's dashboards draw. Axes are linear.

Outside the range nothing was measured, and nothing is extrapolated: a value there is clamped to the edge and says so.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum


class Place(Enum):
    """Where an interactivity lies, seen from a frontier's range."""

    INSIDE = "inside"
    BELOW = "below"
    """Slower than any point: the edge's throughput is reached, perhaps more."""
    ABOVE = "above"
    """Faster than any point: not reached at all, and the edge's throughput says nothing about it."""


@dataclass(frozen=True, slots=True)
class FrontierValue:
    throughput: float
    place: Place

    @property
    def clamped(self) -> bool:
        return self.place is not Place.INSIDE


@dataclass(frozen=True, slots=True)
class FrontierRatio:
    interactivity: float
    value: FrontierValue
    baseline: FrontierValue

    @property
    def ratio(self) -> float:
        """Value over baseline; a reader must see `clamped` with it."""
        return self.value.throughput / self.baseline.throughput

    @property
    def clamped(self) -> bool:
        return self.value.clamped or self.baseline.clamped


def non_dominated(points: Sequence[tuple[float, float]]) -> list[int]:
    """Indices of the points (interactivity, throughput) that no other point beats, by rising interactivity.

    A point is beaten by one that is as good in both and better in one. Of equal points the first stays.

    Raises:
        ValueError: a number that is not finite and more than 0.
    """
    for interactivity, throughput in points:
        for value in (interactivity, throughput):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"a frontier's points are finite and more than 0, not ({interactivity}, {throughput})")
    kept: list[int] = []
    best = 0.0
    for index in sorted(range(len(points)), key=lambda i: (-points[i][0], -points[i][1], i)):
        if points[index][1] > best:
            kept.append(index)
            best = points[index][1]
    return kept[::-1]


@dataclass(frozen=True, slots=True)
class Frontier:
    """A frontier with at least one point. Make it with `frontier_of`."""

    interactivity: tuple[float, ...]
    """Rising."""
    throughput: tuple[float, ...]
    """Falling."""
    slopes: tuple[float, ...]
    """Tangents at the points."""

    @property
    def range(self) -> tuple[float, float]:
        return self.interactivity[0], self.interactivity[-1]

    def at(self, interactivity: float) -> FrontierValue:
        """The throughput at an interactivity, clamped and marked outside the range.

        Raises:
            ValueError: not a number.
        """
        xs, ys = self.interactivity, self.throughput
        if math.isnan(interactivity):
            raise ValueError("interactivity is not a number")
        if interactivity < xs[0]:
            return FrontierValue(ys[0], Place.BELOW)
        if interactivity > xs[-1]:
            return FrontierValue(ys[-1], Place.ABOVE)
        piece = min(bisect.bisect_right(xs, interactivity), len(xs) - 1) - 1
        if piece < 0:  # one point only
            return FrontierValue(ys[0], Place.INSIDE)
        width = xs[piece + 1] - xs[piece]
        t = (interactivity - xs[piece]) / width
        rise = ys[piece + 1] - ys[piece]
        left, right = self.slopes[piece] * width, self.slopes[piece + 1] * width
        value = ys[piece] + t * (left + t * (3 * rise - 2 * left - right + t * (left + right - 2 * rise)))
        # Rounding alone can leave the interval between the two points, by some units in the last place.
        return FrontierValue(min(max(value, ys[piece + 1]), ys[piece]), Place.INSIDE)


def frontier_of(points: Iterable[tuple[float, float]]) -> Frontier | None:
    """The frontier of points (interactivity, throughput); None if there are none.

    Raises:
        ValueError: a number that is not finite and more than 0.
    """
    everything = list(points)
    kept = [everything[index] for index in non_dominated(everything)]
    if not kept:
        return None
    xs, ys = tuple(x for x, _ in kept), tuple(y for _, y in kept)
    return Frontier(xs, ys, tuple(_slopes(xs, ys)))


def ratios(value: Frontier, baseline: Frontier, interactivities: Iterable[float]) -> list[FrontierRatio]:
    """Both frontiers, and their ratio, at matched interactivities."""
    return [FrontierRatio(x, value.at(x), baseline.at(x)) for x in interactivities]


def shared_range(frontiers: Iterable[Frontier]) -> tuple[float, float] | None:
    """The interactivities that all frontiers cover; None if there are none."""
    ranges = [frontier.range for frontier in frontiers]
    low, high = max((r[0] for r in ranges), default=1.0), min((r[1] for r in ranges), default=0.0)
    return (low, high) if low <= high else None


def _slopes(xs: Sequence[float], ys: Sequence[float]) -> list[float]:
    if len(xs) == 1:
        return [0.0]
    widths = [b - a for a, b in itertools.pairwise(xs)]
    secants = [(b - a) / w for (a, b), w in zip(itertools.pairwise(ys), widths, strict=True)]
    inner = []
    for i in range(1, len(xs) - 1):
        before, after = secants[i - 1], secants[i]
        parabola = (before * widths[i] + after * widths[i - 1]) / (widths[i - 1] + widths[i])
        signs = math.copysign(1, before) + math.copysign(1, after)
        inner.append(signs * min(abs(before), abs(after), abs(parabola) / 2))
    if not inner:
        return [secants[0], secants[0]]
    return [(3 * secants[0] - inner[0]) / 2, *inner, (3 * secants[-1] - inner[-1]) / 2]
