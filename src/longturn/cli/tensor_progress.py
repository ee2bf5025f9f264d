"""Progress of work that goes tensor by tensor, on standard error."""

from __future__ import annotations

import sys
import time
from typing import TextIO

REDRAW_S = 0.1
LINE_SHARE, LINE_S = 0.1, 2.0
"""Share of the work, and time, between two lines where there is no terminal to redraw."""


class TensorProgress:
    """Call it with (done, planned, name of the last tensor). One line on a terminal, a few plain ones elsewhere."""

    def __init__(self, title: str, stream: TextIO | None = None) -> None:
        self._title = title
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._start = time.monotonic()
        self._shown_at = self._start
        self._shown_share = 0.0

    def __call__(self, done: int, planned: int, name: str) -> None:
        now, share = time.monotonic(), done / planned
        text = f"{self._title}: {done}/{planned} tensors, {now - self._start:.0f} s"
        if self._live:
            if done < planned and now - self._shown_at < REDRAW_S:
                return
            self._shown_at = now
            self._stream.write(f"\r\x1b[2K{text}  {name}" if done < planned else f"\r\x1b[2K{text}\n")
            self._stream.flush()
        elif done == planned or (share - self._shown_share >= LINE_SHARE and now - self._shown_at >= LINE_S):
            self._shown_share, self._shown_at = share, now
            self._stream.write(text + "\n")
            self._stream.flush()
