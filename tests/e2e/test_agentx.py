"""`bench agentx` against the real server: what it tells of itself is in the point, and quality attaches by that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from longturn.cli.main import main
from longturn.report.point import load_point
from tests.e2e.conftest import Server

LOAD = ["--traces", "workshop.json", "--scale-context", "0.2", "--duration", "2"]
QUALITY = ["bench", "quality", "--positions", "8", "--window", "8", "--answer-tokens", "0", "--a", "weights=packed"]


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_the_servers_own_answers_are_carried_over_exactly(server: Server, tmp_path: Path, api: str) -> None:
    out = ["--carry-over", "live", "--api", api, "--out", str(tmp_path)]
    assert main(["bench", "agentx", "--url", server.url, *LOAD, *out]) == 0
    point = load_point(tmp_path / "agentx-0001.json")
    assert point.metrics.errors == 0 and (point.flags["target"], point.flags["carry_over"]) == ("http", "live")
    (carried,) = [reason for reason in point.validity.reasons if reason.startswith("live_carry_over:")]
    assert carried.endswith("prompts are at most 0 tokens off their recorded length"), "it remembers an answer's tokens"


def test_quality_attaches_to_what_the_server_or_the_engine_says_it_serves(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [tmp_path / name / "agentx-0001.json" for name in ("http", "inproc")]
    for target, file in zip((["--url", server.url], ["--inproc"]), files, strict=True):
        assert main(["bench", "agentx", *target, *LOAD, "--out", str(file.parent)]) == 0
    capsys.readouterr()
    assert main([*QUALITY, "--attach", str(tmp_path), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    http, inproc = map(load_point, files)
    assert (http.engine, http.model) == (inproc.engine, inproc.model)
    for point in (http, inproc):
        assert point.engine.name == "longturn" and point.engine.version != "unknown"
        assert point.model.quantisation == result["candidate"]["model"]["quantisation"] != "unknown"
        assert point.flags["model.weights"] == result["candidate"]["resolved"]["model.weights"]
        assert point.quality is not None and point.quality.top1_agreement == result["whole"]["top1_agreement"]


def test_quality_of_another_configuration_does_not_attach(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "agentx", "--url", server.url, *LOAD, "--out", str(tmp_path)]) == 0
    assert main([*QUALITY, "--b", "weights=packed,dtype=fp32", "--attach", str(tmp_path)]) != 0
    assert "another configuration: " in capsys.readouterr().err
