"""How many chips some sessions at once need, each at a speed: replicas of the layout that needs the fewest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from longturn.cli.simulate_run import figures_pair
from longturn.report.point import Bound, Point
from longturn.simulate.sweep import most_sessions


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas of one layout behind a session router."""

    interactivity: float
    """P90, tokens a second and user, that is asked for."""
    sessions: int
    """Asked for, at once."""
    configuration: str
    sessions_per_replica: int
    more_fit: bool
    """The largest load that was tried is fast enough: a larger one may be too, and fewer chips do."""
    chips_per_replica: int
    chips: int
    least_chips: int | None
    """With all steps faster by their uncertainty; None if no band was made."""
    most_chips: int | None
    """With all steps slower; None if no band was made, or if the speed is not reached then."""


def fleets(points: Sequence[Point], at: Sequence[float], sessions: int) -> list[Fleet | None]:
    """For each speed the layout that needs the fewest chips; None where none is that fast."""
    return [_fewest(points, speed, sessions) for speed in at]


def fleet_points(points: Sequence[Point], at: Sequence[float], sessions: int) -> list[int]:
    """Indices of the points that those layouts' numbers of chips are read from."""
    names = {fleet.configuration for fleet in fleets(points, at, sessions) if fleet is not None}
    return [index for index, point in enumerate(points) if point.configuration in names]


def fleet_lines(found: Sequence[Fleet | None], at: Sequence[float], sessions: int) -> list[str]:
    """For people."""
    lines = []
    for fleet, speed in zip(found, at, strict=True):
        head = f"{sessions} sessions at {speed:g} tok/s/user (P90)"
        if fleet is None:
            lines.append(f"{head}: no layout is that fast at the smallest load")
            continue
        replicas = fleet.chips // fleet.chips_per_replica
        text = f"{head}: {fleet.chips} chips{_range(fleet)}, {replicas} x {fleet.configuration}"
        lines.append(f"{text} with {fleet.sessions_per_replica} sessions each{_hint(fleet)}")
    return lines


def _range(fleet: Fleet) -> str:
    if fleet.least_chips is None:
        return ""
    if fleet.most_chips is None:
        return f" (at least {fleet.least_chips}: with slower steps no load is that fast)"
    return f" ({fleet.least_chips} to {fleet.most_chips})"


def _hint(fleet: Fleet) -> str:
    return ", the most that was tried: give a larger --concurrency" if fleet.more_fit else ""


def _fewest(points: Sequence[Point], speed: float, sessions: int) -> Fleet | None:
    by_name: dict[str, list[Point]] = {}
    for point in points:
        if figures_pair(point) is not None:
            by_name.setdefault(point.configuration, []).append(point)
    found = [fleet for group in by_name.values() if (fleet := _fleet(group, speed, sessions)) is not None]
    return min(found, key=lambda fleet: (fleet.chips, fleet.configuration), default=None)


def _fleet(group: Sequence[Point], speed: float, sessions: int) -> Fleet | None:
    """Replicas of the layout that these points are of, at several loads."""
    pairs = [(point.concurrency, pair[0]) for point in group if (pair := figures_pair(point)) is not None]
    held = most_sessions(pairs, speed)
    if held is None:
        return None
    chips = group[0].platform.chips
    slow, fast = (_bounds(group, slow) for slow in (True, False))
    return Fleet(
        speed, sessions, group[0].configuration, held[0], held[1], chips, _chips(sessions, held[0], chips),
        _chips_at(fast, speed, sessions, chips), _chips_at(slow, speed, sessions, chips),
    )  # fmt: skip


def _bounds(group: Iterable[Point], slow: bool) -> list[tuple[int, float]] | None:
    """Loads and speeds at one end of the uncertainty; None if one of the points has no band."""
    found = []
    for point in group:
        if point.band is None:
            return None
        bound: Bound = point.band.slow if slow else point.band.fast
        if bound.interactivity is not None:
            found.append((point.concurrency, bound.interactivity.p90))
    return found


def _chips_at(loads: list[tuple[int, float]] | None, speed: float, sessions: int, chips: int) -> int | None:
    held = None if loads is None else most_sessions(loads, speed)
    return None if held is None else _chips(sessions, held[0], chips)


def _chips(sessions: int, held: int, chips: int) -> int:
    return -(-sessions // held) * chips
