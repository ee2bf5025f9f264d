"""Progress and tables in a terminal. Progress goes to standard error; results go to standard output."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from typing import TextIO

from longturn.bench.records import TurnRecord


class Progress:
    """A bar redrawn in place on a terminal, plain lines elsewhere. Implements `bench.replay.ReplayProgress`."""

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self._title = title
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._start = time.monotonic()
        self._done = 0
        self._planned = 0
        self._text = ""
        self._shown = False

    def turn_started(self, session: str, label: str) -> None:
        self._text = label
        self.tick()

    def turn_ended(self, record: TurnRecord, done: int, planned: int) -> None:
        self._done, self._planned = done, planned
        if self._live:
            self.tick()
            return
        answer = record.answer
        what = answer.error or f"{answer.prompt_tokens or 0:,} prompt tokens, {answer.cached_tokens or 0:,} cached"
        seconds = (answer.end_ns - answer.sent_ns) / 1e9
        self._line(f"{self._title}: turn {done}/{planned} {record.session} {record.label}: {what}, {seconds:.1f} s")

    def waiting(self, text: str) -> None:
        """Show what is waited for, before there are turns to count."""
        if text != self._text and not self._live:
            self._line(f"{self._title}: {text}")
        self._text = text
        self.tick()

    def tick(self) -> None:
        """Redraw the bar. Does nothing where it would only fill a log."""
        if not self._live:
            return
        width = shutil.get_terminal_size().columns
        seconds = time.monotonic() - self._start
        filled = round(20 * self._done / self._planned) if self._planned else 0
        count = f" {self._done}/{self._planned}" if self._planned else ""
        line = f"{self._title}  [{'█' * filled}{'░' * (20 - filled)}]{count}  {seconds:5.1f} s  {self._text}"
        self._stream.write("\r\x1b[2K" + line[: max(width - 1, 20)])
        self._stream.flush()
        self._shown = True

    def close(self) -> None:
        """Leave the line, so that what is printed next starts on its own."""
        if self._shown:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
            self._shown = False

    def _line(self, text: str) -> None:
        self._stream.write(text + "\n")
        self._stream.flush()


def size_text(count_bytes: int) -> str:
    """A number of bytes for people: `2.53 MB`, `71.0 GB`."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count_bytes >= size:
            value = count_bytes / size
            return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{count_bytes / 1e3:.1f} kB"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], foot: Sequence[str] | None = None) -> str:
    """A plain text table: the first column to the left, the others to the right, two spaces between.

    Args:
        head: one title a column; all rows have as many cells.
        rows: the body.
        foot: a last row under a rule, if there is one.
    """
    everything = [head, *rows, *([foot] if foot is not None else [])]
    widths = [max(len(row[column]) for row in everything) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    return "\n".join([line(head), rule, *map(line, rows), *([rule, line(foot)] if foot is not None else [])])
