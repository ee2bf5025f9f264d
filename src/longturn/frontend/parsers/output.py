"""One output through a model's parsers: reasoning first, tool calls in what is left."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from longturn.frontend.parsers.base import ReasoningParser, ReasoningPiece, ToolParser, ToolPiece, join_calls
from longturn.frontend.parsers.registry import OutputFormat
from longturn.frontend.records import ChatPrompt, TextRequest, ToolCallDelta

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OutputPiece:
    """A piece of each kind."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCallDelta, ...] = ()
    behind: int = 0
    """As `ToolPiece` has it."""


class OutputParser:
    """State of one output. What it gives out adds up to the same however the text is cut."""

    __slots__ = (
        "_calls",
        "_content",
        "_failed",
        "_reasoner",
        "_reasoning",
        "_request_id",
        "_text",
        "_tools",
        "markers",
    )

    def __init__(
        self,
        request_id: str,
        reasoning: ReasoningParser | None,
        tools: ToolParser | None,
        markers: tuple[str, ...] = (),
    ) -> None:
        """
        Args:
            request_id: what the calls' ids are made from.
            reasoning: None leaves reasoning in the text.
            tools: None leaves tool calls in the text.
            markers: control tokens that must be in the text for these parsers.
        """
        self.markers = markers
        self._request_id = request_id
        self._reasoner = reasoning
        self._tools = tools
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []
        self._text: list[str] = []
        """All that was pushed."""
        self._failed = False

    @classmethod
    def of(cls, form: OutputFormat, request: TextRequest, rendered: str) -> OutputParser | None:
        """What a request's output needs; None where nothing is to be taken apart.

        Args:
            form: how the model writes.
            request: only chats are parsed, and of those what the request asks for.
            rendered: the prompt's text.
        """
        prompt = request.prompt
        if not isinstance(prompt, ChatPrompt):
            return None
        tools = form.tools if request.parse_tools else None
        reasoning = form.reasoning if request.split_reasoning else None
        if tools is None and reasoning is None:
            return None
        return cls(
            request.request_id,
            None if reasoning is None else reasoning.make(rendered, tools is not None),
            None if tools is None else tools.make(prompt.callable_tools),
            (*(reasoning.markers if reasoning else ()), *(tools.markers if tools else ())),
        )

    def push(self, text: str) -> OutputPiece:
        """What is certain after more text."""
        self._text.append(text)
        return self._guarded(self._push, text)

    def finish(self) -> OutputPiece:
        """What was held back, at the end of the output."""
        return self._guarded(self._finish)

    def _guarded(self, step: Callable[..., OutputPiece], *text: str) -> OutputPiece:
        """A step of the parsers. One that fails is a bug of ours and no reason to withhold what the model wrote."""
        if self._failed:
            return self._piece("", ToolPiece("".join(text)))
        try:
            return step(*text)
        except Exception:
            _log.exception("request %s: its output could not be parsed and is given as it is", self._request_id)
        self._failed = True
        whole, content = "".join(self._text), "".join(self._content)
        return self._piece("", ToolPiece(whole.removeprefix(content)))

    def _push(self, text: str) -> OutputPiece:
        piece = self._reasoner.push(text) if self._reasoner else ReasoningPiece(content=text)
        return self._piece(piece.reasoning, self._tools.push(piece.content) if self._tools else _plain(piece))

    def _finish(self) -> OutputPiece:
        piece = self._reasoner.finish() if self._reasoner else ReasoningPiece()
        if self._tools is None:
            return self._piece(piece.reasoning, _plain(piece))
        more, last = self._tools.push(piece.content), self._tools.finish()
        both = ToolPiece(more.content + last.content, (*more.calls, *last.calls), more.behind + last.behind)
        return self._piece(piece.reasoning, both)

    @property
    def reasoning_span(self) -> tuple[int, int]:
        """Where the reasoning lies in the output's text: first character, and one past the last."""
        return self._reasoner.span if self._reasoner else (0, 0)

    def message(self) -> dict[str, Any]:
        """All of it as the message that a client sends back."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in join_calls(self._calls)
            ]
        return message

    def _piece(self, reasoning: str, piece: ToolPiece) -> OutputPiece:
        calls = tuple(replace(call, id=self._call_id(call.index)) if call.name else call for call in piece.calls)
        if reasoning:
            self._reasoning.append(reasoning)
        if piece.content:
            self._content.append(piece.content)
        self._calls += calls
        return OutputPiece(piece.content, reasoning, calls, piece.behind)

    def _call_id(self, index: int) -> str:
        # Derived, so that a run can be repeated; the request's id makes it unique.
        name = f"{self._request_id}/{index}".encode()
        return "call_" + hashlib.blake2b(name, digest_size=12).hexdigest()


def _plain(piece: ReasoningPiece) -> ToolPiece:
    return ToolPiece(piece.content)
