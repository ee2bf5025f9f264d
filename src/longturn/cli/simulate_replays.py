"""Published session replays beside simulated ones: each in its own configuration if that is known, else by frontier."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from longturn.bench.frontier import Frontier
    from longturn.bench.traces.tree import SessionTree
    from longturn.cli.simulate_setup import SimulationPlan
    from longturn.report.point import Point
    from longturn.simulate.published_data import Group

_RECIPE = (
    "--formats", "nvfp4",
    "--no-band",
    # As published of the official sessions (vLLM blog, 2026-09-08; base build's longest prompt).
    "--median-input", "142016",
    "--median-output", "444",
    "--max-context", "990016",
    # As published recipes have it: chunks as large as the budget, first come first served, synthetic acceptance.
    "--set", "scheduler.step_tokens=16384",
    "--set", "scheduler.target_itl_ms=0",
    "--set", "scheduler.ageing_ms=0",
    "--acceptance", "synthetic",
)  # fmt: skip
_M3 = (*_RECIPE, "--model", "m3", "--drafter", "eagle3-gqa-m3:3")
_M31 = (*_RECIPE, "--model", "m3.1-flash", "--drafter", "dspark-m3.1-flash:7")
_TRTLLM = ("--kernels", "vllm-0.24-trtllm")


@dataclass(frozen=True, slots=True)
class Case:
    """Runs that stand beside one published curve or end of one."""

    words: tuple[str, ...]
    """Arguments of `longturn simulate`, without layouts, loads and host memory."""
    runs: tuple[tuple[str, int, str], ...] = ()
    """(layouts, GB of host memory a chip, session trees)."""
    published: str = ""
    """A group of `published.toml` that states layout, trees and host memory of each of its points: those are run."""


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "m3-b300": Case((*_M3, *_TRTLLM, "--platform", "b300"), published="M3 on B300, AgentX"),
        "m3-gb200": Case((*_M3, *_TRTLLM, "--platform", "gb200"), (("tp4,ep4", 200, "8,16,24,32,48"),)),
        "m3-gb200-cutlass": Case((*_M3, "--platform", "gb200"), (("tp4,ep4", 200, "8,16,24,32,48"),)),
        "m3-vr": Case((*_M3, "--platform", "vr-nvl72"), (("tp2,tp4,ep4", 375, "16,32,48,64,96"),)),
        "m3.1-gb300": Case((*_M31, *_TRTLLM, "--platform", "gb300"), (("tp4,ep4", 200, "1"),)),
        "m3.1-vr": Case(
            (*_M31, "--platform", "vr-nvl72"),
            (("tp4,ep4,tp8,tp16", 375, "1"), ("tp2,tp4,ep4,dep4", 375, "32,64,128")),
        ),
    }
)
"""Layouts of the published recipes where they are known, and loads from one session on. What others left unsaid is the
simulation's choice, the best of these at each interactivity."""

End = Literal["nominal", "slow", "fast"]
"""As the model has it, or with all steps longer or shorter by their uncertainty."""


