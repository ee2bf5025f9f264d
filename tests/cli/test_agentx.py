from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from longturn.cli.main import main
from longturn.report.point import load_point
from tests.bench.fake_server import FakeServer, running
from tests.bench.make_traces import row, session


def trace(folder: Path, name: str = "small") -> Path:
    path = folder / f"{name}.json"
    rows = [row(0.1 * n, list(range(n + 8)), api=0.05, out=3) for n in range(4)]
    path.write_text(json.dumps({**session(rows), "id": name}))
    return path


def agentx(url: str, *more: str) -> int:
    return main(["bench", "agentx", "--url", url, *more])


def test_one_point_for_each_concurrency_and_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, known = (
        tmp_path / "out",
        ["--engine", "fake:1.2", "--chip", "abacus", "--chips", "2", "--quantisation", "bf16"],
    )
    with running(FakeServer(max_model_len=4096)) as url:
        load = ["--traces", str(trace(tmp_path)), "--concurrency", "1,2", "--duration", "0.4", "--api", "completions"]
        assert agentx(url, *load, *known, "--api-key", "secret", "--out", str(out)) == 0
    shown = capsys.readouterr()
    files = [f"agentx-000{count}.{kind}" for count in (1, 2) for kind in ("json", "requests.jsonl")]
    assert [path.name for path in sorted(out.iterdir())] == [*files, "index.html"]
    points = [load_point(out / f"agentx-000{count}.json") for count in (1, 2)]
    assert [point.concurrency for point in points] == [1, 2]
    for point in points:
        assert point.validity.valid and point.validity.reasons[0].startswith("not_comparable")
        assert (point.engine.name, point.engine.version) == ("fake", "1.2")
        assert (point.platform.chip, point.platform.chips, point.model.name) == ("abacus", 2, "fake-1")
        assert (point.traces.name, point.traces.preset, point.traces.seed) == ("small.json", "quick", 42)
        assert point.metrics.requests > 2 and point.metrics.lag_ms is not None
        assert point.timeline is not None and point.metrics.jobs is not None
        assert "--seed 42" in point.command and "secret" not in point.command and str(tmp_path) not in point.command
    assert points[0].flags["run_id"] == points[1].flags["run_id"]
    assert shown.out.splitlines()[0].startswith("trees  requests")
    assert main(["report", str(out), "--out", str(tmp_path / "page.html")]) == 0
    assert "fake-1" in capsys.readouterr().out


def test_a_points_figures_follow_from_its_requests(tmp_path: Path) -> None:
    with running(FakeServer(device="cuda (NVIDIA H200)")) as url:
        load = ["--traces", str(trace(tmp_path)), "--concurrency", "2", "--duration", "0.5", "--chips", "2"]
        assert agentx(url, *load, "--token-counts", "--out", str(tmp_path / "o")) == 0
    point = load_point(tmp_path / "o" / "agentx-0002.json")
    assert point.platform.chip == "NVIDIA H200"
    figures = point.metrics
    requests = [json.loads(line) for line in (tmp_path / "o" / "agentx-0002.requests.jsonl").open()]
    assert len(requests) == figures.requests > 2
    assert {one["session"].split("@")[0] for one in requests} == {"small"}
    tokens = sum(one["prompt_tokens"] + one["output_tokens"] for one in requests)
    seconds = (max(one["end_ms"] for one in requests) - min(one["start_ms"] for one in requests)) / 1000
    assert figures.total_tokens_per_s == pytest.approx(tokens / seconds / 2, rel=1e-6)
    itl = [(one["end_ms"] - one["first_ms"]) / (one["output_tokens"] - one["first_tokens"]) for one in requests]
    assert figures.ttft_ms is not None and figures.itl_ms is not None and figures.lag_ms is not None
    for spread, values in (
        (figures.ttft_ms, [one["first_ms"] - one["start_ms"] for one in requests]),
        (figures.itl_ms, itl),
        (figures.lag_ms, [one["start_ms"] - one["due_ms"] for one in requests]),
    ):
        assert (spread.p50, spread.p90) == pytest.approx(tuple(np.percentile(values, [50, 90])), abs=1e-5)


def test_json_and_overrides_of_a_published_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--traces", str(trace(tmp_path)), "--duration", "0.3", "--preset", "agentx", "--out", str(tmp_path / "o")]
    with running(FakeServer()) as url:
        assert agentx(url, *load, "--scale-context", "0.5", "--max-context", "22", "--json") == 0
    shown = capsys.readouterr()
    (point,) = json.loads(shown.out)
    reasons = point["validity"]["reasons"]
    assert not point["validity"]["valid"]
    assert reasons[0] == ("unsafe_override: duration 0.3 s where agentx needs 3600 s, context scaled by 0.5")
    assert any(reason.startswith("max_context: 1 requests of more than 22 tokens") for reason in reasons)
    assert "drops 1 requests, 3 are left" in shown.err


