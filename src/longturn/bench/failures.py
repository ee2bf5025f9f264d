"""What failed requests of a measurement mean: when to give it up, and which prompts were too long for the server."""

from __future__ import annotations

import re

from longturn.bench.records import Answer

_MOST_IN_A_ROW = 20
"""A server that answers nothing else is gone, and without pauses a replay would flood it."""
_LEAST_ENDED = 20
"""Error rates of fewer requests than this stop nothing."""

_TOO_LONG = re.compile(
    r"(HTTP (400|413|422)|refused):.*(context|max_model_len|too long|does not fit|maximum.*length)", re.I
)


def too_long(error: str) -> bool:
    """Whether an error says that a prompt did not fit the server's context."""
    return _TOO_LONG.match(error) is not None


class Failures:
    """Counts the requests of one measurement that failed."""

    def __init__(self, limit: float | None) -> None:
        """`limit`: share of the requests ended, 0..1, above which it is not worth going on; None for any."""
        self.count = 0
        self._limit = limit
        self._ended = 0
        self._in_a_row = 0
        self._last = ""

    def add(self, answer: Answer) -> str | None:
        """Count one request that ended; why the measurement should end now, or None."""
        self._ended += 1
        self.count += not answer.ok
        self._in_a_row = 0 if answer.ok else self._in_a_row + 1
        self._last = answer.error or self._last
        if self._in_a_row >= _MOST_IN_A_ROW:
            return f"{self._in_a_row} requests in a row failed, last: {self._last}"
        if self._limit is not None and self._ended >= _LEAST_ENDED and self.count / self._ended > self._limit:
            return f"{self.count} of {self._ended} requests failed, last: {self._last}"
        return None
