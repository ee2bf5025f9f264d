"""Replay recorded agent session trees in a closed loop by AgentX rules: one point for each number of live trees."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from longturn.cli.agentx_load import PRESET_NAMES, add_sessions, concurrency, token_ids
from longturn.cli.options import add_file_and_sets, check_number
from longturn.errors import ConfigError

if TYPE_CHECKING:
    from longturn.report.point import Point


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", help="the server, such as http://127.0.0.1:8000")
    parser.add_argument(
        "--inproc", action="store_true", help="no server: the engine in a process of its own, driven without HTTP"
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="model to ask for; the server's first one if left out. With --inproc its directory or file",
    )
    parser.add_argument("--api-key", metavar="KEY", help="key, sent as a bearer token")
    parser.add_argument(
        "--api", choices=["chat", "completions"], default="chat", help="chat messages, or prompts as token ids [chat]"
    )
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="longest time for one answer [600]")
    load = parser.add_argument_group("load")
    add_sessions(load, concurrency_default="1")
    load.add_argument(
        "--preset",
        choices=PRESET_NAMES,
        default="quick",
        help="rules of the replay: quick takes two minutes a point and is for a first look, agentx (an hour) and "
        "agentx-mvp (half an hour) can be compared with published points [quick]",
    )
    load.add_argument("--duration", type=float, metavar="S", help="seconds of each point [as the preset]")
    load.add_argument("--seed", type=int, metavar="N", help="of sessions, start points and prompts [as the preset]")
    load.add_argument("--no-split", action="store_true", help="look for no agents in flattened captures")
    load.add_argument(
        "--derive-system",
        action="store_true",
        help="find the system prompt of captures that declare none; replays of a session then share it",
    )
    load.add_argument(
        "--carry-over",
        choices=["recorded", "live"],
        default="recorded",
        help="what a prompt's history holds: made-up text of recorded lengths, or the answers themselves [recorded]",
    )
    load.add_argument(
        "--token-ids", metavar="LOW-HIGH", help="ids for prompts, where a server with completions has no /tokenize"
    )
    load.add_argument(
        "--token-counts",
        action="store_true",
        help="ask for usage in every event: counts the tokens that the first one bundles (ITL), costs some bytes",
    )
    add_file_and_sets(parser.add_argument_group("the engine, with --inproc"))
    known = parser.add_argument_group("what is measured, for the result")
    known.add_argument(
        "--name", metavar="TEXT", help="name of the curve [the model's, and settings that a Longturn server tells]"
    )
    known.add_argument("--engine", metavar="NAME[:VERSION]", help="the server's engine [as the server tells]")
    known.add_argument("--quantisation", metavar="NAME", help="weights as served, such as nvfp4 [as the server tells]")
    known.add_argument("--chip", metavar="NAME", help="accelerator or processor [as the server tells]")
    known.add_argument(
        "--chips",
        type=int,
        default=1,
        metavar="N",
        help="chips of the whole deployment; throughput is told per chip [1]",
    )
    known.add_argument(
        "--price",
        type=float,
        metavar="USD",
        help="US dollars per chip and hour, for the cost of tokens in `longturn report`",
    )
    known.add_argument(
        "--power",
        type=float,
        metavar="W",
        help="watts per chip and its share of the machine, for tokens per joule in `longturn report`",
    )
    parser.add_argument(
        "--out",
        default="results/agentx",
        metavar="DIR",
        help="folder for a JSON file of each point, and the page [results/agentx]",
    )


def run(args: argparse.Namespace) -> int:
    check_arguments(args)

    import asyncio
    import json

    from longturn.cli.agentx_point import points_table, reasons_text
    from longturn.cli.agentx_progress import SweepProgress
    from longturn.cli.agentx_sweep import measure_sweep, plan_sweep
    from longturn.cli.main import INTERRUPTED
    from longturn.report.point import point_to_json
    from longturn.report.schema import check_writable
    from longturn.report.sweep import write_sweep

    plan = plan_sweep(args)
    out = Path(args.out)
    check_writable(out)
    points: list[Point] = []
    progress = SweepProgress(plan.rules)
    try:
        interrupted = asyncio.run(measure_sweep(plan, out, points, progress))
    finally:
        progress.close()
        if points:
            if args.json:
                print(json.dumps([json.loads(point_to_json(point)) for point in points]))
            else:
                print(points_table(points), reasons_text(points), sep="\n\n", end="\n\n")
            sys.stdout.flush()
            page = out / "index.html"
            write_sweep(points, "Agent session replay", page)
            if not args.json:
                print(f"results: {out}\npage:    {page.resolve().as_uri()}")
    if interrupted:
        what = "results are partial" if points else "nothing was measured"
        print(f"longturn: interrupted, {what}", file=sys.stderr)
        return INTERRUPTED
    return exit_code(points)


def check_arguments(args: argparse.Namespace) -> None:
    """Raises ConfigError for values out of range, before anything is loaded."""
    concurrency(args.concurrency)
    token_ids(args.token_ids, args.api)
    check_number("--chips", args.chips, 1)
    if args.engine is not None and not args.engine.partition(":")[0].strip():
        raise ConfigError(f"--engine must be NAME or NAME:VERSION, not '{args.engine}'")
    if not args.timeout > 0:
        raise ConfigError(f"--timeout must be more than 0, not {args.timeout}")
    for flag, value in (("--price", args.price), ("--power", args.power)):
        if value is not None:
            check_number(flag, value, 0)
    if args.max_context is not None:
        check_number("--max-context", args.max_context, 2)
    if args.inproc == bool(args.url):
        raise ConfigError(
            "--inproc measures without a server: leave --url out"
            if args.url
            else "name a server with --url, or give --inproc"
        )
    if not args.inproc and (args.config is not None or args.sets):
        flag = "--set" if args.config is None else "--config"
        raise ConfigError(f"{flag} is for --inproc: a server has settings of its own")


def exit_code(points: list[Point]) -> int:
    """1 where a point was cut short or nothing succeeded; an override by the user is no failure."""
    failed = [
        reason
        for point in points
        for reason in point.validity.reasons
        if reason.startswith(("run_cancelled", "no_success"))
    ]
    if failed:
        print(f"longturn: error: {failed[0]}", file=sys.stderr)
    return 1 if failed else 0