def test_live_answers_have_a_curve_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    load = ["--traces", str(trace(tmp_path)), "--duration", "0.5", "--carry-over", "live", "--out", str(tmp_path / "o")]
    with running(FakeServer()) as url:
        assert agentx(url, *load) == 0
        point = load_point(tmp_path / "o" / "agentx-0001.json")
        assert agentx(url, *load, "--preset", "agentx") == 0
    assert (point.configuration, point.flags["carry_over"]) == ("fake-1, live answers", "live")
    assert "--carry-over live" in point.command and point.validity.valid
    (told,) = [reason for reason in point.validity.reasons if reason.startswith("live_carry_over")]
    assert told.endswith("prompts are at most 0 tokens off their recorded length")
    published = load_point(tmp_path / "o" / "agentx-0001.json")
    assert not published.validity.valid and "live carry-over" in published.validity.reasons[0]


def test_a_server_without_token_ids_cannot_have_its_answers_carried_in_completions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load = ["--traces", str(trace(tmp_path)), "--duration", "0.5", "--carry-over", "live", "--api", "completions"]
    with running(FakeServer(send_token_ids=False)) as url:
        assert agentx(url, *load, "--out", str(tmp_path / "o")) == 0
    (told,) = [line for line in capsys.readouterr().out.splitlines() if "live_carry_over: 0 of " in line]
    assert told.endswith("the server ignores `return_token_ids`, so recorded text stands in")


def test_clear_lines_for_what_cannot_be_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small, broken = trace(tmp_path), tmp_path / "hole.json"
    rows = [row(0.0, [0, 1, 2]), row(1.0, [0, 5, 2])]
    broken.write_text(json.dumps(session(rows)))
    out = ["--out", str(tmp_path / "o"), "--duration", "0.2"]
    with running(FakeServer(max_model_len=45)) as url:
        for argv, message in (
            (["--traces", str(small), "--model", "gone"], "has no model 'gone' (it has: fake-1)"),
            (["--traces", str(broken)], "hole.json: requests[1].hash_ids[2] is 2"),
            (["--traces", str(tmp_path / "none.json")], "none.json: no such file"),
            (["--traces", str(small)], "requests[3] needs 47 tokens, the server at"),
            (["--traces", str(small), "--max-context", "5"], "leaves no request"),
            (["--traces", str(small), "--scale-context", "2"], "--scale-context"),
            (["--concurrency", "1,x"], "--concurrency must be numbers"),
            (["--concurrency", "0"], "--concurrency must be between 1"),
            (["--token-ids", "5-9", "--api", "completions"], "--token-ids must be LOW-HIGH"),
            (["--token-ids", "5-90"], "--token-ids needs --api completions"),
            (["--duration", "0"], "--duration must be more than 0"),
        ):
            assert agentx(url, *out, *argv) != 0, argv
            shown = capsys.readouterr()
            assert message in shown.err.splitlines()[-1] and shown.out == "", argv
    assert agentx("http://127.0.0.1:9", *out, "--traces", str(small)) == 5
    assert "no answer from http://127.0.0.1:9: connection refused" in capsys.readouterr().err


def test_a_server_that_fails_everything_gives_an_invalid_point_and_an_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(FakeServer(fail_turns=dict.fromkeys(range(1, 500), "500"))) as url:
        load = ["--traces", str(trace(tmp_path)), "--concurrency", "1,2", "--duration", "9", "--seed", "3"]
        assert agentx(url, *load, "--out", str(tmp_path / "o")) == 1
    assert "longturn: error: run_cancelled: 20 requests in a row failed" in capsys.readouterr().err
    assert not load_point(tmp_path / "o" / "agentx-0001.json").validity.valid
    assert not (tmp_path / "o" / "agentx-0002.json").exists()


def test_ctrl_c_saves_what_was_measured(tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "src"
    fake = FakeServer(token_s=0.005)
    with running(fake) as url:
        argv = ["bench", "agentx", "--url", url, "--traces", str(trace(tmp_path)), "--duration", "60"]
        process = subprocess.Popen(
            [sys.executable, "-m", "longturn.cli.main", *argv, "--concurrency", "1,2", "--out", str(tmp_path / "o")],
            env={**os.environ, "PYTHONPATH": str(source)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            deadline = time.monotonic() + 30
            while len(fake.requests) < 6 and time.monotonic() < deadline:
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            shown, complaint = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 130, complaint
    assert complaint.splitlines()[-1] == "longturn: interrupted, results are partial"
    point = load_point(tmp_path / "o" / "agentx-0001.json")
    assert not point.validity.valid and point.metrics.requests >= 3
    assert point.validity.reasons[0] == "run_cancelled: interrupted, the results are partial"
    assert shown.startswith("trees  requests") and not (tmp_path / "o" / "agentx-0002.json").exists()
