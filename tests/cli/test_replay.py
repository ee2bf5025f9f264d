from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from longturn.cli.main import main
from longturn.report.schema import load_result
from tests.bench.fake_server import FakeServer, running


def replay(url: str, out: Path, *more: str) -> int:
    return main(["bench", "replay", "--url", url, "--pause-scale", "0", "--out", str(out), *more])


def test_replay_prints_a_table_and_writes_both_files(
    fake: FakeServer, fake_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(fake_url, tmp_path, "--api-key", "sk-1") == 0
    shown = capsys.readouterr()
    assert "read_file: outbox.py" in shown.out
    assert "turn 12/12" in shown.err
    result = load_result(tmp_path / "result.json")
    assert result.model == "fake-1"
    assert len(result.runs[0].turns) == 12 == len(fake.requests)
    assert not result.partial
    assert sum(turn.cached_tokens or 0 for turn in result.runs[0].turns) == result.runs[0].totals.cached_tokens > 0
    assert (tmp_path / "index.html").read_text().startswith("<!doctype html>")
    assert fake.headers[0]["Authorization"] == "Bearer sk-1"
    assert "sk-1" not in (tmp_path / "result.json").read_text()


def test_json_is_the_result_and_nothing_else(fake_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(fake_url, tmp_path, "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads((tmp_path / "result.json").read_text())


def test_failed_turns_are_partial_and_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeServer(fail_turns={3: "500"})) as url:
        assert replay(url, tmp_path) == 1
    assert "1 of 12 turns failed, first repo_fix turn 4: HTTP 500: scripted failure" in capsys.readouterr().err
    result = load_result(tmp_path / "result.json")
    assert result.partial
    assert result.runs[0].totals.errors == 1


def test_unreachable_server_and_wrong_model(fake_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay(fake_url, tmp_path, "--model", "other") == 5
    assert "has no model 'other'" in capsys.readouterr().err
    with running(FakeServer()) as gone:
        pass
    assert replay(gone, tmp_path) == 5
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "result.json").exists()


def test_ctrl_c_saves_what_was_measured(tmp_path: Path) -> None:
    fake = FakeServer(token_s=0.004)
    with running(fake) as url:
        command = [sys.executable, "-m", "longturn.cli.main", "bench", "replay", "--url", url]
        process = subprocess.Popen(
            [*command, "--pause-scale", "0", "--out", str(tmp_path)], stderr=subprocess.PIPE, stdout=subprocess.PIPE
        )
        end = time.monotonic() + 30
        while len(fake.requests) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"interrupted after" in error
    assert b"Traceback" not in error
    result = load_result(tmp_path / "result.json")
    assert result.partial
    assert 2 <= len(result.runs[0].turns) < 12
