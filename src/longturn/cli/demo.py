"""Replay an agent session on a model of your own machine, with the prefix cache on and off, and write a page."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from longturn.cli.options import add_config_flags, check_number, config_from_args, repeat_flags
from longturn.config import EngineConfig
from longturn.errors import LongturnError

if TYPE_CHECKING:
    from longturn.bench.replay import Replay, ReplayOptions
    from longturn.bench.session import Session
    from longturn.report.schema import Run

CACHE_OFF = "cache.prefix_caching=false"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--session", default="repo_fix", metavar="NAME|FILE", help="a shipped session or a session file [repo_fix]"
    )
    parser.add_argument(
        "--pause-scale", type=float, default=0.25, metavar="X", help="factor on the recorded pauses [0.25]"
    )
    parser.add_argument("--no-baseline", action="store_true", help="leave out the run with the cache off")
    parser.add_argument(
        "--out", default="results/demo", metavar="DIR", help="folder for result.json and index.html [results/demo]"
    )
    add_config_flags(parser)


def run(args: argparse.Namespace) -> int:
    check_number("--pause-scale", args.pause_scale, 0)
    config = config_from_args(args)

    from longturn.bench.replay import ReplayOptions
    from longturn.bench.session import load_named_session
    from longturn.cli.main import INTERRUPTED
    from longturn.cli.replay import report_failures
    from longturn.cli.results import make_result, make_run, show_and_save
    from longturn.report.schema import check_writable

    session = load_named_session(args.session)
    check_writable(Path(args.out))
    options = ReplayOptions(pause_scale=args.pause_scale)
    without = dataclasses.replace(config, cache=dataclasses.replace(config.cache, prefix_caching=False))
    plans = [("cache on", config, _serve_command(args))]
    if not args.no_baseline:
        plans.append(("cache off", without, _serve_command(args, "--set", CACHE_OFF)))
    runs: list[Run] = []
    interrupted = False
    failure: LongturnError | None = None
    code = 0
    model = ""
    for name, served, command in plans:
        try:
            with _replayed(name, served, session, options) as (model, measured):
                runs.append(make_run(name, command, measured))
        except KeyboardInterrupt:
            interrupted = True
            break
        except LongturnError as error:
            failure = error
            break
        interrupted = measured.interrupted
        code = report_failures(measured) if not interrupted else code
        if measured.partial:
            break
    if not runs:
        raise failure or KeyboardInterrupt
    result = make_result("An agent session, turn by turn", _command(args), model, [session], options, runs)
    if not args.json:
        print(f"{session.id} on {model}, {len(session.turns)} turns\n")
    show_and_save(result, Path(args.out), as_json=args.json)
    if interrupted:
        print("longturn: interrupted; partial results saved", file=sys.stderr)
        return INTERRUPTED
    if failure is not None:
        raise failure
    return code


@contextmanager
def _replayed(
    name: str, config: EngineConfig, session: Session, options: ReplayOptions
) -> Iterator[tuple[str, Replay]]:
    """Start a server, replay the session against it, yield the model's name and what was measured, stop the server."""
    from longturn.cli.local_server import local_server
    from longturn.cli.replay import replay_url
    from longturn.cli.terminal import Progress

    progress = Progress(name)
    try:
        progress.waiting("starting the server")
        with local_server(config, on_wait=progress.tick) as url:
            key = config.server.api_keys[0] if config.server.api_keys else None
            model, measured = replay_url(url, None, key, 600.0, [session], options, progress)
            yield model, measured
            progress.waiting("stopping the server")
    finally:
        progress.close()


def _serve_command(args: argparse.Namespace, *more: str) -> str:
    return shlex.join(["longturn", "serve", *(["DIR"] if args.model_dir else []), *repeat_flags(args), *more])


def _command(args: argparse.Namespace) -> str:
    """The command that repeats this run, without keys and paths."""
    parts = ["longturn", "demo", *(["DIR"] if args.model_dir else [])]
    if args.session != "repo_fix":
        parts += ["--session", Path(args.session).name]
    if args.pause_scale != 0.25:
        parts += ["--pause-scale", f"{args.pause_scale:g}"]
    parts += ["--no-baseline"] if args.no_baseline else []
    return shlex.join([*parts, *repeat_flags(args)])
