"""Replay recorded agent sessions against any server with the OpenAI chat API, and measure it."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from longturn.cli.options import check_number
from longturn.errors import ConfigError

if TYPE_CHECKING:
    from longturn.bench.replay import Replay, ReplayOptions, ReplayProgress
    from longturn.bench.session import Session
    from longturn.bench.target import TargetModel


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, metavar="URL", help="the server, such as http://127.0.0.1:8000")
    parser.add_argument("--model", metavar="NAME", help="model to ask for; the server's first one if left out")
    parser.add_argument("--api-key", metavar="KEY", help="bearer key")
    parser.add_argument(
        "--session",
        action="append",
        metavar="NAME|FILE",
        help="a shipped session or a session file; may be repeated [repo_fix]",
    )
    parser.add_argument("--lanes", type=int, default=1, metavar="N", help="sessions alive at once [1]")
    parser.add_argument("--copies", type=int, default=1, metavar="N", help="times that each session is replayed [1]")
    parser.add_argument("--pause-scale", type=float, default=1.0, metavar="X", help="factor on the recorded pauses [1]")
    parser.add_argument(
        "--free-output",
        action="store_true",
        help="let the model end its answers; otherwise `ignore_eos` fixes their length",
    )
    parser.add_argument(
        "--shared-cache",
        action="store_true",
        help="send no `cache_salt`: sessions and earlier runs share the server's prefix cache",
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="longest time for one answer, seconds [600]"
    )
    parser.add_argument("--title", default="Agent session replay", metavar="TEXT", help="title of the page")
    parser.add_argument(
        "--out", default="results/replay", metavar="DIR", help="folder for result.json and index.html [results/replay]"
    )


def run(args: argparse.Namespace) -> int:
    check_number("--lanes", args.lanes, 1)
    check_number("--copies", args.copies, 1)
    check_number("--pause-scale", args.pause_scale, 0)
    if not args.timeout > 0:
        raise ConfigError(f"--timeout must be more than 0, not {args.timeout}")

    from longturn.bench.replay import ReplayOptions
    from longturn.bench.session import load_named_session
    from longturn.cli.main import INTERRUPTED
    from longturn.cli.results import make_result, make_run, show_and_save
    from longturn.cli.terminal import Progress
    from longturn.report.schema import check_writable

    sessions = [load_named_session(name) for name in args.session or ["repo_fix"]]
    check_writable(Path(args.out))
    options = ReplayOptions(
        pause_scale=args.pause_scale,
        lanes=args.lanes,
        copies=args.copies,
        fixed_output=not args.free_output,
        separate_caches=not args.shared_cache,
    )
    progress = Progress("replay")
    try:
        model, measured = replay_url(args.url, args.model, args.api_key, args.timeout, sessions, options, progress)
    finally:
        progress.close()
    outcome = make_run("measured", args.url, measured, model)
    result = make_result(args.title, _command(args), model.name, sessions, options, [outcome])
    show_and_save(result, Path(args.out), as_json=args.json)
    if measured.interrupted:
        print(
            f"longturn: interrupted after {len(outcome.turns)} of {measured.planned_turns} turns, results are partial",
            file=sys.stderr,
        )
        return INTERRUPTED
    return report_failures(measured)


def report_failures(measured: Replay) -> int:
    """Print what failed, if anything did; returns the exit code."""
    failed = [record for record in measured.records if not record.answer.ok]
    if failed:
        first = failed[0]
        print(
            f"longturn: error: {len(failed)} of {measured.planned_turns} turns failed, first {first.session} turn "
            f"{first.index + 1}: {first.answer.error}",
            file=sys.stderr,
        )
    return 1 if measured.partial else 0


def replay_url(
    url: str,
    model: str | None,
    api_key: str | None,
    timeout_s: float,
    sessions: list[Session],
    options: ReplayOptions,
    progress: ReplayProgress,
) -> tuple[TargetModel, Replay]:
    """Replay against the server at `url`; returns what it tells of the model, and what was measured.

    Raises:
        TargetError: the server cannot be reached or lacks the model.
    """
    import asyncio

    from longturn.bench.client import ChatClient
    from longturn.bench.replay import replay

    async def measure() -> tuple[TargetModel, Replay]:
        async with ChatClient(url, api_key=api_key, timeout_s=timeout_s) as client:
            name = await client.choose_model(model)
            served = (await client.served_models())[name]
            return served, await replay(client, name, sessions, options, progress)

    return asyncio.run(measure())


def _command(args: argparse.Namespace) -> str:
    """The command that repeats this run, without the key."""
    parts = ["longturn", "bench", "replay", "--url", args.url]
    if args.model:
        parts += ["--model", args.model]
    for name in args.session or []:
        parts += ["--session", Path(name).name if Path(name).is_absolute() else name]
    for flag, value, default in (
        ("--lanes", args.lanes, 1),
        ("--copies", args.copies, 1),
        ("--pause-scale", args.pause_scale, 1.0),
    ):
        if value != default:
            parts += [flag, f"{value:g}"]
    parts += [flag for flag, on in (("--free-output", args.free_output), ("--shared-cache", args.shared_cache)) if on]
    return shlex.join(parts)
