"""An answer as a list of blocks: reasoning, text, calls. OpenAI's Responses and Anthropic's Messages both have it so.

The blocks of one answer come in this order whatever pieces it arrives in: reasoning, text, calls, text. Text that a
model writes behind its first call, between calls or behind them all, is one block at the end: chunks do not say between
which calls it stood.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from longturn.engine.records import FinishReason
from longturn.errors import LongturnError, RequestError
from longturn.frontend.parsers.json_scan import is_object
from longturn.frontend.records import Reuse, TextChunk, Usage

Kind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class Block:
    """One block, as far as it is written."""

    index: int
    kind: Kind
    call_id: str = ""
    name: str = ""
    """Of a call: the function."""
    parts: list[str] = field(default_factory=list)
    whole: bool = False
    """Ended by what came behind it, or by the model, and not by a limit on its length; of a call: its arguments are a
    JSON object."""

    @property
    def text(self) -> str:
        """The text, or the arguments of a call as JSON."""
        return "".join(self.parts)


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """Something that happened to a block."""

    kind: Literal["opened", "more", "closed"]
    block: Block
    text: str = ""
    """Of `more`: what the block was added."""


class AnswerBlocks:
    """State of one answer."""

    def __init__(self, *, reasoning: bool = True) -> None:
        """
        Args:
            reasoning: whether reasoning has blocks; it is left out otherwise.
        """
        self._reasoning = reasoning
        self._late: list[str] = []
        """Text behind calls."""
        self._open_block: Block | None = None
        self.blocks: list[Block] = []
        self.finish: FinishReason | None = None
        self.stop_text: str | None = None
        """The stop string that ended the answer, if one did."""
        self.usage: Usage | None = None
        self.prompt_tokens = 0
        """Known with the first chunk."""
        self.reuse: Reuse | None = None
        """Likewise, where the service tells."""

    @property
    def called(self) -> bool:
        """The answer has tool calls."""
        return any(block.kind == "call" for block in self.blocks)

    def push(self, chunk: TextChunk) -> Iterator[BlockEvent]:
        """What a chunk adds; the last one closes every block.

        Raises:
            LongturnError: the request ended without an answer.
        """
        if chunk.prompt_token_ids is not None:
            self.prompt_tokens = len(chunk.prompt_token_ids)
            self.reuse = chunk.reuse
        if chunk.reasoning and self._reasoning:
            yield from self._add("reasoning", chunk.reasoning)
        before = len(chunk.text) - chunk.behind_calls
        if before:
            yield from self._add("text", chunk.text[:before])
        if chunk.behind_calls:
            self._late.append(chunk.text[before:])
        for delta in chunk.tool_calls:
            if delta.name:
                yield from self._close(whole=True)
                yield self._open("call", delta.id, delta.name)
            if delta.arguments:
                yield from self._add("call", delta.arguments)
        if chunk.finish is None:
            return
        if chunk.finish is FinishReason.ERROR:
            raise LongturnError("the model could not be computed for this request")
        if chunk.finish is FinishReason.ABORT:
            # Not a fault of the server, which clients would try again.
            raise RequestError("the request was aborted on the server", code="request_aborted")
        self.finish, self.stop_text, self.usage = chunk.finish, chunk.stop_text, chunk.usage
        stopped, late = self.finish is FinishReason.STOP, "".join(self._late)
        # Ended by the model itself, or followed by more, a block is what it was to be.
        yield from self._close(whole=stopped or bool(late.strip()))
        if late.strip():
            yield from self._add("text", late)
            yield from self._close(whole=stopped)

    def _add(self, kind: Kind, text: str) -> Iterator[BlockEvent]:
        block = self._open_block
        if block is None or block.kind != kind:
            yield from self._close(whole=True)
            yield self._open(kind)
            block = self.blocks[-1]
        block.parts.append(text)
        yield BlockEvent("more", block, text)

    def _open(self, kind: Kind, call_id: str = "", name: str = "") -> BlockEvent:
        self._open_block = Block(len(self.blocks), kind, call_id, name)
        self.blocks.append(self._open_block)
        return BlockEvent("opened", self._open_block)

    def _close(self, *, whole: bool) -> Iterator[BlockEvent]:
        if (block := self._open_block) is not None:
            # Of arguments it can be seen.
            block.whole = is_object(block.text) if block.kind == "call" else whole
            self._open_block = None
            yield BlockEvent("closed", block)
