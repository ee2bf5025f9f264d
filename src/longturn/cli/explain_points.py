"""An explanation of two points that exist: their switches are the flags that differ, nothing is measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from longturn.bench.attribution import Combination, needed
from longturn.cli.explain_result import make_explanation
from longturn.cli.explain_run import WALL
from longturn.cli.options import settings
from longturn.errors import ConfigError
from longturn.report.explanation import Explanation, SwitchValues
from longturn.report.figures_of import FigureKind
from longturn.report.point import Point, is_point, load_point
from longturn.report.schema import read_file
from longturn.report.series import conditions

_OUTCOMES = ("run_id", "warmup_requests", WALL, "server_state", "busy", "step_band", "preemptions", "evictions", "time")
_TIER_OUTCOMES = ("offloaded_pages", "loaded_pages", "host_hit_tokens")
"""Flags that tell what happened in a run: nobody has set them."""
_LOAD = ("duration_s", "carry_over")
"""Flags that are of the load: points of two loads say nothing of settings."""
_NO_SWITCHES = frozenset((*_OUTCOMES, *_TIER_OUTCOMES, *_LOAD))
_UNSET = "(default)"


def explain_points(
    pair: tuple[Path, Path], others: Sequence[str], kinds: Sequence[FigureKind], order: str | None, command: str
) -> Explanation:
    """Combinations of flags are looked for among the two points and the others.

    Args:
        pair: A and B.
        others: point files, or folders of them.
        kinds: figures to explain.
        order: names of flags with commas between, in the order of the sequence; as they are in B if None.
        command: that repeats it.

    Raises:
        ConfigError: A and B have the same flags, or were measured under other conditions than flags.
        ResultError: a file cannot be read or is no point.
    """
    a, b = load_point(pair[0]), load_point(pair[1])
    names = _ordered(_differing(a, b), order)
    unlike = [name for name, value in _conditions(a).items() if value != _conditions(b)[name]]
    if unlike:
        raise ConfigError(f"A and B differ in more than flags: {unlike[0]}")
    found: dict[Combination, dict[str, Point]] = {on: {} for on in needed(names)}
    for path in dict.fromkeys([*pair, *_files(others)]):
        point = load_point(path)
        on = _combination(point, a, b, names)
        if on is not None:
            found.setdefault(on, {})[path.name] = point
    switches = [
        SwitchValues(name=name, off={name: a.flags.get(name, _UNSET)}, on={name: b.flags.get(name, _UNSET)})
        for name in names
    ]
    words = (a.configuration, b.configuration)
    return make_explanation(switches, found, kinds, command=command, load=a.command, words=words)


def _conditions(point: Point) -> dict[str, str]:
    load = {name: point.flags.get(name, _UNSET) for name in _LOAD}
    return {**conditions(point), "concurrency": str(point.concurrency), **load}


def _differing(a: Point, b: Point) -> list[str]:
    names = [
        name
        for name in dict.fromkeys([*b.flags, *a.flags])
        if _value(a, name) != _value(b, name) and name not in _NO_SWITCHES
    ]
    if not names:
        raise ConfigError("A and B have the same flags: nothing to explain")
    return names


def _value(point: Point, name: str) -> str:
    """A flag's value; a setting of this engine that a point does not name has its default."""
    if name in point.flags:
        return point.flags[name]
    for setting in settings():
        if setting.name == name:
            return str(setting.default).lower() if isinstance(setting.default, bool) else str(setting.default)
    return _UNSET


def _ordered(names: list[str], order: str | None) -> list[str]:
    wanted = [name.strip() for name in order.split(",")] if order else []
    for name in wanted:
        if name not in names:
            raise ConfigError(f"--order: no switch '{name}' (there are: {', '.join(names)})")
    return list(dict.fromkeys([*wanted, *names]))


def _combination(point: Point, a: Point, b: Point, names: Sequence[str]) -> Combination | None:
    """Which switches are on; None for a point that is of neither kind in one of them, or not comparable."""
    if _conditions(point) != _conditions(a):
        return None
    for name in dict.fromkeys([*point.flags, *a.flags]):
        if name not in names and name not in _NO_SWITCHES and _value(point, name) != _value(a, name):
            return None
    on = []
    for name in names:
        value = _value(point, name)
        if value == _value(b, name):
            on.append(name)
        elif value != _value(a, name):
            return None
    return frozenset(on)


def _files(names: Sequence[str]) -> list[Path]:
    found: list[Path] = []
    for name in names:
        path = Path(name)
        found += (
            [file for file in sorted(path.rglob("*.json")) if is_point(read_file(file))] if path.is_dir() else [path]
        )
    return found
