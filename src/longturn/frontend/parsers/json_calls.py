"""Tool calls that are JSON objects, in the three ways in which models write them.

    hermes       <tool_call>{"name": "f", "arguments": {"city": "Rome"}}</tool_call>      Hermes, Qwen, many others
    llama_json   {"name": "f", "parameters": {"city": "Rome"}}                            Llama 3.1 and later
    json         {"name": "f", "arguments": {"city": "Rome"}}, also in a ```json block    models without a syntax

A call is given out whole when its object ends, never in part: an output that is cut off inside a call has not made it,
and its text is content. What models get wrong, and what becomes of it:

- No JSON behind an opening marker, or JSON that is no call: the text, marker included, is content, and what follows is
  read as if the marker were not there.
- A closing marker that is missing is not missed; several objects between two markers, or a list, are several calls.
- Where no marker is needed only an answer that begins with the object makes a call, and only if the request has a tool
  of that name: an answer may be JSON for other reasons.

White space around calls belongs to the format. Text beside calls is content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from longturn.frontend.parsers.base import ToolPiece
from longturn.frontend.parsers.json_scan import JsonEnd, cannot_be_call, read_calls
from longturn.frontend.parsers.schema import tool_names
from longturn.frontend.records import ToolCall, ToolCallDelta
from longturn.frontend.stop import overlap

MAX_SPACE_CHARS = 256
"""White space before a call without a marker; more of it is the beginning of an answer, and not held back."""
_MAX_HEAD_CHARS = 512
"""What is looked at to tell early that an object is no call."""


@dataclass(frozen=True, slots=True)
class JsonSyntax:
    """How calls are marked."""

    markers: Mapping[str, str]
    """What opens calls, and what closes them (may be empty). None begins with another one."""
    bare: bool = False
    """An output may begin with a call without a marker; only calls of the request's tools count."""
    separators: str = ""
    """Characters between two calls without markers, beside white space."""


HERMES = JsonSyntax({"<tool_call>": "</tool_call>"})
LLAMA_JSON = JsonSyntax({"<|python_tag|>": ""}, bare=True, separators=";,")
JSON = JsonSyntax({"```json": "```", "<tool_call>": "</tool_call>"}, bare=True, separators=";,")


class _State(Enum):
    START = auto()
    """Only white space so far, and a call may come without a marker."""
    TEXT = auto()
    OPENED = auto()
    """Behind a marker or a separator: white space, or the beginning of an object."""
    VALUE = auto()
    """Inside a JSON value."""
    CALLED = auto()
    """Behind a call."""


