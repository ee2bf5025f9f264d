"""Stop strings in a text that comes in pieces.

The output ends as soon as the text holds a stop string: the one whose *end* comes first, and of those that end at the
same place the longest. That does not depend on how the text is cut into pieces. What may still become a stop string is
held back, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopResult:
    text: str
    """Text that can be shown now."""
    stop: str | None = None
    """The stop string that was found; the output is over."""


class StopFinder:
    """State of one output text."""

    __slots__ = ("_held", "_include", "_stops")

    def __init__(self, stops: Sequence[str], *, include_stop_text: bool = False) -> None:
        """
        Args:
            stops: non-empty strings, or none at all.
            include_stop_text: the stop string itself is part of the output.
        """
        self._stops = tuple(stops)
        self._include = include_stop_text
        self._held = ""

    def push(self, piece: str) -> StopResult:
        """Add text. After a result with `stop`, this object is used up."""
        if not self._stops or not piece:
            return StopResult(piece)
        # Text that was let go can be no part of a stop string, so looking in what was held and what came is enough.
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            end, begin, stop = min(found)
            self._held = ""
            return StopResult(text[: end if self._include else begin], stop)
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return StopResult(text[: len(text) - keep])

    def flush(self) -> str:
        """What is still held back when the output ends for another reason."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop` (and not all of it): what must be held back."""
    first = stop[0]
    at = text.find(first, max(0, len(text) - len(stop) + 1))
    while at >= 0:
        if stop.startswith(text[at:]):
            return len(text) - at
        at = text.find(first, at + 1)
    return 0
