from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from longturn.bench.job_metrics import job_metrics, jobs_from_turns
from longturn.bench.point_metrics import measure
from longturn.bench.replay import Replay
from longturn.cli.main import main
from longturn.cli.points import measured_figures, tree_timeline
from longturn.cli.replay_points import points_of_result
from longturn.cli.results import make_run
from longturn.report.point import save_point
from longturn.report.schema import save_result
from longturn.report.store import Store
from tests.bench.test_point_metrics import turn
from tests.report.points import point, sweep
from tests.report.samples import result
from tests.report.samples import result as changed_result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as runs leave it: points, and a replay's result among them."""
    for number, one in enumerate(sweep()):
        save_point(one, tmp_path / "runs" / one.configuration / f"{number}.json")
    save_result(result(), tmp_path / "runs" / "demo" / "result.json")
    (tmp_path / "runs" / "empty").mkdir()
    (tmp_path / "runs" / "empty" / "other.json").write_text('{"id": "a trace"}')
    (tmp_path / "runs" / "empty" / "broken.txt").write_text('{"kind": "longturn-replay", "version": 1}')
    return tmp_path / "runs"


def test_a_folder_becomes_a_page_and_tables(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "out" / "r.html"
    assert (
        main(
            [
                "report",
                str(folder),
                "--out",
                str(page),
                "--baseline",
                "plain LRU",
                "--at",
                "60",
                "--at",
                "10",
                "--at",
                "100",
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert page.as_uri() in shown
    assert "invalid" in shown
    compared = shown[shown.index("at matched interactivity") :]
    at_60, at_10, at_100 = [line for line in compared.splitlines() if line.startswith("session cache")]
    assert "×" in at_60
    # Outside a range there is no ratio.
    assert at_10.split()[2:6] == ["10.0", "≥", "36,800.0", "≥"]
    assert "×" not in at_10
    assert "not reached" in at_100
    assert "×" not in at_100
    assert page.read_text().startswith("<!doctype html>")


def test_json_has_frontiers_and_ratios(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = str(tmp_path / "r.html")
    assert main(["report", str(folder), "--out", page, "--json", "--at", "61", "--baseline", "session cache"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["statistic"], shown["baseline"], shown["page"]) == ("p90", "session cache", page)
    by_name = {one["name"]: one for one in shown["configurations"]}
    # The dominated point (6 live) and the invalid one (32 live) are on no frontier.
    assert [p["concurrency"] for p in by_name["plain LRU"]["frontier"]] == [16, 8, 4, 2, 1]
    assert [p["concurrency"] for p in by_name["session cache"]["frontier"]] == [16, 8, 4, 2, 1]
    assert by_name["session cache"]["invalid_points"] == 1
    (matched,) = [one for one in shown["matched"] if one["name"] == "plain LRU"]
    assert matched["baseline_total_tokens_per_s_per_chip"] == pytest.approx(27_900)
    assert matched["ratio"] == pytest.approx(matched["total_tokens_per_s_per_chip"] / 27_900)
    assert (matched["place"], matched["clamped"]) == ("inside", False)
    # Throughput is interpolated, then divided: 2.9 an hour and 1730 W a chip.
    rate = matched["total_tokens_per_s_per_chip"]
    assert matched["cost_per_million_tokens"] == pytest.approx(2.9e6 / 3600 / rate)
    assert matched["tokens_per_joule"] == pytest.approx(rate / 1730)
    assert by_name["session cache"]["frontier"][0]["cost_per_million_tokens"] == pytest.approx(2.9e6 / 3600 / 36_800)


def test_the_store_grows_and_selects(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, page = str(tmp_path / "s.db"), str(tmp_path / "r.html")
    common = ["--store", store, "--out", page, "--json"]
    assert main(["report", str(folder / "plain LRU"), *common]) == 0
    assert main(["report", str(folder / "session cache"), *common]) == 0
    assert main(["report", str(folder), *common]) == 0
    with Store(Path(store), create=False) as opened:
        assert len(opened) == 12 + 2  # the replay's two runs came with the whole folder
    capsys.readouterr()
    assert main(["report", *common, "--select", "configuration=plain LRU", "--select", "valid=1"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["configurations"]] == ["plain LRU"]
    assert main(["report", *common, "--select", "model=other"]) == 2
    assert "holds none that fit" in capsys.readouterr().err


def test_the_live_page_shows_new_results_and_ends_with_ctrl_c(folder: Path) -> None:
    command = [sys.executable, "-m", "longturn.cli.main", "report", str(folder), "--serve", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["ready"]
        with urllib.request.urlopen(url, timeout=20) as answer:
            assert b"14 points of 4 configurations" in answer.read()
        save_point(point("another", 1, 100.0, 50.0), folder / "new.json")
        with urllib.request.urlopen(url, timeout=20) as answer:
            assert b"15 points of 5 configurations" in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to report"),
        (["missing.json"], "missing.json: No such file"),
        (["--store", "missing.db"], "missing.db: no such store"),
        (["{folder}/empty"], "no result of `bench agentx`, `bench replay` or `explain`"),
        (["{folder}/empty/other.json"], "not a longturn-point file (kind is None)"),
        (["{folder}/empty/broken.txt"], "broken.txt: "),
        (["{folder}", "--baseline", "x"], "no configuration 'x'"),
        (["{folder}", "--at", "0"], "--at must be more than 0"),
        (["{folder}", "--serve", "70000"], "--serve must be a port"),
        (["{folder}", "--select", "model=x"], "--select chooses from a store"),
        (["{folder}", "--store", "{folder}/s.db", "--select", "model"], "not COLUMN=VALUE"),
        (["{folder}", "--store", "{folder}/s.db", "--select", "color=x"], "unknown column 'color'"),
    ],
)
def test_bad_input(folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = folder.parent / "page.html"
    code = main(["report", *(a.replace("{folder}", str(folder)) for a in arguments), "--out", str(out)])
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_a_replay_is_drawn_beside_points(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "r.html"
    assert main(["report", str(folder / "demo" / "result.json"), "--out", str(page), "--percentile", "p50"]) == 0
    shown = capsys.readouterr().out
    # Two runs of one lane; medians of TTFT of 2000 and 400, and of 2000 and 2800 ms.
    on, off = [line.split() for line in shown.splitlines() if line.startswith("cache o")]
    assert (on[:3], off[:3]) == (["cache", "on", "1"], ["cache", "off", "1"])
    assert "1.20" in on and "2.40" in off
    assert "pauses × 0.25; compares with the same replay alone" in page.read_text()


def test_a_replay_as_a_point_has_the_figures_of_the_replay() -> None:
    records = [
        turn("a", 0, sent=1.0, first=2.0, end=4.0, output=5, prompt=100, cached=0),
        turn("a", 1, sent=5.0, first=5.5, end=6.0, output=3, prompt=300, cached=256),
        turn("b", 0, sent=5.0, first=6.5, end=6.5, output=1, prompt=50, cached=None),
        turn("b", 1, sent=7.0, end=7.1, error="HTTP 500: no"),
    ]
    run = make_run("measured", "longturn serve --set cache.prefix_caching=false", Replay(tuple(records), 4, False))
    (made,) = points_of_result(changed_result(runs=(run,)))
    direct = measured_figures(measure(records, chips=1))
    for name in (
        "requests",
        "errors",
        "ttft_ms",
        "e2e_ms",
        "prompt_tokens",
        "cached_tokens",
        "hit_rate",
        "error_kinds",
    ):
        assert getattr(made.metrics, name) == getattr(direct, name), name
    for name in ("total_tokens_per_s", "input_tokens_per_s", "output_tokens_per_s", "cached_tokens_per_s"):
        assert getattr(made.metrics, name) == pytest.approx(getattr(direct, name)), name
    assert direct.itl_ms is not None and made.metrics.itl_ms is not None
    assert (made.metrics.itl_ms.count, made.metrics.itl_ms.p90) == (2, pytest.approx(direct.itl_ms.p90))
    assert made.flags == {"cache.prefix_caching": "false"}
    assert (made.validity.valid, made.validity.reasons[0]) == (False, "partial: turns are missing")


def test_measured_figures_are_milliseconds() -> None:
    records = [
        turn("a", 0, sent=1.0, first=2.0, end=4.0, output=5, prompt=100, cached=0),
        turn("a", 1, sent=5.0, first=5.5, end=6.0, output=3, prompt=300, cached=256),
    ]
    jobs = job_metrics(jobs_from_turns(records, {"a": 2}), chips=2)
    figures = measured_figures(measure(records, chips=2), jobs, 0.9)
    assert figures.ttft_ms is not None
    assert (figures.ttft_ms.p50, figures.ttft_ms.max) == (750.0, 1000.0)
    assert figures.itl_ms is not None
    assert figures.interactivity is not None
    assert figures.interactivity.p90 == pytest.approx(1000 / figures.itl_ms.p90)
    assert figures.duration_ms == 5000.0
    assert figures.total_tokens_per_s == pytest.approx(40.8)
    assert figures.jobs is not None
    assert figures.jobs.time_ms is not None
    assert figures.jobs.time_ms.p50 == 5000.0
    assert (figures.hit_rate, figures.theoretical_hit_rate) == (0.64, 0.9)
    assert [(t.first, t.last) for t in figures.turns] == [(0, 0), (1, 1)]


def test_a_timeline_counts_from_the_start_of_the_measurement() -> None:
    records = [
        ("agent_1", turn("a", 0, sent=5.0, first=5.5, end=6.0, prompt=300, cached=256)),
        ("session", turn("a", 0, sent=1.0, first=2.0, end=4.0, prompt=100, cached=None)),
    ]
    made = tree_timeline("a", records, int(0.5e9))
    assert [(r.agent, r.start_ms, r.first_ms, r.end_ms) for r in made.requests] == [
        ("session", 500.0, 1500.0, 3500.0),
        ("agent_1", 4500.0, 5000.0, 5500.0),
    ]
    assert [r.cached_tokens for r in made.requests] == [None, 256]
