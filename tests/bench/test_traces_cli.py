from __future__ import annotations

import json
from pathlib import Path

import pytest

from longturn.cli.main import main
from tests.bench.make_traces import EXAMPLE


def test_stat_of_the_worked_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "demo.json"
    path.write_text(json.dumps(EXAMPLE))
    assert main(["trace", "stat", str(path)]) == 0
    text = capsys.readouterr().out
    assert "subagents    1 subagent" in text
    assert "28.57% of hashed blocks, 26.67% of input tokens" in text
    row = next(line for line in text.splitlines() if line.startswith("demo-1"))
    assert row.split() == ["demo-1", "2", "1", "3", "960", "200", "500", "28.6%", "1", "8"]
    assert "agents alive" in text and max(map(len, text.splitlines())) <= 110
    assert main(["trace", "stat", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hit"]["by_blocks"] == pytest.approx(4 / 14)
    assert found["sessions"][0]["hit"]["by_tokens"] == pytest.approx(256 / 960)
    assert (found["requests"], found["agents"]) == (3, {"root": 1, "subagent": 1})
    assert found["input_tokens"]["p50"] == 300


def test_the_switch_and_shipped_traces(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "stat", "workers.jsonl", "arrivals.jsonl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["agents"] == {"root": 6, "aux": 1, "worker": 2}
    assert main(["trace", "stat", "workers.jsonl", "--no-split", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["agents"] == {"root": 2}
    assert main(["trace", "stat", "arrivals.jsonl"]) == 0
    text = capsys.readouterr().out
    assert "durations    not recorded" in text and "requests sent" in text


def test_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1}\n{"timestamp": 0, "output_length": 1}\n')
    assert main(["trace", "stat", str(bad)]) == 2
    assert capsys.readouterr().err == (
        f"longturn: error: {bad}: line 2: object missing required field `input_length`\n"
    )
    assert main(["trace", "stat", str(tmp_path / "none")]) == 2
    assert "no such file or folder" in capsys.readouterr().err
    assert main(["trace", "show", str(bad)]) == 2
    assert "invalid choice: 'show'" in capsys.readouterr().err
