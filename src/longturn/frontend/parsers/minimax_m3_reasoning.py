"""MiniMax-M3's reasoning: `<mm:think>` ... `</mm:think>` at the beginning of an answer.

The template opens the block itself where thinking is enabled, closes it where it is disabled, and leaves the choice to
the model where it is adaptive. So where an output starts is read from the end of the rendered prompt and not from a
template argument: only the end, since M3's system prompt explains the markers and so contains them.

- Opening in the prompt: the output is reasoning up to `</mm:think>`. A model that writes the opening again is forgiven.
- Otherwise an opening marker at the beginning (white space aside) starts reasoning, and a closing one, by which the
  model says that it will not think, is dropped.
- Markers anywhere else are text: an agent that edits a file about them must get its file as written.
- A model may forget to close its reasoning and go on with a tool call. What begins with a call's opening tag inside
  reasoning is therefore held back: if `</mm:think>` follows it was a thought, if the output ends it was the answer.
- Reasoning that the output's end cuts off stays reasoning.
"""

from __future__ import annotations

from enum import Enum, auto

from longturn.frontend.parsers.base import ReasoningPiece
from longturn.frontend.parsers.minimax_m3_tags import TOOL_BLOCK
from longturn.frontend.stop import overlap

OPEN = "<mm:think>"
CLOSE = "</mm:think>"
MAX_SPACE_CHARS = 256
"""White space before a marker; more of it is the beginning of an answer, and not held back."""


class _State(Enum):
    START = auto()
    """Only white space so far."""
    OPENED = auto()
    """The prompt opened the block; only white space so far."""
    INSIDE = auto()
    DRAFT = auto()
    """A tool call inside reasoning."""
    CONTENT = auto()


class MinimaxM3Reasoning:
    """State of one output."""

    __slots__ = ("_at", "_calls_end", "_draft", "_draft_at", "_end", "_held", "_start", "_state")

    def __init__(self, prompt: str, *, calls_end: bool = True) -> None:
        """
        Args:
            prompt: the rendered prompt, or at least its end.
            calls_end: a tool call ends reasoning that is never closed; to be set where calls are parsed.
        """
        # The end is enough, and a prompt may have a million characters.
        inside = prompt[-64:].rstrip().endswith(OPEN)
        self._state = _State.OPENED if inside else _State.START
        self._calls_end = calls_end
        self._held = ""
        self._draft: list[str] = []
        self._draft_at = 0
        self._at = 0
        """Characters of the output that are out of `_held`."""
        self._start = 0
        self._end: int | None = None if inside else 0

    @property
    def span(self) -> tuple[int, int]:
        """As `ReasoningParser.span`."""
        return self._start, self._at + len(self._held) if self._end is None else self._end

    def push(self, text: str) -> ReasoningPiece:
        """As `ReasoningParser.push`."""
        self._held += text
        reasoning = ""
        if self._is(_State.START, _State.OPENED):
            self._begin()
        if self._is(_State.INSIDE):
            reasoning = self._inside()
        if self._is(_State.DRAFT):
            reasoning += self._drafted()
        content = self._take(len(self._held)) if self._is(_State.CONTENT) else ""
        return ReasoningPiece(reasoning, content)

    def finish(self) -> ReasoningPiece:
        """As `ReasoningParser.finish`."""
        state, self._state = self._state, _State.CONTENT
        if state in (_State.OPENED, _State.INSIDE):
            rest = self._take(len(self._held))
            self._end = self._at
            return ReasoningPiece(reasoning=rest)
        self._draft.append(self._take(len(self._held)))
        if state is _State.DRAFT:
            self._end = self._draft_at
        return ReasoningPiece(content="".join(self._draft))

    def _is(self, *states: _State) -> bool:
        return self._state in states

    def _begin(self) -> None:
        """Drop a marker at the beginning, once it is known whether there is one."""
        body = self._held.lstrip()
        marks: tuple[str, ...] = (OPEN,) if self._state is _State.OPENED else (OPEN, CLOSE)
        if len(self._held) - len(body) > MAX_SPACE_CHARS:
            marks = ()
        for mark in marks:
            if body.startswith(mark):
                self._take(len(self._held) - len(body) + len(mark))
                if mark == OPEN:
                    self._state, self._start, self._end = _State.INSIDE, self._at, None
                else:
                    self._state = _State.CONTENT
                return
        if not any(mark.startswith(body) for mark in marks):
            self._state = _State.INSIDE if self._state is _State.OPENED else _State.CONTENT

    def _inside(self) -> str:
        marks = (CLOSE, TOOL_BLOCK) if self._calls_end else (CLOSE,)
        found = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if not found:
            return self._take(len(self._held) - max(overlap(self._held, mark) for mark in marks))
        at, mark = min(found)
        reasoning = self._take(at)
        if mark == CLOSE:
            self._close()
        else:
            self._state, self._draft_at = _State.DRAFT, self._at
        return reasoning

    def _drafted(self) -> str:
        if (at := self._held.find(CLOSE)) < 0:
            self._draft.append(self._take(len(self._held) - overlap(self._held, CLOSE)))
            return ""
        self._draft.append(self._take(at))
        reasoning = "".join(self._draft)
        self._draft.clear()
        self._close()
        return reasoning

    def _close(self) -> None:
        self._end = self._at
        self._take(len(CLOSE))
        self._state = _State.CONTENT

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self._at += count
        return text
