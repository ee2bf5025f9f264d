"""Predicted beside published points, with the error of each and the mean by platform; the rest is listed."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from longturn.cli.options import check_number
from longturn.errors import ConfigError

if TYPE_CHECKING:
    from longturn.report.point import Point
    from longturn.simulate.own_sessions import SessionFigures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--platform", metavar="NAME", help="points of this platform only")
    parser.add_argument("--lines", action="store_true", help="with --agentx, every simulated point too")
    parser.add_argument(
        "--sessions", nargs="+", metavar="TRACE", help="simulate our own measured agent sessions with these traces"
    )
    replay = parser.add_argument_group("published session replays: minutes of simulation")
    replay.add_argument(
        "--agentx", nargs="+", metavar="TRACE", help="simulate the published session replays with these traces"
    )
    replay.add_argument("--case", metavar="A,B", help=f"these alone, of: {', '.join(CASES)} [all]")
    replay.add_argument("--duration", type=float, default=3600.0, metavar="S", help="simulated, of each point [3600]")
    replay.add_argument("--jobs", type=int, default=1, metavar="N", help="processes [1]")


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


def _on(platform: str, layouts: str, host_gb: int, trees: str) -> tuple[str, ...]:
    return "--platform", platform, "--layout", layouts, "--host-memory", str(host_gb), "--concurrency", trees


_LOADS = "1,2,4,8,16,24,32,48,64"
CASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "m3-b300": (*_M3, *_TRTLLM, *_on("b300", "tp2,tp4,tp8", 250, _LOADS)),
        "m3-gb200": (*_M3, *_TRTLLM, *_on("gb200", "tp4,ep4", 200, "8,16,24,32,48")),
        "m3-gb200-cutlass": (*_M3, *_on("gb200", "tp4,ep4", 200, "8,16,24,32,48")),
        "m3-vr": (*_M3, *_on("vr-nvl72", "tp2,tp4,ep4", 375, "16,32,48,64,96,128")),
        "m3.1-gb300": (*_M31, *_TRTLLM, *_on("gb300", "tp4,ep4", 200, "1")),
        "m3.1-vr": (*_M31, *_on("vr-nvl72", "tp2,tp4,ep4,dep4", 375, "1,32,64,128")),
    }
)
"""Published frontiers, and the runs that may reach them: layouts of the published recipes, loads from one session on.
What others left unsaid is the simulation's choice, the best of these at each interactivity."""


def run(args: argparse.Namespace) -> int:
    check_number("--duration", args.duration, 60)
    check_number("--jobs", args.jobs, 1)
    cases = tuple(args.case.split(",")) if args.case else tuple(CASES)
    for name in cases:
        if name not in CASES:
            raise ConfigError(f"--case: unknown '{name}' (known: {', '.join(CASES)})")

    import json

    from longturn.simulate.published import compare, compare_own, not_modelled, report_lines
    from longturn.simulate.published_data import groups

    points = [one for one in compare() if args.platform in (None, one.platform)]
    own = [one for one in compare_own() if args.platform in (None, one.platform)]
    if args.platform is not None and not points:
        raise ConfigError(f"no published point of platform '{args.platform}' can be predicted")
    missing = not_modelled()
    agentx: list[dict[str, Any]] = []
    lines: list[str] = []
    sessions = _own_sessions(args.sessions) if args.sessions is not None else []
    if args.agentx is not None:
        agentx, lines = _agentx(args, cases)
        simulated = {group.name for group in groups("agentx")}
        missing = tuple(one for one in missing if one.group not in simulated)
    if args.json:
        print(json.dumps({
            "points": [{**asdict(one), "error": one.error} for one in points],
            "own": [{**asdict(one), "error": one.error} for one in own],
            "own_sessions": [asdict(one) for one in sessions],
            "agentx": agentx,
            "not_modelled": [asdict(one) for one in missing],
        }))  # fmt: skip
        return 0
    print("\n".join(report_lines(points)))
    if own:
        print("\n".join(["", "our own runs", *report_lines(own), *_session_lines(sessions)]))
    if lines:
        print("\n" + "\n".join(lines))
    print("\nnot predicted by the cost model alone:")
    for one in missing:
        print(f"  {one.group} ({one.source}): {one.reason}")
    return 0


def _own_sessions(traces: list[str]) -> list[SessionFigures]:
    from longturn.bench.traces.load import load_traces
    from longturn.simulate.own_sessions import own_sessions
    from longturn.simulate.published_data import OWN_RUNS, groups

    trees = load_traces([Path(name) for name in traces], split=False)
    return [one for group in groups("sessions", path=OWN_RUNS) for one in own_sessions(group, trees)]


def _session_lines(found: list[SessionFigures]) -> list[str]:
    lines: list[str] = []
    for one in found:
        lines.append(f"{one.group}, {one.sessions} at once: {one.requests} requests, {one.measured_requests} measured")
        for unit, (value, slow, fast), measured in (
            ("P90 tok/s/user", one.p90_tok_s_user, one.measured_p90_tok_s_user),
            ("total tok/s", one.total_tok_s, one.measured_total_tok_s),
        ):
            where = "within" if min(slow, fast) <= measured <= max(slow, fast) else "outside"
            lines.append(
                f"  {unit:<56} {value:>11,.1f} {measured:>11,.1f} {value / measured - 1.0:>+8.1%}, {where} "
                f"{slow:,.0f} to {fast:,.0f}"
            )
    return lines