class JsonCalls:
    """State of one output."""

    __slots__ = (
        "_after_call", "_calls", "_closer", "_content", "_count", "_end", "_judged", "_known", "_pending", "_raw",
        "_space", "_state", "_syntax", "_value",
    )  # fmt: skip

    def __init__(self, syntax: JsonSyntax, tools: Sequence[Mapping[str, Any]]) -> None:
        """
        Args:
            syntax: how the model marks calls.
            tools: the request's tools, as OpenAI's chat API has them.
        """
        self._syntax = syntax
        self._known = frozenset(tool_names(tools)) if syntax.bare else None
        self._state = _State.START if syntax.bare else _State.TEXT
        self._pending = ""
        """Text that no state has taken yet."""
        self._raw: list[str] = []
        """What led to the value that is being read: white space, a marker. Content if there is no call."""
        self._value: list[str] = []
        self._end = JsonEnd()
        self._judged = False
        """It is decided that the value may be a call."""
        self._closer = ""
        self._space: list[str] = []
        """White space that a call may follow."""
        self._after_call = False
        self._count = 0
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []

    def push(self, text: str) -> ToolPiece:
        """As `ToolParser.push`."""
        self._pending += text
        self._run()
        return self._piece()

    def finish(self) -> ToolPiece:
        """As `ToolParser.finish`."""
        while self._state in (_State.OPENED, _State.VALUE):
            self._give_back()
            self._run()
        self._text(self._pending)
        self._pending = ""
        if not self._after_call:
            self._content += self._space
        self._space.clear()
        return self._piece()

    def _piece(self) -> ToolPiece:
        content, calls = "".join(self._content), tuple(self._calls)
        self._content.clear()
        self._calls.clear()
        return ToolPiece(content, calls)

    def _run(self) -> None:
        steps = {
            _State.START: self._start,
            _State.TEXT: self._in_text,
            _State.OPENED: self._opened,
            _State.VALUE: self._in_value,
            _State.CALLED: self._called,
        }
        while self._pending and steps[self._state]():
            pass

    # --- one step of each state; false if only more text can tell how it goes on -------------------------------------

    def _start(self) -> bool:
        body = self._pending.lstrip()
        space = len(self._pending) - len(body)
        if not body and space <= MAX_SPACE_CHARS:
            return False
        if body and space <= MAX_SPACE_CHARS and body[0] in "{[":
            self._raw.append(self._take(space))
            self._begin_value()
        else:
            self._state = _State.TEXT
        return True

    def _in_text(self) -> bool:
        found = [(at, mark) for mark in self._syntax.markers if (at := self._pending.find(mark)) >= 0]
        if not found:
            keep = max(overlap(self._pending, mark) for mark in self._syntax.markers)
            self._text(self._take(len(self._pending) - keep))
            return False
        at, mark = min(found)
        self._text(self._take(at))
        self._raw = [*self._space, self._take(len(mark))]
        self._space.clear()
        self._closer = self._syntax.markers[mark]
        self._state = _State.OPENED
        return True

    def _opened(self) -> bool:
        body = self._pending.lstrip()
        self._raw.append(self._take(len(self._pending) - len(body)))
        if not body:
            return False
        if body[0] in "{[":
            self._begin_value()
        else:
            self._give_back()
        return True

    def _in_value(self) -> bool:
        end = self._end.push(self._pending)
        self._value.append(self._take(len(self._pending) if end is None else end))
        if end is None:
            if not self._judged and self._known is not None:
                head = "".join(self._value)[:_MAX_HEAD_CHARS]
                judged = cannot_be_call(head)
                if judged:
                    self._give_back()
                    return True
                self._judged = judged is False or len(head) == _MAX_HEAD_CHARS
            return False
        calls = read_calls("".join(self._value), self._known) if end else None
        if calls is None:
            self._give_back()
        else:
            self._call(calls)
        return True

    def _called(self) -> bool:
        body = self._pending.lstrip()
        if not body or (self._closer.startswith(body) and body != self._closer):
            return False
        space = self._take(len(self._pending) - len(body))
        if self._closer and body.startswith(self._closer):
            self._take(len(self._closer))
            self._state = _State.TEXT
        elif body[0] in "{[" and (self._closer or self._known is not None):
            self._raw = [space]
            self._begin_value()
        elif not self._closer and body[0] in self._syntax.separators:
            self._raw = [space, self._take(1)]
            self._state = _State.OPENED
        else:
            self._state = _State.TEXT
            self._space = [space]
        return True

    # --- what comes of it --------------------------------------------------------------------------------------------

    def _text(self, text: str) -> None:
        if body := text.rstrip():
            self._after_call = False
            self._content += (*self._space, body)
            self._space.clear()
        self._space.append(text[len(body) :])

    def _begin_value(self) -> None:
        self._state, self._end, self._judged = _State.VALUE, JsonEnd(), False

    def _give_back(self) -> None:
        """What was taken for a call is text. What stands behind the marker is read again: it may hold a call."""
        self._pending = "".join(self._value) + self._pending
        self._value.clear()
        self._state = _State.TEXT
        lead = "".join(self._raw)
        self._raw.clear()
        self._text(lead)

    def _call(self, calls: Sequence[ToolCall]) -> None:
        for call in calls:
            self._calls.append(ToolCallDelta(self._count, name=call.name, arguments=call.arguments))
            self._count += 1
        self._raw.clear()
        self._value.clear()
        self._state, self._after_call = _State.CALLED, True

    def _take(self, count: int) -> str:
        text, self._pending = self._pending[:count], self._pending[count:]
        return text


def hermes(tools: Sequence[Mapping[str, Any]]) -> JsonCalls:
    """A parser of the `hermes` format."""
    return JsonCalls(HERMES, tools)


def llama_json(tools: Sequence[Mapping[str, Any]]) -> JsonCalls:
    """A parser of the `llama_json` format."""
    return JsonCalls(LLAMA_JSON, tools)


def plain_json(tools: Sequence[Mapping[str, Any]]) -> JsonCalls:
    """A parser of the `json` format."""
    return JsonCalls(JSON, tools)
