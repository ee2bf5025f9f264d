"""The runs of an explanation in their folder, what is missing of them, and the record and text they make."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from longturn.bench.attribution import Attribution, Combination, Effect, attribute
from longturn.bench.presets import rules_of
from longturn.cli.config_text import changed_settings, in_words, value_text
from longturn.cli.explain_plan import Comparison, run_digest
from longturn.cli.explain_run import WALL, load_arguments, measure
from longturn.cli.results import environment
from longturn.cli.version import longturn_version
from longturn.report.explanation import (
    ConfigurationRuns,
    EffectFigures,
    Explanation,
    FigureExplanation,
    SwitchFigures,
    SwitchValues,
)
from longturn.report.figures_of import FigureKind, figure_of
from longturn.report.point import Point, load_point, save_point


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured so far: one point file for each run, named by configuration, load and version."""

    comparison: Comparison
    load: Sequence[str]
    repeats: int
    folder: Path

    @property
    def planned(self) -> int:
        return self.repeats * len(self.comparison.combinations())

    def path(self, on: Combination, repeat: int) -> Path:
        digest = run_digest(self.comparison.config(on), shlex.join(self.load), longturn_version())
        return self.folder / "points" / f"{digest}-{repeat + 1}.json"

    def missing(self) -> list[tuple[Combination, int]]:
        """Runs to take, all combinations once before any again: a drift of the machine then hits all alike."""
        combinations = self.comparison.combinations()
        return [
            (on, repeat) for repeat in range(self.repeats) for on in combinations if not self.path(on, repeat).exists()
        ]

    def take(self, on: Combination, repeat: int, tick: Callable[[], None]) -> None:
        """Measure and save one run; raises as `explain_run.measure`."""
        config = self.comparison.config(on)
        point = measure(config, list(self.load), self.comparison.label(on), changed_settings(config), tick)
        save_point(msgspec.structs.replace(point, configuration=self.comparison.curve(on)), self.path(on, repeat))

    def points(self) -> dict[Combination, dict[str, Point]]:
        """Combination -> file's name -> its point, as far as measured."""
        return {
            on: {
                path.name: load_point(path)
                for repeat in range(self.repeats)
                if (path := self.path(on, repeat)).exists()
            }
            for on in self.comparison.combinations()
        }


def explain(measured: Measured, kinds: Sequence[FigureKind], command: str) -> Explanation | None:
    """The record of what was measured so far; None while A or B has no run."""
    comparison, points = measured.comparison, measured.points()
    switches = tuple(
        SwitchValues(
            name=switch.name,
            off={name: value_text(name, value) for name, value in switch.off.items()},
            on={name: value_text(name, value) for name, value in switch.on.items()},
        )
        for switch in comparison.switches
    )
    if not (points[frozenset()] and points[frozenset(comparison.names)]):
        return None
    words = (in_words(comparison.a), in_words(comparison.b))
    return make_explanation(switches, points, kinds, command=command, load=shlex.join(measured.load), words=words)


def make_explanation(
    switches: Sequence[SwitchValues],
    points: Mapping[Combination, Mapping[str, Point]],
    kinds: Sequence[FigureKind],
    *,
    command: str,
    load: str,
    words: tuple[str, str],
) -> Explanation:
    """The record.

    Args:
        switches: in the order of the sequence.
        points: combination -> file's name -> point; A and B have some.
        kinds: figures to explain; one that A or B lacks is left out.
        command: that repeats it.
        load: in words.
        words: A and B.
    """
    names = [switch.name for switch in switches]
    figures: dict[str, dict[Combination, tuple[float, ...]]] = {
        kind.name: {
            on: tuple(value for point in files.values() if (value := figure_of(point, kind)))
            for on, files in points.items()
        }
        for kind in kinds
    }
    ends = (frozenset[str](), frozenset(names))
    told = [kind for kind in kinds if all(figures[kind.name].get(on) for on in ends)]
    first = next(iter(points[ends[1]].values()))
    return Explanation(
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        command=command,
        load=load,
        model=first.model.name,
        a=words[0],
        b=words[1],
        switches=tuple(switches),
        runs=tuple(
            ConfigurationRuns(
                on=tuple(name for name in names if name in on),
                points=tuple(files),
                figures={kind.name: figures[kind.name][on] for kind in told},
                valid=all(point.validity.valid for point in files.values()),
            )
            for on, files in points.items()
            if files
        ),
        figures=tuple(_figure(kind, attribute(names, figures[kind.name])) for kind in told),
        environment=first.environment or environment(),
    )


def _figure(kind: FigureKind, found: Attribution) -> FigureExplanation:
    def effect(one: Effect | None) -> EffectFigures | None:
        if one is None:
            return None
        return EffectFigures(ratio=one.ratio, margin=one.margin, share=found.share(one), verdict=one.verdict.value)

    total = effect(found.total)
    assert total is not None
    return FigureExplanation(
        figure=kind.name,
        title=kind.title,
        unit=kind.unit,
        higher_is_better=kind.higher_is_better,
        a=found.a,
        b=found.b,
        total=total,
        switches=tuple(
            SwitchFigures(
                name=one.name,
                on_alone=effect(one.on_alone),
                off_alone=effect(one.off_alone),
                in_sequence=effect(one.in_sequence),
                mean_of_orders=effect(one.mean_of_orders),
            )
            for one in found.switches
        ),
        interaction=effect(found.interaction),
        run_spread=found.run_spread,
        degrees_of_freedom=found.degrees_of_freedom,
    )


# --- the plan --------------------------------------------------------------------------------------------------------


def plan_json(measured: Measured) -> dict[str, Any]:
    """What would be measured."""
    comparison, missing = measured.comparison, measured.missing()
    seconds = seconds_per_run(measured)
    return {
        "a": in_words(comparison.a),
        "b": in_words(comparison.b),
        "switches": comparison.names,
        "load": shlex.join(measured.load),
        "runs": [
            {
                "configuration": comparison.label(on),
                "settings": changed_settings(comparison.config(on)),
                "planned": measured.repeats,
                "measured": measured.repeats - sum(one == on for one, _ in missing),
            }
            for on in comparison.combinations()
        ],
        "runs_to_take": len(missing),
        "seconds_per_run": seconds,
        "seconds": None if seconds is None else seconds * len(missing),
    }


def seconds_per_run(measured: Measured) -> float | None:
    """Median time of the runs so far; before the first what the load says that it takes; None if it does not say."""
    known = [
        float(point.flags[WALL])
        for files in measured.points().values()
        for point in files.values()
        if WALL in point.flags
    ]
    if known:
        return statistics.median(known)
    if measured.load[0] != "agentx":
        return None
    args = load_arguments(measured.load)
    return rules_of(args.preset, args.duration).duration_s


def plan_text(measured: Measured) -> str:
    """What would be measured, for the terminal."""
    plan = plan_json(measured)
    lines = [f"A: {plan['a']}", f"B: {plan['b']}", f"load: longturn bench {plan['load']}", ""]
    for run in plan["runs"]:
        lines.append(f"  {run['configuration']}: {run['measured']} of {run['planned']} runs measured")
    seconds = plan["seconds"]
    time = (
        "in a time that the first one will tell"
        if seconds is None
        else f"in about {seconds / 60:.0f} min, {plan['seconds_per_run']:.0f} s each"
    )
    lines += ["", f"{plan['runs_to_take']} runs to take, {time}" if plan["runs_to_take"] else "nothing to take"]
    return "\n".join(lines)
