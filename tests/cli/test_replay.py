from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from aiohttp import web

from longturn.cli.main import main
from longturn.cli.replay_points import points_of_result
from longturn.report.point import Engine, Model
from longturn.report.schema import Served, load_result
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


class Telling(FakeServer):
    """A server that says what it is."""

    async def _models(self, request: web.Request) -> web.Response:
        told = {"version": "1.2", "quantisation": "q4_1", "weights": "packed", "kv_cache": "fp16"}
        model = {"id": "fake-1", "object": "model", "owned_by": "longturn", "longturn": told}
        return web.json_response({"object": "list", "data": [model]})


def test_a_result_keeps_what_the_server_tells_of_itself(tmp_path: Path) -> None:
    with running(Telling()) as url:
        assert replay(url, tmp_path) == 0
    result = load_result(tmp_path / "result.json")
    assert result.runs[0].served == Served(
        engine="longturn", version="1.2", quantisation="q4_1", weights="packed", kv_cache="fp16"
    )
    (point,) = points_of_result(result)
    assert (point.engine, point.model) == (
        Engine(name="longturn", version="1.2"),
        Model(name="fake-1", quantisation="q4_1", kv_cache="fp16"),
    )
    assert point.flags == {"model.weights": "packed"}


def test_results_of_before_are_read(fake_url: str, tmp_path: Path) -> None:
    assert replay(fake_url, tmp_path) == 0
    path = tmp_path / "result.json"
    data = json.loads(path.read_text())
    assert set(data["runs"][0].pop("served").values()) == {None}
    path.write_text(json.dumps(data))
    (point,) = points_of_result(load_result(path))
    assert (point.engine.name, point.model.quantisation) == ("unknown", "unknown")
