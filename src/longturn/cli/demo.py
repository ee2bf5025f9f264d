"""Replay an agent session on a model of your own machine, with the prefix cache on and off, and write a page."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from longturn.cli.options import add_config_flags, config_from_args
from longturn.config import EngineConfig
from longturn.errors import ConfigError, LongturnError

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
    if not args.pause_scale >= 0:
        raise ConfigError(f"--pause-scale must be 0 or more, not {args.pause_scale}")
    config = config_from_args(args)

    from longturn.bench.replay import ReplayOptions
    from longturn.bench.session import load_named_session
    from longturn.cli.main import INTERRUPTED
    from longturn.cli.replay import report_failures
    from longturn.cli.results import make_result, make_run, result_table, save, totals_lines
    from longturn.report.schema import to_json

    session = load_named_session(args.session)
    options = ReplayOptions(pause_scale=args.pause_scale)
    without = dataclasses.replace(config, cache=dataclasses.replace(config.cache, prefix_caching=False))
    plans = [("cache on", config, _serve_command(args, ""))]
    if not args.no_baseline:
        plans.append(("cache off", without, _serve_command(args, f" --set {CACHE_OFF}")))
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
    json_path, page_path = save(result, Path(args.out))
    if args.json:
        sys.stdout.write(to_json(result).decode())
    else:
        print(f"{session.id} on {model}, {len(session.turns)} turns\n")
        print(result_table(result), end="\n\n")
        print("\n".join(line for outcome in runs for line in totals_lines(outcome)), end="\n\n")
        print(f"results: {json_path}\npage:    {page_path.resolve().as_uri()}")
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


def _serve_command(args: argparse.Namespace, more: str) -> str:
    return "longturn serve" + (" DIR" if args.model_dir else "") + more


def _command(args: argparse.Namespace) -> str:
    parts = ["longturn demo"]
    if args.session != "repo_fix":
        parts.append(f"--session {Path(args.session).name}")
    if args.pause_scale != 0.25:
        parts.append(f"--pause-scale {args.pause_scale:g}")
    return " ".join(parts)
