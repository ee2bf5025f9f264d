"""Replay agent sessions on a model of your own machine, with the prefix cache on and off, and write two pages.

The first follows one session turn by turn; the second replays session trees by AgentX's rules at several concurrencies,
scaled down for a small model, and draws throughput against interactivity.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from longturn.cli.options import add_config_flags, check_number, config_from_args, repeat_flags
from longturn.config import EngineConfig
from longturn.errors import LongturnError

if TYPE_CHECKING:
    from longturn.bench.replay import Replay, ReplayOptions
    from longturn.bench.session import Session
    from longturn.bench.target import TargetModel
    from longturn.report.point import Point
    from longturn.report.schema import Run

CACHE_OFF = "cache.prefix_caching=false"
_WITHOUT = "cache off"
AGENTS = "agents"
"""Folder of the second page, beside the first."""
CONCURRENCY, DURATION_S = "1,2,4", 20.0
TRACE, SCALE = "desk.jsonl", 0.15
"""Sessions of up to 14,000 tokens and the factor that lets a small model on a CPU keep up with them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--session", default="repo_fix", metavar="NAME|FILE", help="a shipped session or a session file [repo_fix]"
    )
    parser.add_argument(
        "--pause-scale", type=float, default=0.25, metavar="X", help="factor on the recorded pauses [0.25]"
    )
    parser.add_argument("--no-baseline", action="store_true", help="leave out the run with the cache off")
    parser.add_argument(
        "--concurrency",
        default=CONCURRENCY,
        metavar="N,N",
        help=f"session trees alive at once, one point each [{CONCURRENCY}]",
    )
    parser.add_argument(
        "--duration", type=float, default=DURATION_S, metavar="S", help=f"seconds of each point [{DURATION_S:g}]"
    )
    parser.add_argument("--no-agents", action="store_true", help="leave out the session trees and their page")
    parser.add_argument(
        "--out", default="results/demo", metavar="DIR", help="folder for results and pages [results/demo]"
    )
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    check_number("--pause-scale", args.pause_scale, 0)
    config = config_from_args(args)

    from longturn.bench.replay import ReplayOptions
    from longturn.bench.session import load_named_session
    from longturn.cli.main import INTERRUPTED
    from longturn.cli.results import make_result, show_and_save
    from longturn.report.schema import check_writable

    session = load_named_session(args.session)
    out = Path(args.out)
    check_writable(out)
    options = ReplayOptions(pause_scale=args.pause_scale)
    without = dataclasses.replace(config, cache=dataclasses.replace(config.cache, prefix_caching=False))
    plans = [_Plan("cache on", config, _serve_command(args))]
    if not args.no_baseline:
        plans.append(_Plan(_WITHOUT, without, _serve_command(args, "--set", CACHE_OFF)))
    if not args.no_agents:
        _agent_args(args, "http://127.0.0.1", plans[0])  # complains about bad values before anything is started
    done = _Done()
    for plan in plans:
        if not _measure(args, plan, session, options, done):
            break
    if not done.runs:
        raise done.failure or KeyboardInterrupt
    result = make_result("An agent session, turn by turn", _command(args), done.model, [session], options, done.runs)
    if not args.json:
        print(f"{session.id} on {done.model}, {len(session.turns)} turns\n")
    show_and_save(result, out, as_json=args.json)
    if done.points:
        _show_agents(done.points, out / AGENTS, as_json=args.json)
    if done.interrupted:
        print("longturn: interrupted; partial results saved", file=sys.stderr)
        return INTERRUPTED
    if done.failure is not None:
        raise done.failure
    return done.code


@dataclass(frozen=True, slots=True)
class _Plan:
    """One server and what it is for."""

    name: str
    config: EngineConfig
    command: str


@dataclass(slots=True)
class _Done:
    """What has been measured."""

    runs: list[Run] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    model: str = ""
    code: int = 0
    interrupted: bool = False
    failure: LongturnError | None = None


def _measure(args: argparse.Namespace, plan: _Plan, session: Session, options: ReplayOptions, done: _Done) -> bool:
    """Measure against one server; returns whether to go on with the next one."""
    from longturn.cli.agentx import exit_code
    from longturn.cli.replay import report_failures
    from longturn.cli.results import make_run

    try:
        with _replayed(plan.name, plan.config, session, options) as (url, model, measured):
            done.model = model.name
            done.runs.append(make_run(plan.name, plan.command, measured, model))
            done.interrupted = measured.interrupted
            if not measured.interrupted and not args.no_agents:
                done.interrupted = _replay_agents(args, url, plan, done.points)
    except KeyboardInterrupt:
        done.interrupted = True
    except LongturnError as error:
        done.failure = error
    if done.interrupted or done.failure is not None:
        return False
    done.code = max(done.code, report_failures(measured), exit_code(done.points))
    return not measured.partial


