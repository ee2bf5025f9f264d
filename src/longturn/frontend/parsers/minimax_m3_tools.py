"""MiniMax-M3's tool calls.

    ]<]minimax[>[<tool_call>
    ]<]minimax[>[<invoke name="f">]<]minimax[>[<city>Rome]<]minimax[>[</city>]<]minimax[>[</invoke>
    ]<]minimax[>[</tool_call>

An argument is an element named after it, an object has an element for each member and a list an `<item>` for each
entry; `arguments.py` makes JSON of them while they are read. An argument that can only be a text is given out as it
comes, any other one when the next begins: until then the same name again would make a list of it.

What models get wrong, and what becomes of it; nothing they write is lost:

- The output ends inside a call: what was written of it is the beginning of a JSON text, which no client can take for
  arguments. A block without a call in it is content, tags included.
- A closing tag closes what is still open inside it, up to the call and the block; a new call closes the one before. A
  closing tag that fits nothing is text, and so is every tag in an argument that can only be a text. So an element that
  was never closed ends with the next thing around it.
- A call without a block around it is a call.
- Text beside elements is kept as the member `$text`. A call whose whole body is a JSON object has that for arguments.
- Text after a block is content, and a second block's calls count on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from typing import Any

from longturn.frontend.parsers.arguments import ArgumentsWriter
from longturn.frontend.parsers.base import Pieces, ToolPiece
from longturn.frontend.parsers.minimax_m3_tags import NAMESPACE, Tag, TagReader
from longturn.frontend.parsers.schema import Element, tool_schemas

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
        "_arguments", "_group", "_in_block", "_loose", "_pieces", "_raw", "_schemas", "_stack", "_state", "_tags",
        "_text_name",
    )  # fmt: skip

    def __init__(self, tools: Sequence[Mapping[str, Any]]) -> None:
        """
        Args:
            tools: the request's tools, as OpenAI's chat API has them; their schemas decide the types of arguments.
        """
        self._schemas = tool_schemas(tools)
        self._tags = TagReader()
        self._state = _State.TEXT
        self._arguments = ArgumentsWriter(None)
        self._stack: list[Element] = []
        """The argument that is being read, and the elements that are open in it."""
        self._group: list[Element] = []
        """An argument that is whole, unless its name comes again."""
        self._text_name: str | None = None
        """The argument that is being given out as it comes."""
        self._loose: list[str] = []
        """Text beside the arguments."""
        self._raw: list[str] = []
        """What was written since the last thing that was certain; content if it turns out to be no call."""
        self._in_block = False
        self._pieces = Pieces()

    def push(self, text: str) -> ToolPiece:
        """As `ToolParser.push`."""
        for token in self._tags.push(text):
            self._token(token)
        self._pieces.more(self._arguments.take())
        return self._pieces.take()

    def finish(self) -> ToolPiece:
        """As `ToolParser.finish`."""
        held = self._tags.finish()
        if held and not self._begins_tag(held):
            self._token(held)
        if self._state is _State.CALL:
            self._end_arguments()
        elif self._state is _State.BLOCK:
            self._give_back()
        self._pieces.end()
        self._pieces.more(self._arguments.take())
        return self._pieces.take()

    def _begins_tag(self, text: str) -> bool:
        """Whether a text is the beginning of a tag that could come now: in a call, or behind the last of a block."""
        if self._state is not _State.CALL:
            return self._in_block and self._pieces.after_call and f"{NAMESPACE}</tool_call>".startswith(text)
        name = self._text_name or (self._stack[-1].name if self._stack else "invoke")
        tags = (f"{NAMESPACE}</{ending}>" for ending in (name, "invoke", "tool_call"))
        return f"{NAMESPACE}<".startswith(text) or any(tag.startswith(text) for tag in tags)

    def _token(self, token: str | Tag) -> None:
        if self._state is _State.CALL:
            self._in_call(token)
        elif self._state is _State.BLOCK:
            self._in_empty_block(token)
        elif isinstance(token, str):
            self._pieces.text(token)
        else:
            self._tag(token)

    # --- outside of calls --------------------------------------------------------------------------------------------

    def _tag(self, tag: Tag) -> None:
        if tag.body == "/tool_call" and self._in_block:
            self._in_block = False
            self._pieces.mark()
        elif tag.body == "tool_call":
            self._state, self._raw = _State.BLOCK, [self._pieces.take_space(), tag.raw]
        elif name := _invoked(tag):
            self._open_call(name)
        else:
            self._pieces.text(tag.raw)

    def _in_empty_block(self, token: str | Tag) -> None:
        if isinstance(token, Tag) and (name := _invoked(token)):
            self._open_call(name)
            return
        if isinstance(token, str) and token.isspace():
            self._raw.append(token)
            return
        self._give_back()
        self._token(token)

    def _give_back(self) -> None:
        text = "".join(self._raw)
        self._raw.clear()
        self._state = _State.TEXT
        self._pieces.exactly(text)

    # --- calls -------------------------------------------------------------------------------------------------------

    def _open_call(self, name: str) -> None:
        self._state, self._in_block = _State.CALL, True
        self._raw.clear()
        self._pieces.begin(name)
        self._arguments = ArgumentsWriter(self._schemas.get(name))

    def _end_arguments(self) -> None:
        """Write what was read of the arguments."""
        if self._text_name is not None:
            self._text_name = None  # cut off
        elif self._stack:
            self._keep(self._stack[0])
        self._stack.clear()
        self._write_group()
        self._arguments.loose_text("".join(self._loose))
        self._loose.clear()

    def _close_call(self) -> None:
        if self._text_name is not None:
            self._close_text()
        self._end_arguments()
        self._arguments.close()
        self._pieces.more(self._arguments.take())
        self._state = _State.TEXT

    def _in_call(self, token: str | Tag) -> None:
        if isinstance(token, Tag) and (name := _invoked(token)):
            self._close_call()
            self._open_call(name)
        elif self._text_name is not None:
            self._in_text(token, self._text_name)
        elif isinstance(token, str):
            (self._stack[-1].parts if self._stack else self._loose).append(token)
        elif token.body.startswith("/"):
            self._close(token)
        elif len(self._stack) >= MAX_DEPTH:
            self._stack[-1].parts.append(token.raw)
        else:
            self._open(token)

    def _open(self, tag: Tag) -> None:
        element, empty = Element(tag.body.removesuffix("/")), tag.body.endswith("/")
        if self._stack:
            self._stack[-1].children.append(element)
        elif not self._group or self._group[0].name != element.name:
            self._write_group()
            if self._arguments.streams(element.name):
                self._arguments.open_text(element.name)
                self._text_name = element.name
                if empty:
                    self._close_text()
                return
        if not empty:
            self._stack.append(element)
        elif not self._stack:
            self._group.append(element)

    def _in_text(self, token: str | Tag, name: str) -> None:
        if isinstance(token, str):
            self._arguments.text(token)
        elif token.body == f"/{name}":
            self._close_text()
        elif token.body in ("/invoke", "/tool_call"):
            self._close_text()
            self._close(token)
        else:
            self._arguments.text(token.raw)

    def _close_text(self) -> None:
        self._arguments.close_text()
        self._text_name = None

    def _keep(self, element: Element) -> None:
        if self._group and self._group[0].name != element.name:
            self._write_group()
        self._group.append(element)

    def _write_group(self) -> None:
        if self._group:
            self._arguments.elements(self._group)
            self._group.clear()

    def _close(self, tag: Tag) -> None:
        name = tag.body[1:]
        for depth in range(len(self._stack) - 1, -1, -1):
            if self._stack[depth].name == name:
                if depth == 0:
                    self._keep(self._stack[0])
                del self._stack[depth:]
                return
        if name == "invoke":
            self._close_call()
        elif name == "tool_call":
            self._close_call()
            self._in_block = False
        else:
            (self._stack[-1].parts if self._stack else self._loose).append(tag.raw)


def _invoked(tag: Tag) -> str:
    """The function that a tag calls; empty if it is another tag."""
    found = _INVOKE.fullmatch(tag.body)
    return next((name.strip() for name in found.groups() if name), "") if found else ""
