"""MiniMax-M3's tool calls.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="f">]<]minimax[>[<city>Rome]<]minimax[>[</city>]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

An argument is an element named after it, an object has an element for each member and a list an `<item>` for each
entry; `schema.py` makes JSON of them. A call is given out whole when it ends: its arguments are no stream, since a
name that comes twice turns a value already written into a list. White space around the tags is part of the format.

What models get wrong, and what becomes of it; nothing they write is lost, and no call is made of half a one:

- The output ends inside a call: its text, tags included, is content. (Arguments so far would be a call that the model
  had not finished asking for.) The same with a block that has no call in it.
- A closing tag closes what is still open inside it, up to the call and the block; a new call closes the one before. A
  closing tag that fits nothing is text. So an element that was never closed ends with the next thing around it.
- A call without a block around it is a call.
- Text beside elements is kept as the member `$text`. A call whose whole body is a JSON object has that for arguments.
- Text after a block is content, and a second block's calls count on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

from longturn.frontend.parsers.base import ToolPiece
from longturn.frontend.parsers.minimax_m3_tags import Tag, TagReader
from longturn.frontend.parsers.schema import Element, arguments_json, tool_schemas
from longturn.frontend.records import ToolCallDelta

MAX_DEPTH = 128
"""Elements in elements; deeper tags are text. Keeps hostile output from overflowing the stack when it is converted."""

_INVOKE = re.compile(r"""invoke\s+name\s*=\s*(?:"([^"]*)"|'([^']*)'|([^"'\s]*))\s*""")


class _State(Enum):
    TEXT = auto()
    BLOCK = auto()
    """A block has just been opened and has no call yet."""
    CALL = auto()


class MinimaxM3Tools:
    """State of one output."""

    __slots__ = (
        "_after_tag", "_calls", "_content", "_count", "_in_block", "_raw", "_schemas", "_space", "_stack", "_state",
        "_tags",
    )  # fmt: skip

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """
        Args:
            tools: the request's tools, as OpenAI's chat API has them; their schemas decide the types of arguments.
        """
        self._schemas = tool_schemas(tools)
        self._tags = TagReader()
        self._state = _State.TEXT
        self._stack: list[Element] = []
        """The call, and the elements that are open in it."""
        self._raw: list[str] = []
        """What was written since the last thing that was certain; content if it turns out to be no call."""
        self._space: list[str] = []
        """White space that a tag may follow."""
        self._after_tag = False
        self._in_block = False
        self._count = 0
        self._content: list[str] = []
        self._calls: list[ToolCallDelta] = []

    def push(self, text: str) -> ToolPiece:
        """As `ToolParser.push`."""
        for token in self._tags.push(text):
            self._token(token)
        return self._piece()

    def finish(self) -> ToolPiece:
        """As `ToolParser.finish`."""
        if held := self._tags.finish():
            self._token(held)
        if self._state is not _State.TEXT:
            self._give_back()
        elif not self._after_tag:
            self._content += self._space
        self._space.clear()
        return self._piece()

    def _piece(self) -> ToolPiece:
        content, calls = "".join(self._content), tuple(self._calls)
        self._content.clear()
        self._calls.clear()
        return ToolPiece(content, calls)

    def _token(self, token: str | Tag) -> None:
        if self._state is _State.CALL:
            self._in_call(token)
        elif self._state is _State.BLOCK:
            self._in_empty_block(token)
        elif isinstance(token, str):
            self._text(token)
        else:
            self._tag(token)

    # --- outside of calls --------------------------------------------------------------------------------------------

    def _text(self, text: str) -> None:
        if body := text.rstrip():
            self._after_tag = False
            self._content += (*self._space, body)
            self._space.clear()
        self._space.append(text[len(body) :])

    def _tag(self, tag: Tag) -> None:
        if tag.body == "/tool_call" and self._in_block:
            self._in_block, self._after_tag = False, True
            self._space.clear()
        elif tag.body == "tool_call":
            self._state, self._raw = _State.BLOCK, [*self._space, tag.raw]
            self._space.clear()
        elif name := _invoked(tag):
            self._raw = [*self._space]
            self._space.clear()
            self._open_call(name, tag)
        else:
            self._text(tag.raw)

    def _in_empty_block(self, token: str | Tag) -> None:
        if isinstance(token, Tag) and (name := _invoked(token)):
            self._open_call(name, token)
            return
        if isinstance(token, str) and token.isspace():
            self._raw.append(token)
            return
        self._give_back()
        self._token(token)

    def _give_back(self) -> None:
        text = "".join(self._raw)
        self._raw.clear()
        self._stack.clear()
        self._state = _State.TEXT
        # No trimming: white space in it is as it was written.
        self._content.append(text)
        self._after_tag = False

    # --- calls -------------------------------------------------------------------------------------------------------

    def _open_call(self, name: str, tag: Tag) -> None:
        self._state, self._in_block = _State.CALL, True
        self._raw.append(tag.raw)
        self._stack = [Element(name)]

    def _close_call(self) -> None:
        call = self._stack[0]
        arguments = arguments_json(call, self._schemas.get(call.name))
        self._calls.append(ToolCallDelta(self._count, name=call.name, arguments=arguments))
        self._count += 1
        self._raw.clear()
        self._stack.clear()
        self._state, self._after_tag = _State.TEXT, True

    def _in_call(self, token: str | Tag) -> None:
        if isinstance(token, Tag) and (name := _invoked(token)):
            self._close_call()
            self._open_call(name, token)
            return
        self._raw.append(token if isinstance(token, str) else token.raw)
        if isinstance(token, str):
            self._stack[-1].parts.append(token)
        elif token.body.startswith("/"):
            self._close(token)
        elif len(self._stack) > MAX_DEPTH:
            self._stack[-1].parts.append(token.raw)
        else:
            element = Element(token.body.removesuffix("/"))
            self._stack[-1].children.append(element)
            if not token.body.endswith("/"):
                self._stack.append(element)

    def _close(self, tag: Tag) -> None:
        name = tag.body[1:]
        for depth in range(len(self._stack) - 1, 0, -1):
            if self._stack[depth].name == name:
                del self._stack[depth:]
                return
        if name == "invoke":
            self._close_call()
        elif name == "tool_call":
            self._close_call()
            self._in_block = False
        else:
            self._stack[-1].parts.append(tag.raw)


def _invoked(tag: Tag) -> str:
    """The function that a tag calls; empty if it is another tag."""
    found = _INVOKE.fullmatch(tag.body)
    return next((name.strip() for name in found.groups() if name), "") if found else ""
