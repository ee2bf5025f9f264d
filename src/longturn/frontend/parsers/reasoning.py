"""Reasoning between two markers at the beginning of an answer: `<think>` ... `</think>`.

Templates differ in who writes the opening: some put it at the end of the prompt, some put an empty block there where
thinking is switched off, and some leave the choice to the model. So where an output starts is read from the end of the
rendered prompt and not from a template argument: only the end, since a system prompt may explain the markers.

- Opening in the prompt: the output is reasoning up to the closing marker. A model that writes the opening again is
  forgiven.
- Otherwise an opening marker at the beginning (white space aside) starts reasoning, and a closing one, by which the
  model says that it will not think, is dropped.
- Markers anywhere else are text: an agent that edits a file about them must get its file as written.
- A model may forget to close its reasoning and go on with a tool call. What begins with a call's opening marker inside
  reasoning is therefore held back: if the closing marker follows it was a thought, if the output ends it was the
  answer.
- Reasoning that the output's end cuts off stays reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from longturn.frontend.parsers.base import ReasoningPiece
from longturn.frontend.parsers.minimax_m3_tags import TOOL_BLOCK
from longturn.frontend.stop import overlap

MAX_SPACE_CHARS = 256
"""White space before a marker; more of it is the beginning of an answer, and not held back."""


@dataclass(frozen=True, slots=True)
class ReasoningSyntax:
    """How a model marks its reasoning."""

    open: str
    close: str
    call: str | None = None
    """What a tool call begins with; it ends reasoning that is never closed."""
    spaced: bool = False
    """The template sets reasoning and markers on lines of their own, and puts space before the answer; none of that is
    given out."""


MINIMAX_M3 = ReasoningSyntax("<mm:think>", "</mm:think>", TOOL_BLOCK)
THINK = ReasoningSyntax("<think>", "</think>", "<tool_call>", spaced=True)
"""Qwen3, DeepSeek-R1 and their like."""


class _State(Enum):
    START = auto()
    """Only white space so far."""
    OPENED = auto()
    """The prompt opened the block; only white space so far."""
    INSIDE = auto()
    DRAFT = auto()
    """A tool call inside reasoning."""
    CONTENT = auto()


class MarkedReasoning:
    """State of one output."""

    __slots__ = (
        "_at", "_calls_end", "_draft", "_draft_at", "_end", "_held", "_marks", "_shown", "_space", "_start",
        "_state", "_trims",
    )  # fmt: skip

    def __init__(self, prompt: str, marks: ReasoningSyntax, *, calls_end: bool = True) -> None:
        """
        Args:
            prompt: the rendered prompt, or at least its end.
            marks: the model's.
            calls_end: a tool call ends reasoning that is never closed; to be set where calls are parsed.
        """
        # The end is enough, and a prompt may have a million characters.
        inside = prompt[-64:].rstrip().endswith(marks.open)
        self._state = _State.OPENED if inside else _State.START
        self._marks = marks
        self._calls_end = calls_end
        self._held = ""
        self._draft: list[str] = []
        self._draft_at = 0
        self._at = 0
        """Characters of the output that are out of `_held`."""
        self._start = 0
        self._end: int | None = None if inside else 0
        self._shown = False
        """Some reasoning was given out."""
        self._space = ""
        """White space that more reasoning may follow."""
        self._trims = False
        """White space at the beginning of the answer is not given out."""

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
        return self._piece(reasoning, content)

    def finish(self) -> ReasoningPiece:
        """As `ReasoningParser.finish`."""
        state, self._state = self._state, _State.CONTENT
        if state in (_State.OPENED, _State.INSIDE):
            rest = self._take(len(self._held))
            self._end = self._at
            return self._piece(rest, "")
        self._draft.append(self._take(len(self._held)))
        if state is _State.DRAFT:
            self._end = self._draft_at
        return self._piece("", "".join(self._draft))

    def _piece(self, reasoning: str, content: str) -> ReasoningPiece:
        if self._marks.spaced and reasoning:
            body = reasoning.rstrip()
            lead, self._space = self._space, reasoning[len(body) :] if body else self._space + reasoning
            reasoning = "" if not body else lead + body if self._shown else body.lstrip()
            self._shown = self._shown or bool(body)
        if self._trims and content:
            content = content.lstrip()
            self._trims = not content
        return ReasoningPiece(reasoning, content)

    def _is(self, *states: _State) -> bool:
        return self._state in states

    def _begin(self) -> None:
        """Drop a marker at the beginning, once it is known whether there is one."""
        body = self._held.lstrip()
        marks: tuple[str, ...] = (self._marks.open,)
        if self._state is not _State.OPENED:
            marks = (self._marks.open, self._marks.close)
        if len(self._held) - len(body) > MAX_SPACE_CHARS:
            marks = ()
        for mark in marks:
            if body.startswith(mark):
                self._take(len(self._held) - len(body) + len(mark))
                if mark == self._marks.open:
                    self._state, self._start, self._end = _State.INSIDE, self._at, None
                else:
                    self._state, self._trims = _State.CONTENT, self._marks.spaced
                return
        if not any(mark.startswith(body) for mark in marks):
            self._state = _State.INSIDE if self._state is _State.OPENED else _State.CONTENT

    def _inside(self) -> str:
        close, call = self._marks.close, self._marks.call
        marks = (close, call) if call is not None and self._calls_end else (close,)
        found = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if not found:
            return self._take(len(self._held) - max(overlap(self._held, mark) for mark in marks))
        at, mark = min(found)
        reasoning = self._take(at)
        if mark == close:
            self._close()
        else:
            self._state, self._draft_at = _State.DRAFT, self._at
        return reasoning

    def _drafted(self) -> str:
        close = self._marks.close
        if (at := self._held.find(close)) < 0:
            self._draft.append(self._take(len(self._held) - overlap(self._held, close)))
            return ""
        self._draft.append(self._take(at))
        reasoning = "".join(self._draft)
        self._draft.clear()
        self._close()
        return reasoning

    def _close(self) -> None:
        self._end = self._at
        self._take(len(self._marks.close))
        self._state, self._trims = _State.CONTENT, self._marks.spaced

    def _take(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self._at += count
        return text
