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
from longturn.cli.main import main
from longturn.cli.points import measured_figures, tree_timeline
from longturn.report.point import save_point
from longturn.report.schema import save_result
from longturn.report.store import Store
from tests.bench.test_point_metrics import turn
from tests.report.points import point, sweep
from tests.report.samples import result


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as runs leave it: points, and a replay's result among them."""
    for number, one in enumerate(sweep()):
        save_point(one, tmp_path / "runs" / one.configuration / f"{number}.json")
    save_result(result(), tmp_path / "runs" / "demo" / "result.json")
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
    (matched,) = shown["matched"]
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
        assert len(opened) == 12
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
            assert b"12 points of 2 configurations" in answer.read()
        save_point(point("another", 1, 100.0, 50.0), folder / "new.json")
        with urllib.request.urlopen(url, timeout=20) as answer:
            assert b"13 points of 3 configurations" in answer.read()
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
        (["{folder}/demo"], "no point file in this folder"),
        (["{folder}/demo/result.json"], "not a longturn-point file"),
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