def replays(args: argparse.Namespace, cases: Sequence[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Simulate some cases: what `judged` makes of them."""
    from longturn.cli.simulate_point import points_text

    found: dict[str, list[Point]] = {}
    lines: list[str] = []
    for name in cases:
        left_out: list[str] = []
        found[name] = _simulated(args, CASES[name], left_out)
        lines += [f"left out: {line}" for line in left_out]
        lines += [points_text(found[name]), ""] if args.lines else []
    return judged(found, lines)


def _simulated(args: argparse.Namespace, case: Case, left_out: list[str]) -> list[Point]:
    """The points of a case; where a group states configurations, one for each of its points, in its order."""
    from longturn.cli.simulate_run import run_points
    from longturn.simulate.published_data import groups

    if not case.published:
        plans = [_plan(args, case, run) for run in case.runs]
        return [point for plan in plans for point in run_points(plan, jobs=args.jobs, left_out=left_out)]
    (group,) = (group for group in groups("agentx") if group.name == case.published)
    hosts = [int(value) for value in group.numbers("host_gb")]
    trees = matched_trees(group, _plan(args, case, (group.texts("layout")[0], hosts[0], "1")).trees)
    wanted = list(zip(group.texts("layout"), hosts, trees, strict=True))
    by_run: dict[tuple[str, int, int], Point] = {}
    for layout, host_gb in dict.fromkeys((layout, host_gb) for layout, host_gb, _ in wanted):
        loads = sorted({count for *where, count in wanted if where == [layout, host_gb]})
        points = run_points(_plan(args, case, (layout, host_gb, ",".join(map(str, loads)))), jobs=args.jobs)
        by_run |= {(layout, host_gb, point.concurrency): point for point in points}
    return [by_run[key] for key in wanted]


def _plan(args: argparse.Namespace, case: Case, run: tuple[str, int, str]) -> SimulationPlan:
    from longturn.cli import simulate
    from longturn.cli.main import Parser
    from longturn.cli.simulate_setup import plan_simulation

    layouts, host_gb, loads = run
    parser = Parser()
    simulate.add_arguments(parser)
    words = [*case.words, "--layout", layouts, "--host-memory", str(host_gb), "--concurrency", loads]
    words += ["--traces", *args.agentx, "--duration", f"{args.duration:g}"]
    parsed = parser.parse_args(words)
    parsed.no_band, parsed.frontier_bands = not args.band, not case.published
    return plan_simulation(parsed)


def matched_trees(group: Group, trees: Sequence[SessionTree]) -> list[int]:
    """Trees of these sessions that ask for as much as a group's.

    A session's subagents work beside it, so that a tree with more of them is more load: trees are counted by requests
    to each request of a root agent, which is known of the official sessions.
    """
    requests = sum(1 for tree in trees for _ in tree.requests())
    roots = sum(len(tree.root.requests) for tree in trees)
    factor = float(group.values["requests_a_root"]) / (requests / roots)
    return [max(1, round(count * factor)) for count in group.numbers("trees")]


def judged(found: dict[str, list[Point]], lines: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Simulated points of some cases beside what is published: for a program, and as lines for people.

    Args:
        found: by case; of one with a published configuration for each point, as many in the same order.
        lines: come first.
    """
    from longturn.simulate.published_data import groups

    published = {group.name: group for group in groups("agentx")}
    results: list[dict[str, Any]] = []
    for name, points in found.items():
        if CASES[name].published:
            _configured(published[CASES[name].published], points, results, lines)
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
            rubin, blackwell = (_ends(lambda line: _at(line, 150.0), found[key]) for key in ("m3-vr", name))
            # Both may err in opposite directions: constants of one chip are not those of the other.
            pairs = zip(rubin, (blackwell[0], blackwell[2], blackwell[1]), strict=True)
            ends = [None if above is None or below is None else above / below for above, below in pairs]
            tell(f"M3, Vera Rubin over GB200 with {label}, at 150", ends, ratio, "times")
    for name, label in (("m3.1-gb300", "GB300"), ("m3.1-vr", "Vera Rubin")):
        if name in found:
            ends = _ends(lambda line: line.range[1], found[name])
            tell(f"M3.1-Flash, {label}, fastest", ends, float(m31.values["fastest"][label]), "tok/s/user")
    if "m3.1-vr" in found:
        for speed, value in zip(m31.numbers("p90_tokens_s_user"), m31.numbers("tokens_gpu_s"), strict=True):
            ends = _ends(functools.partial(_at, speed=speed), found["m3.1-vr"])
            tell(f"M3.1-Flash, Vera Rubin, at {speed:g} tok/s/user", ends, value, "tok/s/chip")
    return results, lines


def _configured(group: Group, points: Sequence[Point], results: list[dict[str, Any]], lines: list[str]) -> None:
    """Each published point beside the run of its own configuration."""
    from longturn.cli.simulate_run import figures_pair

    lines.append(f"{group.name}: each point in its own configuration (trees here: {matched_text(group, points)})")
    lines.append(f"  {'':<18} {'tok/s/user':>10} {'published':>10} {'error':>7} {'band':>13}"
                 f"  {'tok/s/chip':>10} {'published':>10} {'error':>7} {'band':>17}")  # fmt: skip
    speeds, rates = group.numbers("p90_tokens_s_user"), group.numbers("tokens_gpu_s")
    errors: list[tuple[float, float]] = []
    predicted: list[tuple[float, float]] = []
    labels = [f"{name}, {int(n)} trees" for name, n in zip(group.texts("layout"), group.numbers("trees"), strict=True)]
    for label, point, speed, rate in zip(labels, points, speeds, rates, strict=True):
        pair = figures_pair(point)
        if pair is None:
            lines.append(f"  {label:<18} no figures: {', '.join(point.validity.reasons)}")
            continue
        off = pair[0] / speed - 1.0, pair[1] / rate - 1.0
        errors.append(off)
        predicted.append(pair)
        ends = [_bound_pair(point, end) for end in ("slow", "fast")]
        results.append(
            {
                "point": f"{group.name}, {label}",
                "simulated_trees": point.concurrency,
                "predicted": pair[1],
                "published": rate,
                "error": off[1],
                "unit": "tok/s/chip",
                "low": ends[0] and ends[0][1],
                "high": ends[1] and ends[1][1],
                "tok_s_user": pair[0],
                "published_tok_s_user": speed,
                "error_tok_s_user": off[0],
                "low_tok_s_user": ends[0] and ends[0][0],
                "high_tok_s_user": ends[1] and ends[1][0],
            }
        )
        bands = ["–" if None in ends else f"{ends[0][i]:,.0f} to {ends[1][i]:,.0f}" for i in (0, 1)]  # type: ignore[index]
        lines.append(
            f"  {label:<18} {pair[0]:>10,.1f} {speed:>10,.1f} {off[0]:>+7.0%} {bands[0]:>13}"
            f"  {pair[1]:>10,.0f} {rate:>10,.0f} {off[1]:>+7.0%} {bands[1]:>17}"
        )
    if errors:
        means = [sum(abs(one[i]) for one in errors) / len(errors) for i in (0, 1)]
        order = predicted == sorted(predicted) and [y for _, y in predicted] == sorted((y for _, y in predicted))[::-1]
        lines.append(
            f"  mean absolute error {means[0]:.0%} of tok/s/user, {means[1]:.0%} of tok/s/chip; "
            f"{'in' if order else 'not in'} the published order"
        )
    lines.append("")


def matched_text(group: Group, points: Sequence[Point]) -> str:
    return ", ".join(
        f"{point.concurrency} for {int(n)}" for point, n in zip(points, group.numbers("trees"), strict=True)
    )


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