@contextmanager
def _replayed(
    name: str, config: EngineConfig, session: Session, options: ReplayOptions
) -> Iterator[tuple[str, TargetModel, Replay]]:
    """Start a server, replay the session against it, yield its URL, its model and what was measured, stop it."""
    from longturn.cli.local_server import client_key, local_server
    from longturn.cli.replay import replay_url
    from longturn.cli.terminal import Progress

    progress = Progress(name)
    try:
        progress.waiting("starting the server, which takes longer the first time")
        with local_server(config, on_wait=progress.tick) as url:
            model, measured = replay_url(url, None, client_key(config), 600.0, [session], options, progress)
            progress.close()
            yield url, model, measured
            progress.waiting("stopping the server")
    finally:
        progress.close()


def _replay_agents(args: argparse.Namespace, url: str, plan: _Plan, points: list[Point]) -> bool:
    """Replay session trees against a server; returns whether Ctrl-C ended it."""
    import asyncio

    from longturn.cli.agentx_progress import SweepProgress
    from longturn.cli.agentx_sweep import measure_sweep, plan_sweep

    sweep = plan_sweep(_agent_args(args, url, plan))
    progress = SweepProgress(sweep.rules, name=plan.name)
    try:
        return asyncio.run(
            measure_sweep(sweep, Path(args.out) / AGENTS / plan.name.replace(" ", "-"), points, progress)
        )
    finally:
        progress.close()


def _agent_args(args: argparse.Namespace, url: str, plan: _Plan) -> argparse.Namespace:
    """What `bench agentx` would be given, checked."""
    from longturn.cli import agentx
    from longturn.cli.local_server import client_key
    from longturn.cli.machine import cpu_name
    from longturn.cli.main import verb_parser

    given = ["--url", url, "--traces", TRACE, "--scale-context", str(SCALE), "--preset", "quick", "--token-counts"]
    given += ["--duration", f"{args.duration:g}", "--concurrency", args.concurrency]
    given += ["--name", plan.name, "--chip", cpu_name()]
    key = client_key(plan.config)
    parsed = verb_parser("agentx", "longturn demo", agentx, "").parse_args(
        [*given, *(["--api-key", key] if key else [])]
    )
    agentx.check_arguments(parsed)
    check_number("--duration", args.duration, 1)
    return parsed


def _show_agents(points: list[Point], folder: Path, *, as_json: bool) -> None:
    """Print the points of each server, and write their page."""
    from longturn.cli.agentx_point import points_table, reasons_text
    from longturn.report.sweep import write_sweep

    page = folder / "index.html"
    names = [point.configuration for point in points]
    write_sweep(points, "Agent sessions on this machine", page, baseline=_WITHOUT if _WITHOUT in names else None)
    if as_json:
        return
    for name in dict.fromkeys(point.configuration for point in points):
        of_name = [point for point in points if point.configuration == name]
        print(f"\nagent sessions, {name}\n\n{points_table(of_name)}\n\n{reasons_text(of_name)}")
    print(f"\nresults: {folder}\npage:    {page.resolve().as_uri()}")


def _serve_command(args: argparse.Namespace, *more: str) -> str:
    return shlex.join(["longturn", "serve", *(["DIR"] if args.model_dir else []), *repeat_flags(args), *more])


def _command(args: argparse.Namespace) -> str:
    """The command that repeats this run, without keys and paths."""
    parts = ["longturn", "demo", *(["DIR"] if args.model_dir else [])]
    if args.session != "repo_fix":
        parts += ["--session", Path(args.session).name]
    if args.pause_scale != 0.25:
        parts += ["--pause-scale", f"{args.pause_scale:g}"]
    parts += ["--concurrency", args.concurrency] if args.concurrency != CONCURRENCY else []
    parts += ["--duration", f"{args.duration:g}"] if args.duration != DURATION_S else []
    parts += [flag for flag, on in (("--no-baseline", args.no_baseline), ("--no-agents", args.no_agents)) if on]
    return shlex.join([*parts, *repeat_flags(args)])
