"""One run of an explanation: a server with one configuration, a load against it, one point."""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from longturn.bench.presets import rules_of
from longturn.cli import agentx, replay
from longturn.cli.agentx_load import concurrency
from longturn.cli.local_server import client_key, local_server
from longturn.cli.replay_points import points_of_result
from longturn.cli.version import longturn_version
from longturn.config import EngineConfig
from longturn.errors import ConfigError, LongturnError
from longturn.report.point import Engine, Point, load_point
from longturn.report.schema import load_result

LOADS = ("agentx", "replay")
WALL = "explain.wall_s"
"""Flag of a point: seconds that its run took with the server's start and end."""
_OWN = ("--url", "--out", "--json", "--model", "--api-key", "--inproc")


class RunError(LongturnError):
    """A run of an explanation gave no point that can be compared."""


def check_load(words: list[str]) -> None:
    """Raises ConfigError unless the load is a verb of `longturn bench` that gives one point, less what is set here."""
    if not words or words[0] not in LOADS:
        raise ConfigError(f"--load starts with {' or '.join(LOADS)}, not '{words[0] if words else ''}'")
    for word in words[1:]:
        if word.partition("=")[0] in _OWN:
            raise ConfigError(f"--load: {word.partition('=')[0]} is set by explain")
    args = load_arguments(words)
    if words[0] == "agentx":
        agentx.check_arguments(args)
        rules_of(args.preset, args.duration)
        if len(concurrency(args.concurrency)) != 1:
            raise ConfigError(f"--load: an explanation needs one concurrency, not {args.concurrency}")


def load_arguments(words: Sequence[str]) -> argparse.Namespace:
    """A load as its verb reads it, for a server that is not there yet. Raises ConfigError for an unknown option."""
    from longturn.cli.main import verb_parser

    module = agentx if words[0] == "agentx" else replay
    parser = verb_parser(words[0], f"longturn bench {words[0]}", module, "")
    return parser.parse_args(["--url", "http://unknown", *words[1:]])


def measure(
    config: EngineConfig, load: list[str], label: str, flags: dict[str, str], tick: Callable[[], None]
) -> Point:
    """Start a server, put the load on it, stop it.

    Args:
        config: of the server.
        load: a verb of `longturn bench` and its options.
        label: name of the point's curve.
        flags: of the point.
        tick: called several times a second while the server starts.

    Raises:
        RunError: the load failed, or gave another number of points than one.
        KeyboardInterrupt: it was interrupted; a partial run is thrown away.
    """
    from longturn.cli.main import INTERRUPTED, main

    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="longturn-explain-") as scratch:
        folder = Path(scratch) / "run"
        with local_server(config, on_wait=tick) as url:
            command = ["bench", load[0], "--url", url, *load[1:], "--out", str(folder)]
            command += ["--api-key", key] if (key := client_key(config)) is not None else []
            with contextlib.redirect_stdout(io.StringIO()):
                code = main(command)
        if code == INTERRUPTED:
            raise KeyboardInterrupt
        if code:
            raise RunError(f"{label}: `longturn bench {' '.join(load)}` ended with exit code {code}")
        points = _points(folder, load[0])
    if len(points) != 1:
        raise RunError(f"--load gives {len(points)} points, and an explanation needs one: name one concurrency")
    flags = {**points[0].flags, **flags, WALL: f"{time.monotonic() - start_s:.1f}"}
    engine = Engine(name="longturn", version=longturn_version())
    return msgspec.structs.replace(points[0], configuration=label, engine=engine, flags=flags)


def _points(folder: Path, verb: str) -> list[Point]:
    if verb == "replay":
        return points_of_result(load_result(folder / "result.json"))
    return [load_point(path) for path in sorted(folder.glob("agentx-*.json"))]
