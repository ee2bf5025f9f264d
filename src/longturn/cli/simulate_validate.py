"""Predicted beside published points, with the error of each and the mean by platform; the rest is listed."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longturn.cli import simulate_replays
from longturn.cli.options import check_number
from longturn.errors import ConfigError

if TYPE_CHECKING:
    from longturn.simulate.own_sessions import SessionPoint


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
    replay.add_argument("--case", metavar="A,B", help=f"these alone, of: {', '.join(simulate_replays.CASES)} [all]")
    replay.add_argument("--duration", type=float, default=3600.0, metavar="S", help="simulated, of each point [3600]")
    replay.add_argument("--seeds", type=int, default=3, metavar="N", help="of points whose configuration is known [3]")
    replay.add_argument("--band", action="store_true", help="with the uncertainty of each: two more runs a point")
    replay.add_argument("--jobs", type=int, default=1, metavar="N", help="processes [1]")


def run(args: argparse.Namespace) -> int:
    check_number("--duration", args.duration, 60)
    check_number("--jobs", args.jobs, 1)
    check_number("--seeds", args.seeds, 1)
    cases = _cases(args.case, args.platform)

    import json

    from longturn.simulate.own_layers import compare_layers
    from longturn.simulate.own_sessions import session_lines
    from longturn.simulate.published import compare, compare_own, not_modelled, report_lines
    from longturn.simulate.published_data import groups

    points = [one for one in compare() if args.platform in (None, one.platform)]
    own = [one for one in (*compare_own(), *compare_layers()) if args.platform in (None, one.platform)]
    if args.platform is not None and not points and (args.agentx is None or not cases):
        replayed = ", which has published session replays alone: give --agentx TRACES" if cases else ""
        raise ConfigError(f"no published point of platform '{args.platform}' is predicted by the cost model{replayed}")
    missing = not_modelled()
    agentx: list[dict[str, Any]] = []
    lines: list[str] = []
    made: dict[str, float] = {}
    sessions = _own_sessions(args.sessions, args.platform) if args.sessions is not None else []
    if args.agentx is not None:
        found = simulate_replays.replays(args, cases)
        agentx, lines, made = found.results, found.lines, found.sessions
        simulated = {group.name for group in groups("agentx")}
        missing = tuple(one for one in missing if one.group not in simulated)
    if args.json:
        print(json.dumps({
            "points": [{**asdict(one), "error": one.error} for one in points],
            "own": [{**asdict(one), "error": one.error} for one in own],
            "own_sessions": [asdict(one) for one in sessions],
            "agentx": agentx,
            "agentx_sessions": made,
            "not_modelled": [asdict(one) for one in missing],
        }))  # fmt: skip
        return 0
    if points:
        print("\n".join(report_lines(points)))
    if own:
        print("\n".join(["", "our own runs", *report_lines(own), *session_lines(sessions)]))
    if lines:
        print("\n".join(["", *lines] if points else lines))
    print("\nnot predicted by the cost model alone:")
    for one in missing:
        print(f"  {one.group} ({one.source}): {one.reason}")
    return 0


def _cases(text: str | None, platform: str | None) -> tuple[str, ...]:
    """Those asked for, or all of a platform. Raises ConfigError for an unknown one, or one of another platform."""
    if text is None:
        return tuple(name for name, case in simulate_replays.CASES.items() if platform in (None, case.platform))
    known, found = simulate_replays.CASES, tuple(text.split(","))
    for name in found:
        if name not in known:
            raise ConfigError(f"--case: unknown '{name}' (known: {', '.join(known)})")
        if platform not in (None, known[name].platform):
            raise ConfigError(f"--case: {name} is of platform {known[name].platform}, --platform is '{platform}'")
    return found


def _own_sessions(traces: list[str], platform: str | None) -> list[SessionPoint]:
    from longturn.bench.traces.load import load_traces
    from longturn.simulate.own_sessions import own_sessions
    from longturn.simulate.published_data import OWN_RUNS, groups

    found = [one for one in groups("sessions", path=OWN_RUNS) if platform in (None, one.text("platform"))]
    return own_sessions(found, load_traces([Path(name) for name in traces], split=False)) if found else []
