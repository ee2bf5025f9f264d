from __future__ import annotations

import io

import pytest

from longturn.bench.records import Answer, TurnRecord
from longturn.cli.terminal import Progress, table


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def record(index: int, error: str | None = None) -> TurnRecord:
    answer = Answer(0, 0, 1_500_000_000, prompt_tokens=1234, cached_tokens=1024, output_tokens=3, error=error)
    return TurnRecord("s", index, "read_file", 0, answer)


def test_a_terminal_gets_a_bar_that_is_wiped_at_the_end() -> None:
    stream = Terminal()
    progress = Progress("cache on", stream)
    progress.waiting("starting the server")
    progress.turn_started("s", "read_file")
    progress.turn_ended(record(0), 1, 4)
    shown = stream.getvalue()
    assert "\n" not in shown
    assert "█████░" in shown.rpartition("\r")[2]
    assert "1/4" in shown.rpartition("\r")[2]
    progress.close()
    assert stream.getvalue().endswith("\r\x1b[2K")


def test_a_log_gets_one_line_a_turn() -> None:
    stream = io.StringIO()
    progress = Progress("cache on", stream)
    progress.waiting("starting the server")
    for _ in range(5):
        progress.tick()
    progress.turn_started("s", "read_file")
    progress.turn_ended(record(0), 1, 4)
    progress.turn_ended(record(1, "HTTP 500: no"), 2, 4)
    progress.close()
    assert stream.getvalue().splitlines() == [
        "cache on: starting the server",
        "cache on: turn 1/4 s read_file: 1,234 prompt tokens, 1,024 cached, 1.5 s",
        "cache on: turn 2/4 s read_file: HTTP 500: no, 1.5 s",
    ]


def test_table() -> None:
    shown = table(["turn", "n"], [["first", "1"], ["b", "1,000"]], ["all", "1,001"])
    assert shown.splitlines() == [
        "turn       n",
        "------------",
        "first      1",
        "b      1,000",
        "------------",
        "all    1,001",
    ]
    with pytest.raises(ValueError, match=r"shorter|argument"):
        table(["a", "b"], [["x", "y", "z"]])
