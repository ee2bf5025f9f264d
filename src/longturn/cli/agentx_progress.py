"""How a sweep of `bench agentx` goes, on standard error."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from longturn.bench.presets import Rules


class SweepProgress:
    """A line redrawn in place on a terminal, one at each start of a part elsewhere."""

    def __init__(self, rules: Rules, stream: TextIO | None = None, name: str = "agentx") -> None:
        self.concurrency = 0
        self._rules = rules
        self._name = name
        self._stream = sys.stderr if stream is None else stream
        self._live = self._stream.isatty()
        self._part = ""
        self._drawn_s = 0.0

    def starting(self) -> None:
        """The engine is being started, which takes seconds."""
        self._stream.write(f"{self._name}: starting the engine\n")
        self._stream.flush()

    def warming_up(self, done: int, planned: int) -> None:
        self._draw("warm-up", f"{done} of {planned} requests")

    def measuring(self, elapsed_s: float, done: int, failed: int, in_flight: int) -> None:
        part = "measure" if elapsed_s < self._rules.duration_s else "drain"
        text = (
            f"{elapsed_s:.0f} of {self._rules.duration_s:g} s, {done} answers, {failed} failed, {in_flight} in flight"
        )
        self._draw(part, text)

    def _draw(self, part: str, text: str) -> None:
        trees = f"{self.concurrency} tree{'' if self.concurrency == 1 else 's'}"
        name, now_s = f"{self.concurrency} {part}", time.monotonic()
        if self._live and (name != self._part or now_s - self._drawn_s >= 0.2):
            self._stream.write(f"\r\x1b[2K{self._name}  {trees}  {part}: {text}")
            self._stream.flush()
            self._drawn_s = now_s
        elif not self._live and name != self._part:
            self._stream.write(f"{self._name}: {trees}, {part}: {text}\n")
            self._stream.flush()
        self._part = name

    def close(self) -> None:
        if self._live and self._part:
            self._stream.write("\r\x1b[2K")
            self._stream.flush()
