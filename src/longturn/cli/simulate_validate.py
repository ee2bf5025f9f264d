"""Predicted beside published points, with the error of each and the mean by platform; the rest is listed."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from longturn.cli.options import check_number
from longturn.errors import ConfigError

if TYPE_CHECKING:
    from longturn.report.point import Point


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--platform", metavar="NAME", help="points of this platform only")
    parser.add_argument("--lines", action="store_true", help="with --agentx, every simulated point too")
    replay = parser.add_argument_group("session replays: minutes of simulation")
    replay.add_argument(
        "--agentx", nargs="+", metavar="TRACE", help="simulate the published session replays with these traces"
    )
    replay.add_argument("--duration", type=float, default=900.0, metavar="S", help="simulated, of each point [900]")
    replay.add_argument("--jobs", type=int, default=1, metavar="N", help="processes [1]")


@dataclass(frozen=True, slots=True)
class _Case:
    """One published frontier, and the runs that may reach it. What others left unsaid is the simulation's choice: the
    best of these layouts, loads and step lengths at each interactivity."""

    name: str
    flags: tuple[str, ...]


def _on(platform: str, layouts: str, host_gb: int, trees: str) -> tuple[str, ...]:
    return "--platform", platform, "--layout", layouts, "--host-memory", str(host_gb), "--concurrency", trees


_COMMON = (
    "--formats",
    "nvfp4",
    "--no-band",
    "--max-context",
    "500000",
)
_M3 = ("--model", "m3", "--drafter", "eagle3-gqa-m3:3", "--target-itl", "8,25")
_M31 = ("--model", "m3.1-flash", "--drafter", "dspark-m3.1-flash:7", "--target-itl", "8,25")
_TRTLLM = ("--kernels", "vllm-0.24-trtllm")
CASES = (
    _Case("m3 b300", (*_COMMON, *_M3, *_TRTLLM, *_on("b300", "tp2,tp4", 250, "1,4,12,24,48"))),
    _Case("m3 gb200", (*_COMMON, *_M3, *_TRTLLM, *_on("gb200", "tp4,ep4", 200, "4,12,24,48"))),
    _Case("m3 vr", (*_COMMON, *_M3, *_on("vr-nvl72", "tp2,tp4", 200, "4,12,24,48,96"))),
    _Case("m3.1 gb300", (*_COMMON, *_M31, *_TRTLLM, *_on("gb300", "tp4", 200, "1"))),
    _Case("m3.1 vr", (*_COMMON, *_M31, *_on("vr-nvl72", "tp2,tp4", 200, "1,24,96"))),
)  # fmt: skip


def run(args: argparse.Namespace) -> int:
    check_number("--duration", args.duration, 60)
    check_number("--jobs", args.jobs, 1)

    import json

    from longturn.simulate.published import compare, not_modelled, report_lines
    from longturn.simulate.published_data import groups

    points = [one for one in compare() if args.platform in (None, one.platform)]
    if args.platform is not None and not points:
        raise ConfigError(f"no published point of platform '{args.platform}' can be predicted")
    missing = not_modelled()
    agentx: list[dict[str, Any]] = []
    lines: list[str] = []
    if args.agentx is not None:
        agentx, lines = _agentx(args)
        simulated = {group.name for group in groups("agentx")}
        missing = tuple(one for one in missing if one.group not in simulated)
    if args.json:
        print(json.dumps({
            "points": [{**asdict(one), "error": one.error} for one in points],
            "agentx": agentx,
            "not_modelled": [asdict(one) for one in missing],
        }))  # fmt: skip
        return 0
    print("\n".join(report_lines(points)))
    if lines:
        print("\n" + "\n".join(lines))
    print("\nnot predicted by the cost model alone:")
    for one in missing:
        print(f"  {one.group} ({one.source}): {one.reason}")
    return 0


def _agentx(args: argparse.Namespace) -> tuple[list[dict[str, Any]], list[str]]:
    """Published session replays beside simulated frontiers."""
    from longturn.cli import simulate
    from longturn.cli.main import Parser
    from longturn.cli.simulate_point import points_text
    from longturn.cli.simulate_run import run_points
    from longturn.cli.simulate_setup import plan_simulation

    found: dict[str, list[Point]] = {}
    lines: list[str] = []
    for case in CASES:
        parser = Parser()
        simulate.add_arguments(parser)
        words = [*case.flags, "--traces", *args.agentx, "--duration", f"{args.duration:g}", "--jobs", str(args.jobs)]
        plan = plan_simulation(parser.parse_args(words))
        found[case.name] = run_points(plan, jobs=args.jobs)
        if args.lines:
            lines += [points_text(found[case.name]), ""]
    return _judged(found, lines)


def _judged(found: dict[str, list[Point]], lines: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    from longturn.bench.frontier import frontier_of
    from longturn.cli.simulate_run import figures_pair
    from longturn.simulate.published_data import groups

    frontiers = {
        name: frontier_of(pair for point in points if (pair := figures_pair(point)) is not None)
        for name, points in found.items()
    }
    published = {group.name: group for group in groups("agentx")}
    results: list[dict[str, Any]] = []

    def tell(name: str, predicted: float | None, value: float, unit: str) -> None:
        error = None if predicted is None else predicted / value - 1.0
        results.append({"point": name, "predicted": predicted, "published": value, "error": error, "unit": unit})
        shown = "not reached" if predicted is None else f"{predicted:>11,.1f} {value:>11,.1f} {error:>+8.1%} {unit}"
        lines.append(f"  {name:<56} {shown}")

    def at(name: str, speed: float) -> float | None:
        """Best throughput at an interactivity; a faster point serves as well."""
        frontier = frontiers[name]
        return frontier.at(speed).throughput if frontier is not None and speed <= frontier.range[1] else None

    lines.append("session replays: throughput of the best simulated configuration at the published interactivity")
    b300 = published["M3 on B300, AgentX"]
    for speed, value in zip(b300.numbers("p90_tokens_s_user"), b300.numbers("tokens_gpu_s"), strict=True):
        tell(f"M3, B300, at {speed:g} tok/s/user", at("m3 b300", speed), value, "tok/s/chip")
    rubin, blackwell = at("m3 vr", 150.0), at("m3 gb200", 150.0)
    ratio = None if rubin is None or blackwell is None else rubin / blackwell
    ratio_group = published["M3 on Vera Rubin against GB200, AgentX"]
    tell("M3, Vera Rubin over GB200, at 150", ratio, ratio_group.numbers("ratio_to_gb200")[0], "times")
    for name, speed, label in (("m3.1 gb300", 418.9, "GB300"), ("m3.1 vr", 724.9, "Vera Rubin")):
        frontier = frontiers[name]
        tell(f"M3.1-Flash, {label}, fastest", None if frontier is None else frontier.range[1], speed, "tok/s/user")
    m31 = published["M3.1-Flash on GB300 and Vera Rubin, AgentX"]
    for speed, value in zip(m31.numbers("p90_tokens_s_user"), m31.numbers("tokens_gpu_s"), strict=True):
        tell(f"M3.1-Flash, Vera Rubin, at {speed:g} tok/s/user", at("m3.1 vr", speed), value, "tok/s/chip")
    return results, lines
