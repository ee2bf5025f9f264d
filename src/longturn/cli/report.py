"""Put points of many runs on one page: frontiers, ratios at matched interactivity, latencies side by side."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from longturn.errors import ConfigError

if TYPE_CHECKING:
    from longturn.report.explanation import Explanation
    from longturn.report.point import Point
    from longturn.report.store import Store

STATISTICS = ("mean", "p50", "p75", "p90", "p95", "p99")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "results",
        nargs="*",
        metavar="RESULTS",
        help="results of `bench agentx`, `bench replay` and `explain`, or folders",
    )
    parser.add_argument(
        "--store", metavar="FILE", help="SQLite store: the points given are added, and all it holds are shown"
    )
    parser.add_argument(
        "--select",
        action="append",
        metavar="COLUMN=VALUE",
        help="with --store, show these points only: model=..., chip=..., valid=1; may be repeated",
    )
    parser.add_argument("--out", default="results/report.html", metavar="PAGE", help="the page [results/report.html]")
    parser.add_argument(
        "--serve", type=int, metavar="PORT", help="serve the page, made anew when results change, instead of writing it"
    )
    parser.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="with --serve, listen here [127.0.0.1]")
    parser.add_argument("--title", default="Throughput against interactivity", metavar="TEXT", help="title of the page")
    parser.add_argument("--baseline", metavar="NAME", help="configuration to compare with [the first one]")
    parser.add_argument(
        "--percentile", choices=STATISTICS, default="p90", help="statistic of ITL for the printed figures [p90]"
    )
    parser.add_argument(
        "--at", action="append", type=float, metavar="X", help="interactivity to compare at, tok/s; may be repeated"
    )


def run(args: argparse.Namespace) -> int:
    if not args.results and not args.store:
        raise ConfigError("nothing to report: name result files, folders or --store FILE")
    if args.select and not args.store:
        raise ConfigError("--select chooses from a store: give --store FILE too")
    for value in args.at or []:
        if not 0 < value < float("inf"):
            raise ConfigError(f"--at must be more than 0, not {value}")

    if args.serve is not None and not 0 <= args.serve <= 65535:
        raise ConfigError(f"--serve must be a port, 0 to 65535, not {args.serve}")

    import json

    from longturn.cli.comparison import comparison, comparison_text
    from longturn.report.series import group
    from longturn.report.sweep import write_sweep

    points = _points(args)
    explanations = _explanations(args)
    series = group(points)
    compared = comparison(points, series, args.percentile, args.baseline, args.at)
    if args.serve is not None:
        return _serve(args)
    write_sweep(points, args.title, Path(args.out), args.baseline, explanations=explanations)
    if args.json:
        json.dump({**compared, "page": args.out}, sys.stdout, indent=1)
        print()
    else:
        print(comparison_text(points, series, compared), end="\n\n")
        print(f"page: {Path(args.out).resolve().as_uri()}")
    return 0


def _serve(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    import json

    from longturn.report.live import LivePage, live_server
    from longturn.report.sweep import render_sweep

    def render(stamp: str) -> str:
        return render_sweep(_points(args), args.title, args.baseline, explanations=_explanations(args), stamp=stamp)

    server = live_server(LivePage(render, lambda: _stamp(args)), args.host, args.serve)
    host = f"[{args.host}]" if ":" in args.host else args.host
    url = f"http://{host}:{server.server_address[1]}/"
    print(json.dumps({"ready": url}) if args.json else f"page: {url} (Ctrl-C ends)", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        return 0
    finally:
        server.server_close()
    return 0


def _stamp(args: argparse.Namespace) -> str:
    """Another text after any change of the files that the page is made of."""
    import hashlib

    names = [*args.results, *([args.store] if args.store else [])]
    files = [
        file for name in names for file in ([Path(name)] if not Path(name).is_dir() else Path(name).rglob("*.json"))
    ]
    states = []
    for file in sorted(files):
        try:
            state = file.stat()
        except OSError:
            continue  # deleted since it was listed: its absence changes the stamp
        states.append(f"{file} {state.st_mtime_ns} {state.st_size}")
    return hashlib.sha256("\n".join(states).encode()).hexdigest()[:16]


def _points(args: argparse.Namespace) -> list[Point]:
    """The points to show, each once, in the order in which they were named; of a folder replays come last.

    Raises:
        ResultError: a file is no result, or there is nothing to show.
    """
    from longturn.report.explanation import EXPLANATION_KIND
    from longturn.report.point import point_from_json, point_id
    from longturn.report.schema import ResultError
    from longturn.report.store import Store

    found = [
        (path, data) for kind, path in _files(args.results) if kind != EXPLANATION_KIND for data in _point_data(path)
    ]
    if args.store:
        with Store(Path(args.store), create=bool(found)) as store:
            for path, data in found:
                store.add(data, str(path))
            stored = _selected(store, args.select or [])
        if not stored:
            raise ResultError(f"no points: {args.store} holds none that fit")
        return stored
    if not found:
        raise ResultError("no points: an explanation is shown beside the points of a page")
    points: dict[str, Point] = {}
    for path, data in found:
        points.setdefault(point_id(data), point_from_json(data, str(path)))
    return list(points.values())


def _explanations(args: argparse.Namespace) -> list[Explanation]:
    """Explanations among the files and folders that were named."""
    from longturn.report.explanation import EXPLANATION_KIND, load_explanation

    return [load_explanation(path) for kind, path in _files(args.results) if kind == EXPLANATION_KIND]


def _point_data(path: Path) -> list[bytes]:
    """JSON of the points in a file: its own bytes, or what a replay's runs are as points.

    Raises:
        ResultError: it cannot be read, or is a damaged replay; other files are the reader's of points to refuse.
    """
    from longturn.cli.replay_points import points_of_result
    from longturn.report.point import point_to_json
    from longturn.report.schema import KIND, from_json, kind_of, read_file

    data = read_file(path)
    if kind_of(data) == KIND:
        return [point_to_json(point) for point in points_of_result(from_json(data, str(path)))]
    return [data]


def _selected(store: Store, filters: list[str]) -> list[Point]:
    wanted: dict[str, str | int] = {}
    for text in filters:
        column, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--select '{text}' is not COLUMN=VALUE")
        # SQLite compares by type, and a text that looks like a number is one in a number's column only.
        wanted[column] = int(value) if column in ("chips", "concurrency", "valid") and value.isdigit() else value
    return [stored.point for stored in store.select(**wanted)]


def _files(names: list[str]) -> list[tuple[str | None, Path]]:
    """Named files, and in named folders every file that says it is a result: points, then replays and explanations.

    Returns:
        The kind of each, and the file.

    Raises:
        ResultError: a folder without results, or a path that is not there.
    """
    from longturn.report.explanation import EXPLANATION_KIND
    from longturn.report.point import POINT_KIND
    from longturn.report.schema import KIND, ResultError, kind_of, read_file

    found: list[tuple[str | None, Path]] = []
    for name in names:
        path = Path(name)
        if not path.is_dir():
            found.append((kind_of(read_file(path)), path))
            continue
        # A folder holds other JSON too: traces, comparisons of quality.
        inside = [(kind_of(read_file(file)), file) for file in sorted(path.rglob("*.json"))]
        results = [pair for wanted in (POINT_KIND, KIND, EXPLANATION_KIND) for pair in inside if pair[0] == wanted]
        if not results:
            raise ResultError(f"{path}: no result of `bench agentx`, `bench replay` or `explain` in this folder")
        found += results
    return found
