"""From the frontend's chunks to the Responses API: the events of a streamed response, and the response object.

The object that a stream ends with, the one that a plain request gets, and the one that is stored are the same: built
from the same blocks, with ids that depend on the response's id and a block's position alone.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from longturn.engine.records import FinishReason
from longturn.frontend.records import TextChunk, Usage
from longturn.server.blocks import AnswerBlocks, Block, BlockEvent
from longturn.server.responses_tools import ClientTool, custom_input
from longturn.server.usage import reuse_fields, written_tokens

_encode = msgspec.json.encode
_PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}


@dataclass(frozen=True, slots=True)
class ResponseShape:
    """What is known of a response before the model has written anything."""

    id: str
    model: str
    created_s: int
    echo: Mapping[str, Any]
    """What the request asked for, as the response repeats it."""
    tools: Mapping[str, ClientTool] = field(default_factory=dict)
    """How the client calls the functions that the model knows."""
    page_tokens: int = 0
    """Tokens of a cached page; 0 if prompts are not kept."""


class ResponsesWriter:
    """Writes one response; an `EventEncoder`."""

    def __init__(self, shape: ResponseShape, on_done: Callable[[bytes, AnswerBlocks], None]) -> None:
        """
        Args:
            shape: the response.
            on_done: called with the JSON of the finished response before it is given out.
        """
        self._shape = shape
        self._on_done = on_done
        self._answer = AnswerBlocks()
        self._sequence = 0
        self._delta_head = b""
        """What is the same in every delta of the open block: most of their bytes."""

    # --- EventEncoder ------------------------------------------------------------------------------------------------

    def opening(self) -> bytes:
        response = self._object("in_progress")
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def chunk(self, index: int, chunk: TextChunk) -> bytes:
        return b"".join(event for change in self._answer.push(chunk) for event in self._events(change))

    def closing(self) -> bytes:
        response = self._finished()
        return self._event(f"response.{response['status']}", response=response)

    def failure(self, status: int, body: bytes) -> bytes:
        """The event that ends a stream in mid-way; `body` is the error in the form of the chat API."""
        return self._event("response.failed", response=self._failed(body, limited=status == 429))

    def _failed(self, body: bytes, *, limited: bool = False) -> dict[str, Any]:
        error = msgspec.json.decode(body)["error"]
        code = "rate_limit_exceeded" if limited else error["code"] or "server_error"
        return {**self._object("failed"), "error": {"code": code, "message": error["message"]}}

    def snapshot(self) -> bytes:
        """The JSON of a response that is being generated in the background."""
        return _encode(self._object("in_progress" if self._answer.prompt_tokens else "queued"))

    def end(self, status: str, error: bytes | None) -> None:
        """A response in the background has ended without being finished; `error` as in `failure`."""
        response = self._object(status) if error is None else self._failed(error)
        self._on_done(_encode(response), self._answer)

    def whole(self) -> bytes:
        """The JSON of the finished response."""
        return _encode(self._finished())

    # --- the object --------------------------------------------------------------------------------------------------

    def _finished(self) -> dict[str, Any]:
        cut = self._answer.finish is FinishReason.LENGTH
        response = self._object("incomplete" if cut else "completed")
        self._on_done(_encode(response), self._answer)
        return response

    def _object(self, status: str) -> dict[str, Any]:
        shape, answer = self._shape, self._answer
        return {
            "id": shape.id,
            "object": "response",
            "created_at": shape.created_s,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": shape.model,
            "output": [self._item(block) for block in answer.blocks],
            "usage": None if answer.usage is None else usage_object(answer.usage, shape.page_tokens),
            **shape.echo,
        }

    def _item(self, block: Block, status: str | None = None) -> dict[str, Any]:
        """An output item; `status` is given where it is not in the answer yet."""
        item: dict[str, Any] = {
            "id": self._id(block),
            "type": {"reasoning": "reasoning", "text": "message", "call": "function_call"}[block.kind],
            "status": status or ("completed" if block.whole else "incomplete"),
        }
        begins = status == "in_progress"
        if block.kind == "call":
            tool = self._tool(block)
            item |= {"call_id": block.call_id, "name": tool.name}
            if tool.namespace is not None:
                item["namespace"] = tool.namespace
            if tool.custom:
                return item | {"type": "custom_tool_call", "input": "" if begins else custom_input(block.text)}
            return item | {"arguments": "" if begins else block.text}
        content = [] if begins else [_part(block, block.text)]
        if block.kind == "reasoning":
            return item | {"summary": [], "content": content}
        return item | {"role": "assistant", "content": content}

    def _tool(self, block: Block) -> ClientTool:
        return self._shape.tools.get(block.name) or ClientTool(block.name)

    def _id(self, block: Block) -> str:
        name = f"{self._shape.id}/{block.index}".encode()
        return f"{_PREFIXES[block.kind]}_{hashlib.blake2b(name, digest_size=16).hexdigest()}"

    # --- events ------------------------------------------------------------------------------------------------------

    def _events(self, change: BlockEvent) -> Iterator[bytes]:
        block = change.block
        if change.kind == "more":
            # The input of a custom tool is an argument of what the model writes: it is known at the end.
            if block.kind != "call" or not self._tool(block).custom:
                yield self._delta(change.text)
            return
        item: dict[str, Any] = {"item_id": self._id(block), "output_index": block.index}
        if block.kind == "call":
            yield from self._call_events(change, item)
            return
        part = {**item, "content_index": 0}
        name = "response.output_text" if block.kind == "text" else "response.reasoning_text"
        logprobs: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        if change.kind == "opened":
            yield self._item_event("added", block, "in_progress")
            yield self._event("response.content_part.added", **part, part=_part(block, ""))
            self._delta_head = _event_head(f"{name}.delta", **part, **logprobs)
        else:
            yield self._event(f"{name}.done", **part, text=block.text, **logprobs)
            yield self._event("response.content_part.done", **part, part=_part(block, block.text))
            yield self._item_event("done", block)

    def _call_events(self, change: BlockEvent, item: Mapping[str, Any]) -> Iterator[bytes]:
        block, name = change.block, "response.function_call_arguments"
        if change.kind == "opened":
            yield self._item_event("added", block, "in_progress")
            self._delta_head = _event_head(f"{name}.delta", **item)
        elif (tool := self._tool(block)).custom:
            text, name = custom_input(block.text), "response.custom_tool_call_input"
            yield self._event(f"{name}.delta", **item, delta=text)
            yield self._event(f"{name}.done", **item, input=text)
            yield self._item_event("done", block)
        else:
            yield self._event(f"{name}.done", **item, name=tool.name, arguments=block.text)
            yield self._item_event("done", block)

    def _item_event(self, what: str, block: Block, status: str | None = None) -> bytes:
        return self._event(f"response.output_item.{what}", output_index=block.index, item=self._item(block, status))

    def _delta(self, text: str) -> bytes:
        event = b'%b,"sequence_number":%d,"delta":%b}\n\n' % (self._delta_head, self._sequence, _encode(text))
        self._sequence += 1
        return event

    def _event(self, name: str, /, **fields: Any) -> bytes:
        event = _event_head(name, sequence_number=self._sequence, **fields) + b"}\n\n"
        self._sequence += 1
        return event


def _event_head(name: str, /, **fields: Any) -> bytes:
    """An event up to its last bracket."""
    return b"event: %b\ndata: %b" % (name.encode(), _encode({"type": name, **fields})[:-1])


def usage_object(usage: Usage, page_tokens: int) -> dict[str, Any]:
    """Usage as the Responses API has it; `page_tokens` as in `ResponseShape`."""
    return {
        "input_tokens": usage.prompt_tokens,
        # Always there, also when 0: a client cannot tell "no hit" from "not known" otherwise.
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": written_tokens(usage, page_tokens),
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        **reuse_fields(usage),
    }


def _part(block: Block, text: str) -> dict[str, Any]:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
