"""Qwen3-Coder's tool calls.

    <tool_call>
    <function=f>
    <parameter=city>
    Rome
    </parameter>
    </function>
    </tool_call>

A parameter's value is what stands between its tags, without one line end at either side; the tool's schema says whether
it is a text or JSON. Texts are given out as they come, other values when they end. Values are not escaped, so a closing
tag ends one only if what follows it is a tag of the format, too: a file that holds such tags is written as it is.

What models get wrong, and what becomes of it:

- No function behind the opening marker: both are content.
- Without `<tool_call>` a function is called only if it is one of the request's tools.
- A tag that is missing (of a value, a function, a block) ends with the next one around it. A closing one that is cut
  off is no text.
- Text beside parameters is kept as the member `$text`. A call whose whole body is a JSON object has that for arguments.
- The output ends inside a call: what was written is the beginning of a JSON text, which is no client's arguments.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

from longturn.frontend.parsers.arguments import ArgumentsWriter
from longturn.frontend.parsers.base import Pieces, ToolPiece
from longturn.frontend.parsers.schema import tool_names, tool_schemas
from longturn.frontend.stop import overlap

BLOCK, BLOCK_END = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MAX_NAME_CHARS = 256
"""Bounds what is held back behind the beginning of a tag."""

_NAME = re.compile(rf"[^<>\n]{{1,{MAX_NAME_CHARS}}}")
_AFTER_VALUE = (PARAMETER, FUNCTION_END, FUNCTION, BLOCK_END)


class _State(Enum):
    TEXT = auto()
    OPENED = auto()
    """Behind `<tool_call>`."""
    CALL = auto()
    """Between the parameters of a call."""
    VALUE = auto()
    CALLED = auto()
    """Behind a call."""


class Qwen3CoderTools:
    """State of one output."""

    __slots__ = (
        "_arguments", "_begun", "_known", "_loose", "_name", "_pending", "_pieces", "_raw", "_schemas", "_state",
        "_streams", "_value",
    )  # fmt: skip

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """
        Args:
            tools: the request's tools, as OpenAI's chat API has them; their schemas decide the types of arguments.
        """
        self._schemas = tool_schemas(tools)
        self._known = frozenset(tool_names(tools))
        self._state = _State.TEXT
        self._pending = ""
        """Text that no state has taken yet."""
        self._raw: list[str] = []
        """What led to a function; content if there is none."""
        self._arguments = ArgumentsWriter(None)
        self._loose: list[str] = []
        """Text beside the parameters."""
        self._name = ""
        """Of the parameter that is being read."""
        self._streams = False
        """Its value is given out as it comes."""
        self._begun = False
        """Something of its value, or the line end before it, was read."""
        self._value: list[str] = []
        """What was read of a value that does not stream."""
        self._pieces = Pieces()

    def push(self, text: str) -> ToolPiece:
        """As `ToolParser.push`."""
        self._pending += text
        self._run()
        self._pieces.more(self._arguments.take())
        return self._pieces.take()

    def finish(self) -> ToolPiece:
        """As `ToolParser.finish`."""
        if self._state is _State.VALUE:
            # Nothing came that could have said that this is not its end.
            end = next((mark for mark in (PARAMETER_END, FUNCTION_END) if mark in self._pending), None)
            if end is not None:
                self._take(self._pending.index(end) + (len(end) if end == PARAMETER_END else 0))
                self._end_value()
                self._run()
        if self._state in (_State.CALL, _State.VALUE):
            return self._cut_off()
        while self._state is _State.OPENED:
            self._give_back()
            self._run()
        rest = self._take(len(self._pending))
        if self._state is not _State.CALLED or not BLOCK_END.startswith(rest.lstrip()):
            self._pieces.text(rest)
        self._pieces.end()
        self._pieces.more(self._arguments.take())
        return self._pieces.take()

    def _cut_off(self) -> ToolPiece:
        """The output has ended inside a call."""
        rest = self._take(len(self._pending))
        if self._state is _State.VALUE:
            self._add(rest)
            self._end_value(cut=True)
        elif not any(mark.startswith(rest) for mark in (FUNCTION_END, BLOCK_END)):
            self._loose.append(rest)
        self._arguments.loose_text("".join(self._loose))
        self._pieces.more(self._arguments.take())
        return self._pieces.take()

    def _run(self) -> None:
        steps = {
            _State.TEXT: self._in_text,
            _State.OPENED: self._opened,
            _State.CALL: self._in_call,
            _State.VALUE: self._in_value,
            _State.CALLED: self._called,
        }
        while self._pending and steps[self._state]():
            pass

    # --- one step of each state; false if only more text can tell how it goes on -------------------------------------

    def _in_text(self) -> bool:
        found = [(at, mark) for mark in (BLOCK, FUNCTION) if (at := self._pending.find(mark)) >= 0]
        if not found:
            keep = max(overlap(self._pending, mark) for mark in (BLOCK, FUNCTION))
            self._pieces.text(self._take(len(self._pending) - keep))
            return False
        at, mark = min(found)
        self._pieces.text(self._take(at))
        if mark == BLOCK:
            self._raw = [self._pieces.take_space(), self._take(len(mark))]
            self._state = _State.OPENED
            return True
        name = self._tag(FUNCTION)
        if name is None:
            return False
        if name in self._known:
            self._open_call(name)
        else:
            self._pieces.text(self._take(len(mark)))
        return True

    def _opened(self) -> bool:
        body = self._pending.lstrip()
        self._raw.append(self._take(len(self._pending) - len(body)))
        if not body or (FUNCTION.startswith(body) and body != FUNCTION):
            return False
        if not body.startswith(FUNCTION):
            self._give_back()
            return True
        name = self._tag(FUNCTION)
        if name is None:
            return False
        if name:
            self._open_call(name)
        else:
            self._give_back()
        return True

    def _in_call(self) -> bool:
        at = self._pending.find("<")
        self._loose.append(self._take(len(self._pending) if at < 0 else at))
        if not self._pending:
            return False
        for mark in (PARAMETER, FUNCTION):
            if self._pending.startswith(mark):
                name = self._tag(mark)
                if name is None:
                    return False
                if name:
                    self._take(len(mark) + len(name) + 1)
                    if mark == PARAMETER:
                        self._open_value(name)
                    else:
                        self._close_call()
                        self._begin_call(name)
                    return True
        for mark in (FUNCTION_END, BLOCK_END):
            if self._pending.startswith(mark):
                self._take(len(mark))
                self._close_call()
                if mark == BLOCK_END:
                    self._state = _State.TEXT
                return True
        if any(mark.startswith(self._pending) for mark in _AFTER_VALUE):
            return False
        self._loose.append(self._take(1))
        return True

    def _in_value(self) -> bool:
        if not self._begun and not self._skip_line_end():
            return False
        at = 0
        while (at := self._pending.find("</", at)) >= 0:
            ends = self._ends_value(self._pending[at:])
            if ends is None:
                self._add(self._take(at - self._pending.endswith("\n", 0, at)))
                return False
            if ends >= 0:
                self._add(self._take(at).removesuffix("\n"))
                self._take(ends)
                self._end_value()
                return True
            at += 2
        keep = 2 if self._pending.endswith("\n<") else self._pending.endswith(("\n", "<"))
        self._add(self._take(len(self._pending) - keep))
        return False

    def _called(self) -> bool:
        body = self._pending.lstrip()
        if not body or any(mark.startswith(body) and mark != body for mark in (BLOCK_END, FUNCTION)):
            return False
        space = self._take(len(self._pending) - len(body))
        if body.startswith(BLOCK_END):
            self._take(len(BLOCK_END))
            self._state = _State.TEXT
            return True
        name = self._tag(FUNCTION) if body.startswith(FUNCTION) else ""
        if name:
            self._open_call(name)
            return True
        self._pending = space + self._pending
        if name is not None:
            self._state = _State.TEXT
        return name is not None

    # --- what comes of it --------------------------------------------------------------------------------------------

    def _tag(self, mark: str) -> str | None:
        """The name in the tag that the pending text begins with; empty if it is no such tag, None if more text
        decides."""
        found = _NAME.match(self._pending, len(mark))
        end = len(mark) if found is None else found.end()
        if end < len(self._pending):
            return found[0] if found is not None and self._pending[end] == ">" else ""
        return None

    def _open_call(self, name: str) -> None:
        """Begin the call whose tag the pending text begins with."""
        self._take(len(FUNCTION) + len(name) + 1)
        self._begin_call(name)

    def _begin_call(self, name: str) -> None:
        self._pieces.more(self._arguments.take())
        self._pieces.begin(name)
        self._arguments = ArgumentsWriter(self._schemas.get(name))
        self._raw.clear()
        self._loose.clear()
        self._state = _State.CALL

    def _close_call(self) -> None:
        self._arguments.loose_text("".join(self._loose))
        self._loose.clear()
        self._arguments.close()
        self._state = _State.CALLED

    def _open_value(self, name: str) -> None:
        self._name, self._begun, self._state = name, False, _State.VALUE
        self._streams = self._arguments.schema_of(name) is None or self._arguments.streams(name)
        if self._streams:
            self._arguments.open_text(name)

    def _skip_line_end(self) -> bool:
        self._begun = True
        self._take(self._pending.startswith("\n"))
        return bool(self._pending)

    def _ends_value(self, text: str) -> int | None:
        """How much of a text, which begins with `</`, ends a value: negative if nothing does, None if more text
        decides."""
        for mark, after in ((PARAMETER_END, _AFTER_VALUE), (FUNCTION_END, (BLOCK_END,))):
            if text.startswith(mark):
                behind = text[len(mark) :].lstrip()
                if any(behind.startswith(tag) for tag in after):
                    # The end of the function is read again, between the parameters.
                    return len(mark) if mark == PARAMETER_END else 0
                return None if any(tag.startswith(behind) for tag in after) else -1
        return None if PARAMETER_END.startswith(text) or FUNCTION_END.startswith(text) else -1

    def _add(self, text: str) -> None:
        if self._streams:
            self._arguments.text(text)
        else:
            self._value.append(text)

    def _end_value(self, *, cut: bool = False) -> None:
        """The value has ended, or the output inside of it."""
        if not self._streams:
            self._arguments.converted(self._name, "".join(self._value))
        elif not cut:
            self._arguments.close_text()
        self._value.clear()
        self._state = _State.VALUE if cut else _State.CALL

    def _give_back(self) -> None:
        """What was taken for a call is text."""
        self._state = _State.TEXT
        lead = "".join(self._raw)
        self._raw.clear()
        self._pieces.text(lead)

    def _take(self, count: int) -> str:
        text, self._pending = self._pending[:count], self._pending[count:]
        return text
