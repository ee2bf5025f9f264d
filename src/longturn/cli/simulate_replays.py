"""Published session replays beside simulated ones: each in its own configuration if that is known, else by frontier."""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from longturn.bench.frontier import Frontier
    from longturn.cli.simulate_setup import Sessions, SimulationPlan
    from longturn.report.point import Point
    from longturn.simulate.published_data import Group

_RECIPE = (
    "--formats", "nvfp4",
    "--no-band",
    "--like", "agentx-062126",
    # As published recipes have it: chunks as large as the budget, first come first served, synthetic acceptance. Other
    # engines hold no turns that have lost their pages.
    "--set", "scheduler.step_tokens=16384",
    "--set", "scheduler.target_itl_ms=0",
    "--set", "scheduler.ageing_ms=0",
    "--set", "scheduler.recompute_share=1",
    "--acceptance", "synthetic",
)  # fmt: skip
_M3 = (*_RECIPE, "--model", "m3", "--drafter", "eagle3-gqa-m3:3")
_M31 = (*_RECIPE, "--model", "m3.1-flash", "--drafter", "dspark-m3.1-flash:7")
_TRTLLM = ("--kernels", "vllm-0.24-trtllm")
_CHUNKS = ("--set", "scheduler.chunk_tokens=512")
"""`--long-prefill-token-threshold 512` of the recipe for M3 on B300."""


@dataclass(frozen=True, slots=True)
class Case:
    """Runs that stand beside one published curve or end of one."""

    words: tuple[str, ...]
    """Arguments of `longturn simulate`, without layouts, loads and host memory."""
    runs: tuple[tuple[str, int, str], ...] = ()
    """(layouts, GB of host memory a chip, session trees)."""
    published: str = ""
    """A group of `published.toml` that states layout, trees and host memory of each of its points: those are run."""

    @property
    def platform(self) -> str:
        return self.words[self.words.index("--platform") + 1]


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "m3-b300": Case((*_M3, *_TRTLLM, *_CHUNKS, "--platform", "b300"), published="M3 on B300, AgentX"),
        "m3-gb200": Case((*_M3, *_TRTLLM, "--platform", "gb200"), (("tp4,ep4", 200, "8,16,24,32"),)),
        "m3-gb200-cutlass": Case((*_M3, "--platform", "gb200"), (("tp4,ep4", 200, "2,4,8,16"),)),
        "m3-vr": Case((*_M3, "--platform", "vr-nvl72"), (("tp2,tp4,ep4", 375, "16,32,48,64,96"),)),
        "m3.1-gb300": Case((*_M31, *_TRTLLM, "--platform", "gb300"), (("tp4,ep4", 200, "1"),)),
        "m3.1-vr": Case(
            (*_M31, "--platform", "vr-nvl72"),
            (("tp4,ep4,tp8,tp16", 375, "1"), ("tp2,tp4,ep4,dep4", 375, "32,48,64,96")),
        ),
    }
)
"""Layouts of the published recipes where they are known, and loads from one session on. What others left unsaid is the
simulation's choice, the best of these at each interactivity."""

_CLOSE = 0.25
_COLUMNS = (
    ("", 18), ("tok/s/user", 10), ("seeds", 11), ("published", 9), ("error", 6), ("band", 11),
    ("tok/s/chip", 11), ("seeds", 17), ("published", 9), ("error", 6), ("band", 17),
)  # fmt: skip
End = Literal["nominal", "slow", "fast"]
"""As the model has it, or with all steps longer or shorter by their uncertainty."""


@dataclass(frozen=True, slots=True)
class Replays:
    """What came of some cases."""

    results: list[dict[str, Any]]
    """As `judged` makes them."""
    lines: list[str]
    """For people."""
    sessions: dict[str, float]
    """What was replayed, as corpora are described."""


def replays(args: argparse.Namespace, cases: Sequence[str]) -> Replays:
    """Simulate some cases. Those with a configuration for each point are simulated with several seeds."""
    from longturn.cli.simulate_point import points_text

    found: dict[str, list[list[Point]]] = {}
    lines: list[str] = []
    load = _Load(args)
    for name in cases:
        left_out: list[str] = []
        case = CASES[name]
        seeds = load.seeds if case.published else load.seeds[:1]
        found[name] = [_simulated(load, case, seed, left_out) for seed in seeds]
        lines += [f"left out: {line}" for line in left_out]
        lines += [points_text([point for points in found[name] for point in points]), ""] if args.lines else []
    described, about = load.about()
    results, lines = judged(found, [*lines, *about, ""], args.duration)
    if not args.band:
        lines.append(
            "no bands were made: --band repeats points with all steps slower and faster, in three times as long"
        )
    return Replays(results, lines, described)


