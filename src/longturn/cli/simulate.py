"""Replay agent sessions on hardware that is not there: the real scheduler in virtual time, kernels by a cost model.

`longturn simulate validate` compares with published points, `simulate fit` derives the calibration, `simulate what-if`
shows what a faster kernel does to users.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from longturn.cli.agentx_load import PRESET_NAMES, add_sessions, concurrency
from longturn.cli.options import check_number
from longturn.errors import ConfigError
from longturn.simulate.acceptance import RULES

if TYPE_CHECKING:
    from longturn.report.point import Point


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument(
        "--layout",
        default="tp4",
        metavar="L,L",
        help="tp4, ep4, tp8ep4, dep4 (attention data parallel); dp2tp4 for two replicas; a curve each [tp4]",
    )
    add_load(parser, concurrency_default="8")
    parser.add_argument(
        "--sweep", action="store_true", help="try every layout that fits, and print the best at each interactivity"
    )
    parser.add_argument("--chips", type=int, default=8, metavar="N", help="most chips of a layout, with --sweep [8]")
    parser.add_argument(
        "--target-itl",
        metavar="MS,MS",
        help="a curve for each of these scheduler.target_itl_ms: how long a step with chunks may take",
    )
    parser.add_argument(
        "--at", action="append", type=float, metavar="X", help="with --sweep, name the winner here, tok/s; repeatable"
    )
    parser.add_argument(
        "--agents", type=int, metavar="N", help="with --sweep and --at, how many chips N sessions at once need"
    )
    parser.add_argument("--no-band", action="store_true", help="leave out the two runs that give the uncertainty band")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes [1]")
    parser.add_argument("--name", metavar="TEXT", help="name of the curve [model, platform and layout]")
    parser.add_argument("--events", metavar="FILE", help="write one line for every request sent and ended")
    parser.add_argument(
        "--out", default="results/simulate", metavar="DIR", help="one JSON a point, page [results/simulate]"
    )


def add_target(parser: argparse.ArgumentParser) -> None:
    """Flags for what is simulated."""
    group = parser.add_argument_group("what is simulated")
    group.add_argument(
        "--model", default="m3", metavar="NAME", help="m3, m3.1-flash, llama-3.1-8b ..., or a config.json [m3]"
    )
    group.add_argument(
        "--platform",
        default="gb300",
        metavar="NAME",
        help="h200, b200, b300, gb200, gb300, vr-nvl72, or a file [gb300]",
    )
    group.add_argument(
        "--formats",
        metavar="NAME",
        help="of weights and cache: bf16, mxfp8, nvfp4, nvfp4-kv4 [nvfp4, or mxfp8 where a chip has no such rate]",
    )
    group.add_argument("--kernels", metavar="FAMILY", help="kernel family of the platform's calibration [its default]")
    group.add_argument(
        "--drafter", metavar="NAME:K", help="draft model and drafts a step, such as eagle3-gqa-m3:3 [none]"
    )
    group.add_argument(
        "--routing",
        type=float,
        metavar="S",
        help="how many times more often the most popular expert is chosen than the least; 1 is uniform [20, as in the "
        "power law of the kernel tables]",
    )
    group.add_argument(
        "--acceptance",
        choices=RULES,
        default="positions",
        help="accepted drafts: drawn by position, or as the benchmark has it for synthetic acceptance, the "
        "mean's whole part always and the rest as a coin toss [positions]",
    )
    group.add_argument("--no-locality", action="store_true", help="weights not placed by locality domain (Vera Rubin)")
    group.add_argument(
        "--host-memory",
        type=float,
        default=0.0,
        metavar="GB",
        help="a chip, for pages that leave it [0: no second tier]",
    )
    group.add_argument(
        "--memory-share", type=float, default=0.9, metavar="F", help="of a chip's memory that is used [0.9]"
    )
    group.add_argument(
        "--router", default="session", metavar="NAME", help="session, round-robin, least-loaded [session]"
    )
    group.add_argument(
        "--request-ms", type=float, metavar="MS", help="from a client's send to the engine [3, or as the platform file]"
    )
    group.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=C",
        dest="sets",
        help="a setting of the engine, such as scheduler.step_tokens=16384; may be repeated",
    )


def add_load(parser: argparse.ArgumentParser, *, concurrency_default: str) -> None:
    """Flags for what is replayed, as `bench agentx` has them."""
    load = parser.add_argument_group("load")
    add_sessions(load, concurrency_default=concurrency_default)
    load.add_argument("--preset", choices=PRESET_NAMES, default="agentx", help="rules of the replay [agentx]")
    load.add_argument("--duration", type=float, metavar="S", help="simulated seconds of each point [as the preset]")
    load.add_argument("--seed", type=int, metavar="N", help="of sessions and start points [as the preset, or 42]")
    load.add_argument(
        "--median-input", type=int, metavar="N", help="stretch prompts until their median is N tokens [as recorded]"
    )
    load.add_argument("--median-output", type=int, metavar="N", help="the same for answers [as recorded]")
    load.add_argument(
        "--like", metavar="NAME", help="join, stretch and give subagents until sessions are like those of agentx-062126"
    )
    load.add_argument("--no-split", action="store_true", help="look for no agents in flattened captures")
    load.add_argument("--derive-system", action="store_true", help="find system prompts that captures do not declare")


def run(args: argparse.Namespace) -> int:
    check_arguments(args)

    import json
    from dataclasses import asdict

    from longturn.cli.simulate_fleet import fleet_lines, fleet_points, fleets
    from longturn.cli.simulate_point import assumptions_text, points_text, reasons_text
    from longturn.cli.simulate_run import run_points
    from longturn.cli.simulate_setup import plan_simulation
    from longturn.cli.simulate_sweep import sweep_text, winners
    from longturn.report.point import point_to_json, save_point
    from longturn.report.schema import check_writable
    from longturn.report.sweep import write_sweep

    plan = plan_simulation(args)
    out = Path(args.out)
    check_writable(out)
    left_out = list(plan.left_out)
    progress = _progress if sys.stderr.isatty() else None
    at, agents = args.at or [], args.agents
    also = None if agents is None else lambda found: fleet_points(found, at, agents)
    points: list[Point] = run_points(plan, jobs=args.jobs, progress=progress, left_out=left_out, also_banded=also)
    for point in points:
        save_point(point, out / f"simulate-{_slug(point.configuration)}-{point.concurrency:04d}.json")
    page = out / "index.html"
    write_sweep(points, "Simulated agent sessions", page)
    best = winners(points, at) if args.sweep else []
    needed = [] if agents is None else fleets(points, at, agents)
    if args.json:
        shown = [json.loads(point_to_json(point)) for point in points]
        swept = {"points": shown, "winners": best, "left_out": left_out}
        if agents is not None:
            swept["fleets"] = [None if one is None else asdict(one) for one in needed]
        print(json.dumps(swept if args.sweep else shown))
    else:
        print(points_text(points), end="\n\n")
        print(assumptions_text(plan), end="\n\n")
        if reasons := reasons_text(points):
            print(reasons, end="\n\n")
        if args.sweep:
            print(sweep_text(points, best))
            print("".join(f"{line}\n" for line in fleet_lines(needed, at if needed else [], agents or 0)))
        for line in left_out:
            print(f"left out: {line}")
        print(f"results: {out}\npage:    {page.resolve().as_uri()}")
    return 0


def check_arguments(args: argparse.Namespace) -> None:
    """Raises ConfigError for values out of range, before anything is loaded."""
    concurrency(args.concurrency)
    check_target(args)
    check_number("--chips", args.chips, 1)
    check_number("--jobs", args.jobs, 1)
    for value in args.at or []:
        if not 0 < value < float("inf"):
            raise ConfigError(f"--at must be more than 0, not {value}")
    if args.at and not args.sweep:
        raise ConfigError("--at needs --sweep: it names the best of its layouts")
    if args.agents is not None:
        check_number("--agents", args.agents, 1)
        if not args.at:
            raise ConfigError("--agents needs --sweep and --at: the speed that each of them is to have")
    if args.events is not None and (args.jobs > 1 or args.sweep):
        raise ConfigError("--events needs one process and no --sweep: its lines are those of the points in order")


def check_target(args: argparse.Namespace) -> None:
    """The part of it for what is simulated."""
    check_number("--host-memory", args.host_memory, 0)
    if not 0 < args.memory_share <= 1:
        raise ConfigError(f"--memory-share must be above 0 and at most 1, not {args.memory_share}")
    if args.routing is not None:
        check_number("--routing", args.routing, 1)
    if args.request_ms is not None:
        check_number("--request-ms", args.request_ms, 0)
    if args.max_context is not None:
        check_number("--max-context", args.max_context, 2)
    if args.like is not None:
        from longturn.simulate.corpus import corpus_named

        corpus_named(args.like)
        if args.median_input is not None or args.median_output is not None:
            raise ConfigError("--like settles how long prompts and answers are: no --median-input or --median-output")


def _slug(name: str) -> str:
    """A configuration's name as part of a file's name."""
    return "-".join("".join(c if c.isalnum() or c in "._" else " " for c in name.lower()).split())


def _progress(done: int, total: int, name: str) -> None:
    print(f"\r\033[K{done} of {total} simulated{'' if done == total else ', ' + name}", end="", file=sys.stderr)
    if done == total:
        print(file=sys.stderr)
