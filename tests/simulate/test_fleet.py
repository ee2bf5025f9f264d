"""How many chips a number of sessions needs, by hand, and through the verb."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from longturn.cli.main import main
from longturn.cli.simulate_fleet import fleet_lines, fleet_points, fleets
from longturn.report.point import Point, load_point
from longturn.simulate.sweep import most_sessions
from tests.simulate.test_cli import refused, simulate, trace

__all__ = ["trace"]  # a fixture


def test_most_sessions_by_hand() -> None:
    loads = [(8, 160.0), (16, 120.0), (32, 60.0)]
    assert most_sessions(loads, 200.0) is None and most_sessions([], 1.0) is None
    assert most_sessions(loads, 160.0) == (8, False)
    assert most_sessions(reversed(loads), 140.0) == (12, False), "in any order"
    assert most_sessions(loads, 100.0) == (16 + math.floor(16 * 20 / 60), False)
    assert most_sessions(loads, 60.0) == (32, True) and most_sessions(loads, 10.0) == (32, True)
    assert most_sessions([(1, 50.0), (2, 30.0), (3, 45.0)], 40.0) == (1, False), (
        "the first load that is too slow ends it"
    )


def test_the_fleet_is_the_one_with_the_fewest_chips(tmp_path: Path, trace: str) -> None:
    assert simulate(tmp_path / "out", trace, "--concurrency", "1", "--layout", "tp4") == 0
    base = load_point(next((tmp_path / "out").glob("*.json")))
    assert base.band is not None and base.metrics.interactivity is not None

    def point(name: str, chips: int, trees: int, speed: float, *, band: bool = True) -> Point:
        def speeds(scale: float) -> Any:
            return msgspec.structs.replace(base.metrics.interactivity, p90=speed * scale)

        ends = [msgspec.structs.replace(base.band.slow, interactivity=speeds(scale)) for scale in (0.8, 1.25)]
        return msgspec.structs.replace(
            base,
            configuration=name,
            concurrency=trees,
            platform=msgspec.structs.replace(base.platform, chips=chips),
            metrics=msgspec.structs.replace(base.metrics, interactivity=speeds(1.0)),
            band=msgspec.structs.replace(base.band, slow=ends[0], fast=ends[1]) if band else None,
        )

    small = [point("small", 2, trees, speed) for trees, speed in ((4, 150.0), (8, 100.0), (16, 50.0))]
    large = [point("large", 8, trees, speed) for trees, speed in ((20, 130.0), (40, 110.0), (60, 105.0))]
    points = [*small, *large]
    at = [100.0, 120.0, 125.0, 200.0]
    found = fleets(points, at, 200)
    assert found[3] is None
    assert [(one.configuration, one.sessions_per_replica, one.chips) for one in found[:3] if one is not None] == [
        ("large", 60, 32),  # 4 replicas of 8; small: 25 of 2
        ("large", 30, 56),  # 7 of 8; small holds 6: 34 of 2
        ("large", 25, 64),  # small holds 6: 68 chips
    ]
    first = found[0]
    assert first is not None and first.more_fit and first.least_chips == 32
    # Slow, large has 104 at 20 and 88 at 40: 25 sessions at 100.
    assert first.most_chips == 64
    assert {points[index].configuration for index in fleet_points(points, at, 200)} == {"large"}
    lines = fleet_lines(found, at, 200)
    assert "32 chips (32 to 64), 4 x large with 60 sessions each, the most that was tried" in lines[0]
    # Slow, large has 104 at its smallest load.
    assert "(at least 32: with slower steps no load" in lines[2] and "no layout is that fast" in lines[3]
    bare = fleets([point("bare", 4, 8, 101.0, band=False)], [100.0], 9)[0]
    assert bare is not None and (bare.chips, bare.least_chips, bare.most_chips) == (8, None, None)
    assert "8 chips, 2 x bare" in fleet_lines([bare], [100.0], 9)[0]


def test_a_sweep_says_how_many_chips_agents_need(
    tmp_path: Path, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--sweep", "--chips", "2", "--concurrency", "1,3", "--at", "20", "--agents", "100", "--platform", "b300"]
    assert simulate(tmp_path / "out", trace, *more) == 0
    shown = capsys.readouterr().out
    assert "100 sessions at 20 tok/s/user (P90): 68 chips (68 to 68), 34 x m3 on b300" in shown
    assert simulate(tmp_path / "out", trace, *more, "--json") == 0
    swept = json.loads(capsys.readouterr().out)
    (fleet,) = swept["fleets"]
    assert (fleet["chips"], fleet["sessions_per_replica"], fleet["more_fit"]) == (68, 3, True)
    banded = [one["configuration"] for one in swept["points"] if one["band"] is not None]
    assert banded.count(fleet["configuration"]) == 2, "all loads that the number is read from"
    for flags in (["--agents", "5"], ["--agents", "5", "--sweep"], ["--agents", "0", "--sweep", "--at", "9"]):
        assert "--agents" in refused(capsys, "simulate", "--traces", trace, *flags)


def test_a_sweep_leaves_out_layouts_that_cannot_hold_a_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.bench.make_traces import row, session

    path = tmp_path / "long.json"
    rows = [row(4.0 * n, list(range(4000)), api=1.0, out=4, block=64) for n in range(3)]
    path.write_text(json.dumps({**session(rows, block=64), "id": "long"}))
    more = ["--sweep", "--chips", "2", "--concurrency", "1", "--no-band", "--model", "m3", "--platform", "gb300"]
    assert simulate(tmp_path / "out", str(path), *more) == 0
    shown = capsys.readouterr().out
    assert "left out: " in shown and "m3 on gb300 tp1 holds 226,048" in shown and "m3 on gb300 tp2" in shown
    assert main(["simulate", "--traces", str(path), "--layout", "tp1", "--out", str(tmp_path / "two")]) != 0
