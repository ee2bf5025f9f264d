"""Explain the ratio between two configurations: measure each switch between them alone, left out, and in sequence.

A and B are files of settings (YAML or JSON), options (`weights=fp32,prefix_caching=false`), or `defaults`; `--switch`
adds to both. Or they are two points of results, whose flags differ: then nothing is measured, and the other
combinations come from `--points`. What each switch accounts for is told as a ratio with its 95 % interval from repeated
runs, and as its share of the whole (of logarithms, since ratios multiply). A share smaller than the spread between runs
is called noise.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from longturn.cli.options import check_number
from longturn.errors import ConfigError, LongturnError

if TYPE_CHECKING:
    from longturn.cli.explain_plan import Comparison
    from longturn.cli.explain_result import Measured
    from longturn.report.explanation import Explanation
    from longturn.report.figures_of import FigureKind

DEFAULT_LOAD = "replay --pause-scale 0"
DEFAULT_METRICS = ("total", "interactivity.p90", "ttft.p50")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "a", nargs="?", metavar="A", help="file of settings, options, `defaults`, or a point [defaults]"
    )
    parser.add_argument("b", nargs="?", metavar="B", help="the same [as A, but for the switches]")
    parser.add_argument(
        "--switch",
        action="append",
        default=[],
        metavar="NAME=OFF:ON",
        help="a setting's values in A and B, such as prefix_caching=false:true; repeatable",
    )
    parser.add_argument(
        "--together", action="append", default=[], metavar="NAME,NAME", help="settings that count as one switch"
    )
    parser.add_argument(
        "--order", metavar="NAME,NAME", help="order in which the sequence throws the switches [as given]"
    )
    parser.add_argument(
        "--metric",
        action="append",
        metavar="NAME",
        help="figure to explain: total, output, ttft.p50, itl.p90, interactivity.p90, e2e.p90, job.p50 ...; repeatable "
        f"[{', '.join(DEFAULT_METRICS)}]",
    )
    parser.add_argument("--repeat", type=int, default=3, metavar="N", help="runs of each combination, taking turns [3]")
    parser.add_argument(
        "--load",
        default=DEFAULT_LOAD,
        metavar="TEXT",
        help="verb of `longturn bench` (agentx or replay) with its options, of one concurrency: "
        f'"agentx --concurrency 2 --duration 30" ["{DEFAULT_LOAD}"]',
    )
    parser.add_argument("--points", nargs="+", metavar="PATH", help="with two points: files or folders of the others")
    parser.add_argument("--dry-run", action="store_true", help="list the runs and their time, measure nothing")
    parser.add_argument(
        "--out", default="results/explain", metavar="DIR", help="points, explanation.json and page [results/explain]"
    )


def run(args: argparse.Namespace) -> int:
    check_number("--repeat", args.repeat, 1)

    from longturn.report.figures_of import figure_kind

    kinds = [figure_kind(name) for name in dict.fromkeys(args.metric or DEFAULT_METRICS)]
    pair = _pair_of_points(args)
    if pair is not None:
        from longturn.cli.explain_points import explain_points

        return _finish(args, explain_points(pair, args.points or [], kinds, args.order, command_of(args)))
    if args.points:
        raise ConfigError("--points is for two points: A and B are configurations here")
    order = [name.strip() for name in args.order.split(",")] if args.order else []

    from longturn.cli.explain_plan import compare

    comparison = compare(args.a, args.b, args.switch, args.together, order)
    return _measure(args, comparison, kinds)


def _pair_of_points(args: argparse.Namespace) -> tuple[Path, Path] | None:
    """A and B, if they are points."""
    from longturn.report.point import POINT_KIND
    from longturn.report.schema import kind_of, read_file

    paths = [Path(text) for text in (args.a, args.b) if text is not None]
    points = [path.is_file() and kind_of(read_file(path)) == POINT_KIND for path in paths]
    if not any(points):
        return None
    if points != [True, True]:
        raise ConfigError("A and B are two points or two configurations, not one of each")
    if args.switch or args.together:
        raise ConfigError("--switch and --together are for configurations: switches of points are their flags")
    return paths[0], paths[1]


def _measure(args: argparse.Namespace, comparison: Comparison, kinds: list[FigureKind]) -> int:
    from longturn.cli.explain_result import Measured, explain, plan_json, plan_text
    from longturn.cli.explain_run import check_load
    from longturn.cli.main import INTERRUPTED
    from longturn.report.schema import check_writable

    try:
        load = shlex.split(args.load)
    except ValueError as error:  # a quote without its end
        raise ConfigError(f"--load: {error}: {args.load}") from error
    check_load(load)
    measured = Measured(comparison, load, args.repeat, Path(args.out))
    if args.dry_run:
        print(json.dumps(plan_json(measured), indent=1) if args.json else plan_text(measured))
        return 0
    check_writable(Path(args.out))
    failure: LongturnError | None = None
    interrupted = False
    try:
        _take_runs(measured)
    except KeyboardInterrupt:
        interrupted = True
    except LongturnError as error:
        failure = error
    missing = len(measured.missing())
    explanation = explain(measured, kinds, command_of(args))
    if explanation is not None:
        code = _finish(args, explanation)
    else:
        code = INTERRUPTED
    if failure is not None:
        raise failure
    if interrupted:
        done = measured.planned - missing
        print(
            f"longturn: interrupted, {done} of {measured.planned} runs are saved; the same command goes on from there",
            file=sys.stderr,
        )
        return INTERRUPTED
    return code


def _take_runs(measured: Measured) -> None:
    from longturn.cli.terminal import Progress

    for number, (on, repeat) in enumerate(todo := measured.missing(), 1):
        progress = Progress(f"explain {number}/{len(todo)}")
        progress.waiting(f"{measured.comparison.label(on)}, run {repeat + 1}")
        try:
            measured.take(on, repeat, progress.tick)
        finally:
            progress.close()


def _finish(args: argparse.Namespace, explanation: Explanation) -> int:
    """Print and save; returns the exit code."""
    from longturn.cli.explain_text import explanation_text
    from longturn.report.explanation import explanation_to_json, save_explanation
    from longturn.report.explanation_page import write_explanation

    if args.json:
        sys.stdout.write(explanation_to_json(explanation).decode())
    else:
        print(explanation_text(explanation), end="\n\n")
    sys.stdout.flush()
    out = Path(args.out)
    save_explanation(explanation, out / "explanation.json")
    write_explanation(explanation, out / "index.html")
    if not args.json:
        print(f"results: {out}\npage:    {(out / 'index.html').resolve().as_uri()}")
    return 0


def command_of(args: argparse.Namespace) -> str:
    """The command that repeats this; files without their folders, which are this machine's."""
    sides = [Path(text).name if Path(text).exists() else text for text in (args.a, args.b) if text]
    parts = ["longturn", "explain", *sides]
    for flag, values in (("--switch", args.switch), ("--together", args.together), ("--metric", args.metric or [])):
        parts += [word for value in values for word in (flag, value)]
    parts += ["--order", args.order] if args.order else []
    parts += ["--repeat", str(args.repeat)] if args.repeat != 3 else []
    parts += ["--load", args.load] if args.load != DEFAULT_LOAD else []
    parts += ["--points", *(Path(text).name for text in args.points)] if args.points else []
    return shlex.join(parts)
