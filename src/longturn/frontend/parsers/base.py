"""What every parser of model output is: pieces of text in, pieces of something more useful out.

The one rule that all of them keep: the pieces add up to the same result however the text is cut, one character at a
time or all at once. So a parser holds text back only while what follows could still change its meaning, and no parser
refuses a text: what it cannot read is given back as the text that it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from longturn.frontend.records import ToolCall, ToolCallDelta


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """A piece of reasoning, then a piece of what is meant for the reader (tool calls still in it)."""

    reasoning: str = ""
    content: str = ""


@dataclass(frozen=True, slots=True)
class ToolPiece:
    """A piece of visible text, and pieces of tool calls."""

    content: str = ""
    calls: tuple[ToolCallDelta, ...] = ()
    behind: int = 0
    """Characters at the end of `content` that stand behind the output's first call; all before them stand before it."""


class Pieces:
    """Collects what a tool parser is certain of, in the order of the text, until it is given out.

    White space around calls belongs to the format and is no text. So it is held back until something follows it.
    """

    __slots__ = ("_after_call", "_behind", "_calls", "_content", "_space", "count")

    def __init__(self) -> None:
        self.count = 0
        """Calls that were begun."""
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._behind = 0
        self._space: list[str] = []
        """White space that a call may follow."""
        self._after_call = False

    def text(self, text: str) -> None:
        """Text beside calls."""
        if body := text.rstrip():
            self.exactly("".join(self._space) + body)
            self._space.clear()
        self._space.append(text[len(body) :])

    def exactly(self, text: str) -> None:
        """Visible text with all its white space."""
        self._content.append(text)
        self._after_call = False
        if self.count:
            self._behind += len(text)

    @property
    def after_call(self) -> bool:
        """Nothing but white space has come since the last tag that belongs to calls."""
        return self._after_call

    def take_space(self) -> str:
        """The white space before what may be a call."""
        space = "".join(self._space)
        self._space.clear()
        return space

    def mark(self) -> None:
        """There is a tag that belongs to calls."""
        self._space.clear()
        self._after_call = True

    def begin(self, name: str, arguments: str = "") -> None:
        """A new call; `arguments` are all or the first of them."""
        self.mark()
        self._calls.append(ToolCallDelta(self.count, name=name, arguments=arguments))
        self.count += 1

    def more(self, arguments: str) -> None:
        """More arguments of the call that was begun last."""
        if arguments:
            self._calls.append(ToolCallDelta(self.count - 1, arguments=arguments))

    def end(self) -> None:
        """The output has ended."""
        if not self._after_call:
            self.exactly("".join(self._space))
        self._space.clear()

    def take(self) -> ToolPiece:
        """What was collected since the last call."""
        piece = ToolPiece("".join(self._content), tuple(self._calls), self._behind)
        self._content.clear()
        self._calls.clear()
        self._behind = 0
        return piece


@dataclass(frozen=True, slots=True)
class ToolText:
    """A whole text taken apart."""

    content: str
    calls: tuple[ToolCall, ...]


class ReasoningParser(Protocol):
    """Separates reasoning from the answer. One object reads one output, and is used up by `finish`."""

    def push(self, text: str) -> ReasoningPiece:
        """What is certain after more text."""
        ...

    def finish(self) -> ReasoningPiece:
        """What was held back, at the end of the output."""
        ...

    @property
    def span(self) -> tuple[int, int]:
        """Where the reasoning lies in the text so far: first character and one past the last, without its markers."""
        ...


class ToolParser(Protocol):
    """Separates tool calls from visible text. One object reads one output, and is used up by `finish`."""

    def push(self, text: str) -> ToolPiece:
        """What is certain after more text."""
        ...

    def finish(self) -> ToolPiece:
        """What was held back, at the end of the output."""
        ...


def parse_tools(parser: ToolParser, text: str) -> ToolText:
    """The visible text and the tool calls of a whole text."""
    first, last = parser.push(text), parser.finish()
    return ToolText(first.content + last.content, join_calls((*first.calls, *last.calls)))


def join_pieces(deltas: Iterable[ToolCallDelta]) -> dict[int, ToolCallDelta]:
    """One piece for each call, by its index, of all that belong to it."""
    pieces: dict[int, ToolCallDelta] = {}
    for delta in deltas:
        known = pieces.get(delta.index, ToolCallDelta(delta.index))
        pieces[delta.index] = ToolCallDelta(
            delta.index, known.id + delta.id, known.name + delta.name, known.arguments + delta.arguments
        )
    return pieces


def join_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """Whole calls from their pieces, in the order of their indices."""
    return tuple(ToolCall(piece.id, piece.name, piece.arguments) for _, piece in sorted(join_pieces(deltas).items()))