class _Load:
    """Sessions of each seed, which are made once, and parsed arguments."""

    def __init__(self, args: argparse.Namespace) -> None:
        from longturn.bench.presets import rules_of

        self.args = args
        usual = rules_of("agentx").seed
        assert usual is not None, "the preset of published replays has a seed"
        self.seeds = [usual + more for more in range(args.seeds)]
        self._sessions: dict[int, Sessions] = {}

    def plan(self, case: Case, run: tuple[str, int, str], seed: int) -> SimulationPlan:
        """Of one layout, host memory and some loads."""
        from longturn.cli import simulate
        from longturn.cli.main import Parser
        from longturn.cli.simulate_setup import plan_simulation, sessions_of

        layouts, host_gb, loads = run
        parser = Parser()
        simulate.add_arguments(parser)
        words = [*case.words, "--layout", layouts, "--host-memory", str(host_gb), "--concurrency", loads]
        words += ["--traces", *self.args.agentx, "--duration", f"{self.args.duration:g}", "--seed", str(seed)]
        parsed = parser.parse_args(words)
        parsed.no_band = not self.args.band or seed != self.seeds[0]
        parsed.frontier_bands = not case.published
        if seed not in self._sessions:
            self._sessions[seed] = sessions_of(parsed)
        return plan_simulation(parsed, self._sessions[seed])

    def about(self) -> tuple[dict[str, float], list[str]]:
        """What the first seed's sessions are like: for a program, and beside the corpus for people."""
        from longturn.simulate.corpus import comparison_lines, corpus_named, described

        found = described(self._sessions[self.seeds[0]][0])
        name = _RECIPE[_RECIPE.index("--like") + 1]
        return found, comparison_lines(found, corpus_named(name))


def _simulated(load: _Load, case: Case, seed: int, left_out: list[str]) -> list[Point]:
    """The points of a case; where a group states configurations, one for each of its points, in its order."""
    from longturn.cli.simulate_run import run_points
    from longturn.simulate.published_data import groups

    jobs = load.args.jobs
    if not case.published:
        plans = [load.plan(case, run, seed) for run in case.runs]
        return [point for plan in plans for point in run_points(plan, jobs=jobs, left_out=left_out)]
    (group,) = (group for group in groups("agentx") if group.name == case.published)
    counts = ([int(value) for value in group.numbers(key)] for key in ("host_gb", "trees"))
    wanted = list(zip(group.texts("layout"), *counts, strict=True))
    by_run: dict[tuple[str, int, int], Point] = {}
    for layout, host_gb in dict.fromkeys((layout, host_gb) for layout, host_gb, _ in wanted):
        loads = sorted({count for *where, count in wanted if where == [layout, host_gb]})
        points = run_points(load.plan(case, (layout, host_gb, ",".join(map(str, loads))), seed), jobs=jobs)
        by_run |= {(layout, host_gb, point.concurrency): point for point in points}
    return [by_run[key] for key in wanted]


def judged(
    found: dict[str, list[list[Point]]], lines: list[str], duration_s: float
) -> tuple[list[dict[str, Any]], list[str]]:
    """Simulated points of some cases beside what is published: for a program, and as lines for people.

    Args:
        found: by case, for each seed; of a case with a published configuration for each point, as many in the same
            order. Of others the first seed counts.
        lines: come first.
        duration_s: simulated, of each point.
    """
    from longturn.simulate.published_data import groups

    published = {group.name: group for group in groups("agentx")}
    results: list[dict[str, Any]] = []
    for name, seeds in found.items():
        if CASES[name].published:
            _configured(published[CASES[name].published], seeds, results, lines, duration_s)
    if any(not CASES[name].published for name in found):
        lines.append("by frontier: the best simulated configuration at an interactivity")
    m31 = published["M3.1-Flash on GB300 and Vera Rubin, AgentX"]
    ratio = published["M3 on Vera Rubin against GB200, AgentX"].numbers("ratio_to_gb200")[0]

    def tell(name: str, ends: Sequence[float | None], value: float, unit: str) -> None:
        predicted, low, high = ends
        error = None if predicted is None else predicted / value - 1.0
        one = {"point": name, "predicted": predicted, "published": value, "error": error, "unit": unit}
        results.append({**one, "low": low, "high": high})
        text = "not reached" if predicted is None else f"{predicted:>11,.1f} {value:>11,.1f} {error:>+8.1%} {unit}"
        band = "" if low is None or high is None else f", {low:,.1f} to {high:,.1f}"
        lines.append(f"  {name:<56} {text}{band}")

    for name, label in (("m3-gb200", "TensorRT-LLM's experts"), ("m3-gb200-cutlass", "CUTLASS's experts")):
        if "m3-vr" in found and name in found:
            rubin, blackwell = (_ends(lambda line: _at(line, 150.0), found[key][0]) for key in ("m3-vr", name))
            # Both may err in opposite directions: constants of one chip are not those of the other.
            pairs = zip(rubin, (blackwell[0], blackwell[2], blackwell[1]), strict=True)
            ends = [None if above is None or below is None else above / below for above, below in pairs]
            tell(f"M3, Vera Rubin over GB200 with {label}, at 150", ends, ratio, "times")
    for name, label in (("m3.1-gb300", "GB300"), ("m3.1-vr", "Vera Rubin")):
        if name in found:
            ends = _ends(lambda line: line.range[1], found[name][0])
            tell(f"M3.1-Flash, {label}, fastest", ends, float(m31.values["fastest"][label]), "tok/s/user")
    if "m3.1-vr" in found:
        for speed, value in zip(m31.numbers("p90_tokens_s_user"), m31.numbers("tokens_gpu_s"), strict=True):
            ends = _ends(functools.partial(_at, speed=speed), found["m3.1-vr"][0])
            tell(f"M3.1-Flash, Vera Rubin, at {speed:g} tok/s/user", ends, value, "tok/s/chip")
    return results, lines