def _agentx(args: argparse.Namespace, cases: tuple[str, ...]) -> tuple[list[dict[str, Any]], list[str]]:
    """Published session replays beside simulated frontiers."""
    from longturn.cli import simulate
    from longturn.cli.main import Parser
    from longturn.cli.simulate_point import points_text
    from longturn.cli.simulate_run import run_points
    from longturn.cli.simulate_setup import plan_simulation

    found: dict[str, list[Point]] = {}
    lines: list[str] = []
    for name in cases:
        parser = Parser()
        simulate.add_arguments(parser)
        words = [*CASES[name], "--traces", *args.agentx, "--duration", f"{args.duration:g}", "--jobs", str(args.jobs)]
        plan = plan_simulation(parser.parse_args(words))
        found[name] = run_points(plan, jobs=args.jobs)
        if args.lines:
            lines += [points_text(found[name]), ""]
    return judged(found, lines)


def judged(found: dict[str, list[Point]], lines: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Simulated points of some cases beside what is published: for a program, and as lines for people."""
    from longturn.bench.frontier import frontier_of
    from longturn.cli.simulate_run import figures_pair
    from longturn.simulate.published_data import groups

    frontiers = {
        name: frontier_of(pair for point in points if (pair := figures_pair(point)) is not None)
        for name, points in found.items()
    }
    published = {group.name: group for group in groups("agentx")}
    results: list[dict[str, Any]] = []

    def tell(name: str, predicted: float | None, value: float, unit: str, shown: str = "", **more: Any) -> None:
        error = None if predicted is None else predicted / value - 1.0
        one = {"point": name, "predicted": predicted, "published": value, "error": error, "unit": unit}
        results.append({**one, **more})
        text = "not reached" if predicted is None else f"{predicted:>11,.1f} {value:>11,.1f} {error:>+8.1%} {unit}"
        lines.append(f"  {name:<56} {text}{shown}")

    def at(name: str, speed: float) -> float | None:
        """Best throughput at an interactivity; a faster point serves as well."""
        frontier = frontiers.get(name)
        return frontier.at(speed).throughput if frontier is not None and speed <= frontier.range[1] else None

    def speed_at(name: str, rate: float) -> float | None:
        """Best interactivity at a throughput, by halving: throughput falls with interactivity."""
        frontier = frontiers.get(name)
        if frontier is None or not frontier.at(frontier.range[1]).throughput <= rate <= frontier.at(0.0).throughput:
            return None
        low, high = frontier.range
        for _ in range(50):
            middle = (low + high) / 2.0
            low, high = (middle, high) if frontier.at(middle).throughput >= rate else (low, middle)
        return low

    lines.append("session replays: the best simulated configuration beside each published point")
    if "m3-b300" in frontiers:
        b300 = published["M3 on B300, AgentX"]
        band = max(float(point.flags["step_band"]) for point in found["m3-b300"])
        lines.append(f"  (steps of these runs may be off by {band:.0%})")
        for speed, value in zip(b300.numbers("p90_tokens_s_user"), b300.numbers("tokens_gpu_s"), strict=True):
            across, near = speed_at("m3-b300", value), _nearest(found["m3-b300"], speed, value)
            shown = "" if across is None else f"; as much at {across:.0f} ({across / speed - 1.0:+.0%})"
            shown += f"; nearest {near['name']}: {near['tok_s_user']:.0f} ({near['tok_s_user'] / speed - 1.0:+.0%}), "
            shown += f"{near['tok_s_chip']:,.0f} ({near['tok_s_chip'] / value - 1.0:+.0%})"
            what = f"M3, B300, at {speed:g} tok/s/user"
            tell(what, at("m3-b300", speed), value, "tok/s/chip", shown, as_much_at=across, nearest=near)
    rubin = at("m3-vr", 150.0)
    ratio = published["M3 on Vera Rubin against GB200, AgentX"].numbers("ratio_to_gb200")[0]
    for name, label in (("m3-gb200", "TensorRT-LLM's experts"), ("m3-gb200-cutlass", "CUTLASS's experts")):
        blackwell = at(name, 150.0)
        if rubin is not None and name in frontiers:
            found_ratio = None if blackwell is None else rubin / blackwell
            tell(f"M3, Vera Rubin over GB200 with {label}, at 150", found_ratio, ratio, "times")
    for name, speed, label in (("m3.1-gb300", 418.9, "GB300"), ("m3.1-vr", 724.9, "Vera Rubin")):
        frontier = frontiers.get(name)
        if frontier is not None:
            tell(f"M3.1-Flash, {label}, fastest", frontier.range[1], speed, "tok/s/user")
    if "m3.1-vr" in frontiers:
        m31 = published["M3.1-Flash on GB300 and Vera Rubin, AgentX"]
        for speed, value in zip(m31.numbers("p90_tokens_s_user"), m31.numbers("tokens_gpu_s"), strict=True):
            tell(f"M3.1-Flash, Vera Rubin, at {speed:g} tok/s/user", at("m3.1-vr", speed), value, "tok/s/chip")
    return results, lines


def _nearest(points: list[Point], speed: float, rate: float) -> dict[str, Any]:
    """The simulated point that is least off in the worse of both figures, as ratios."""
    from longturn.cli.simulate_run import figures_pair

    def off(pair: tuple[float, float]) -> float:
        return max(abs(math.log(pair[0] / speed)), abs(math.log(pair[1] / rate)))

    pairs = [(point, pair) for point in points if (pair := figures_pair(point)) is not None]
    point, (user, chip) = min(pairs, key=lambda one: off(one[1]))
    name = f"{point.configuration.split()[-1]}, {point.concurrency} trees"
    return {"name": name, "tok_s_user": user, "tok_s_chip": chip}
