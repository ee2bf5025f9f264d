"""Tool calls that are JSON objects, in the three ways in which models write them.

    hermes       <tool_call>{"name": "f", "arguments": {"city": "Rome"}}</tool_call>      Hermes, Qwen, many others
    llama_json   {"name": "f", "parameters": {"city": "Rome"}}                            Llama 3.1 and later
    json         {"name": "f", "arguments": {"city": "Rome"}}, also in a ```json block    models without a syntax

A call begins when its name is known and its arguments open as an object; these are then given out as they are written.
An output that is cut off has given out the beginning of a JSON text. Calls in rarer forms (arguments before the name,
as a text, or inside a `function`; several in a list) are given out whole when their object ends, and are text if they
are cut off. What models get wrong, and what becomes of it:

- No JSON behind an opening marker, or JSON that is no call: the text, marker included, is content, and what follows is
  read as if the marker were not there.
- Arguments that turn out to be no JSON are given out as they are: up to the bracket that would end them, or to the
  closing marker. The client sees that they are none. Line ends inside of strings are corrected.
- A closing marker that is missing is not missed, and one that is cut off is no text. Several objects between two
  markers, or a list, are several calls.
- Where no marker is needed only an answer that begins with the object makes a call, and only if the request has a tool
  of that name: an answer may be JSON for other reasons.

White space around calls belongs to the format. Text beside calls is content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from longturn.frontend.parsers.base import Pieces, ToolPiece
from longturn.frontend.parsers.json_scan import ArgumentsScan, JsonEnd, call_head, cannot_be_call, read_calls
from longturn.frontend.parsers.schema import tool_names
from longturn.frontend.records import ToolCall
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
    ARGUMENTS = auto()
    """Inside the arguments of a call that was begun."""
    BEHIND = auto()
    """Behind these: the end of the call's object."""
    REST = auto()
    """Inside other members of the call's object, which say nothing."""
    CALLED = auto()
    """Behind a call."""


class JsonCalls:
    """State of one output."""

    __slots__ = (
        "_arguments", "_closer", "_end", "_judged", "_known", "_may_begin", "_pending", "_pieces", "_raw", "_state",
        "_syntax", "_value",
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
        self._may_begin = False
        """The value may turn out to begin like a call whose arguments can be given out as they come."""
        self._arguments = ArgumentsScan()
        self._closer = ""
        self._pieces = Pieces()

    def push(self, text: str) -> ToolPiece:
        """As `ToolParser.push`."""
        self._pending += text
        self._run()
        return self._pieces.take()

    def finish(self) -> ToolPiece:
        """As `ToolParser.finish`."""
        while self._state in (_State.OPENED, _State.VALUE):
            self._give_back()
            self._run()
        if self._state is _State.ARGUMENTS:
            self._pieces.more(self._pending)
        elif self._state is not _State.CALLED or not self._closer.startswith(self._pending.lstrip()):
            self._pieces.text("".join(self._value) + self._pending)
        self._pending = ""
        self._value.clear()
        self._pieces.end()
        return self._pieces.take()

    def _run(self) -> None:
        steps = {
            _State.START: self._start,
            _State.TEXT: self._in_text,
            _State.OPENED: self._opened,
            _State.VALUE: self._in_value,
            _State.ARGUMENTS: self._in_arguments,
            _State.BEHIND: self._behind,
            _State.REST: self._rest,
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
            self._pieces.text(self._take(len(self._pending) - keep))
            return False
        at, mark = min(found)
        self._pieces.text(self._take(at))
        self._raw = [self._pieces.take_space(), self._take(len(mark))]
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
        if self._may_begin and self._begins():
            return True
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

    def _begins(self) -> bool:
        """Begin a call if the value so far is the beginning of one."""
        text = "".join(self._value) + self._pending
        found = call_head(text[: _MAX_HEAD_CHARS + 1])
        if found is None or (self._known is not None and found[0] not in self._known):
            self._may_begin = found is None and len(text) <= _MAX_HEAD_CHARS
            return False
        name, at = found
        self._pieces.begin(name)
        self._raw.clear()
        self._value.clear()
        self._pending = text[at:]
        self._arguments = ArgumentsScan(self._closer)
        self._state = _State.ARGUMENTS
        return True

    def _in_arguments(self) -> bool:
        piece, used = self._arguments.push(self._pending)
        self._take(used)
        self._pieces.more(piece)
        if not self._arguments.open:
            self._state = _State.BEHIND
        return not self._arguments.open

    def _behind(self) -> bool:
        body = self._pending.lstrip()
        if not body:
            return False
        self._state = _State.CALLED
        if body[0] == "}":
            self._pending = body[1:]
        elif body[0] == ",":
            self._state, self._end = _State.REST, JsonEnd(depth=1)
        return True

    def _rest(self) -> bool:
        end = self._end.push(self._pending)
        self._value.append(self._take(len(self._pending) if end is None else end))
        if end is None:
            return False
        self._state = _State.CALLED
        if not end:  # no members, but something else, which shall not be lost
            self._pending = "".join(self._value) + self._pending
        self._value.clear()
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
            self._pieces.text(space)
        return True

    # --- what comes of it --------------------------------------------------------------------------------------------

    def _begin_value(self) -> None:
        self._state, self._end, self._judged, self._may_begin = _State.VALUE, JsonEnd(), False, True

    def _give_back(self) -> None:
        """What was taken for a call is text. What stands behind the marker is read again: it may hold a call."""
        self._pending = "".join(self._value) + self._pending
        self._value.clear()
        self._state = _State.TEXT
        lead = "".join(self._raw)
        self._raw.clear()
        self._pieces.text(lead)

    def _call(self, calls: Sequence[ToolCall]) -> None:
        for call in calls:
            self._pieces.begin(call.name, call.arguments)
        self._raw.clear()
        self._value.clear()
        self._state = _State.CALLED

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