def _configured(
    group: Group, seeds: Sequence[Sequence[Point]], results: list[dict[str, Any]], lines: list[str], duration_s: float
) -> None:
    """Each published point beside the runs of its own configuration: their median, and what seeds make of it."""
    from longturn.cli.simulate_run import figures_pair

    count = len(seeds)
    span = f"{count} seed{'s' if count > 1 else ''}, {duration_s:g} s a point"
    lines.append(f"{group.name}: each point in its own configuration, {span}")
    lines.append("".join(f"  {'':<18}" if not name else f" {name:>{width}}" for name, width in _COLUMNS))
    speeds, rates = group.numbers("p90_tokens_s_user"), group.numbers("tokens_gpu_s")
    errors: list[tuple[float, float]] = []
    predicted: list[tuple[float, float]] = []
    labels = [f"{name}, {int(n)} trees" for name, n in zip(group.texts("layout"), group.numbers("trees"), strict=True)]
    for label, *points, speed, rate in zip(labels, *seeds, speeds, rates, strict=True):
        pairs = [pair for point in points if (pair := figures_pair(point)) is not None]
        if not pairs:
            lines.append(f"  {label:<18} no figures: {', '.join(points[0].validity.reasons)}")
            continue
        pair = statistics.median(one for one, _ in pairs), statistics.median(one for _, one in pairs)
        off = pair[0] / speed - 1.0, pair[1] / rate - 1.0
        errors.append(off)
        predicted.append(pair)
        ends = [_bound_pair(points[0], end) for end in ("slow", "fast")]
        result: dict[str, Any] = {"point": f"{group.name}, {label}"}
        texts: list[str] = []
        for i, (key, value) in enumerate((("tok_s_user", speed), ("tok_s_chip", rate))):
            spread = min(one[i] for one in pairs), max(one[i] for one in pairs)
            low, high = (None if end is None else end[i] for end in ends)
            result |= {key: pair[i], f"{key}_published": value, f"{key}_error": off[i]}
            result |= {f"{key}_seeds": [one[i] for one in pairs], f"{key}_low": low, f"{key}_high": high}
            band = "–" if low is None or high is None else f"{low:,.0f} to {high:,.0f}"
            texts += [f"{pair[i]:,.1f}" if i == 0 else f"{pair[i]:,.0f}", f"{spread[0]:,.0f} to {spread[1]:,.0f}"]
            texts += [f"{value:,.1f}" if i == 0 else f"{value:,.0f}", f"{off[i]:+.0%}", band]
        results.append(result)
        widths = [width for _, width in _COLUMNS[1:]]
        lines.append(f"  {label:<18}" + "".join(f" {text:>{width}}" for text, width in zip(texts, widths, strict=True)))
    if errors:
        means = [sum(abs(one[i]) for one in errors) / len(errors) for i in (0, 1)]
        close = [sum(abs(one[i]) <= _CLOSE for one in errors) for i in (0, 1)]
        order = predicted == sorted(predicted) and [y for _, y in predicted] == sorted((y for _, y in predicted))[::-1]
        lines.append(
            f"  mean absolute error {means[0]:.0%} of tok/s/user and {means[1]:.0%} of tok/s/chip; {close[0]} and "
            f"{close[1]} of {len(errors)} within {_CLOSE:.0%}; {'in' if order else 'not in'} the published order"
        )
    lines.append("")


def _bound_pair(point: Point, end: End) -> tuple[float, float] | None:
    """(P90 interactivity, tokens per second and chip) at one end of a point's uncertainty."""
    from longturn.cli.simulate_run import figures_pair

    if end == "nominal":
        return figures_pair(point)
    if point.band is None or figures_pair(point) is None:
        return None
    bound = point.band.slow if end == "slow" else point.band.fast
    if bound.interactivity is None or not bound.total_tokens_per_s:
        return None
    return bound.interactivity.p90, bound.total_tokens_per_s


def _ends(read: Callable[[Frontier], float | None], points: Sequence[Point]) -> list[float | None]:
    """A figure of the frontier, as the model has it and with steps slower and faster."""
    from longturn.bench.frontier import frontier_of

    ends: tuple[End, ...] = ("nominal", "slow", "fast")
    lines = [frontier_of(pair for one in points if (pair := _bound_pair(one, end)) is not None) for end in ends]
    return [None if line is None else read(line) for line in lines]


def _at(frontier: Frontier, speed: float) -> float | None:
    """Best throughput at an interactivity; a faster point serves as well."""
    return frontier.at(speed).throughput if speed <= frontier.range[1] else None
