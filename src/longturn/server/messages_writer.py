"""From the frontend's chunks to Anthropic's Messages API: the events of a streamed message, and whole messages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from longturn.engine.records import FinishReason
from longturn.frontend.records import TextChunk, Usage
from longturn.server.blocks import AnswerBlocks, Block, BlockEvent
from longturn.server.messages_errors import messages_error
from longturn.server.messages_types import INVALID_INPUT
from longturn.server.usage import reuse_fields, written_tokens

_encode = msgspec.json.encode
_TYPES = {"reasoning": "thinking", "text": "text", "call": "tool_use"}
_DELTAS = {
    "reasoning": (b"thinking_delta", b"thinking"),
    "text": (b"text_delta", b"text"),
    "call": (b"input_json_delta", b"partial_json"),
}
"""Type of a block's deltas, and the field with the piece."""
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


@dataclass(frozen=True, slots=True)
class MessageShape:
    """What is known of a message before the model has written anything."""

    id: str
    model: str
    max_tokens: int
    thinking: bool
    """Show thinking; it is left out otherwise."""
    page_tokens: int = 0
    """Tokens of a cached page; 0 if prompts are not kept."""
    request_id: str | None = None


class MessagesWriter:
    """Writes one message; an `EventEncoder`."""

    def __init__(self, shape: MessageShape) -> None:
        self._shape = shape
        self._answer = AnswerBlocks(reasoning=shape.thinking)
        self._started = False

    # --- EventEncoder ------------------------------------------------------------------------------------------------

    def opening(self) -> bytes:
        # The first event has the prompt's length, which comes with the first chunk.
        return b""

    def chunk(self, index: int, chunk: TextChunk) -> bytes:
        events = [event for change in self._answer.push(chunk) for event in self._events(change)]
        if not self._started:
            self._started = True
            events.insert(0, self._start() + _PING)
        return b"".join(events)

    def closing(self) -> bytes:
        usage = self._usage()
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._answer.stop_text}
        return _event("message_delta", delta=delta, usage=usage) + _event("message_stop")

    def failure(self, status: int, body: bytes) -> bytes:
        """The event that ends a stream in mid-way; `body` is the error in OpenAI's form."""
        return b"event: error\ndata: %b\n\n" % messages_error(status, body, self._shape.request_id)

    def whole(self) -> bytes:
        """The JSON of the finished message."""
        content = [_block(block, whole=True) for block in self._answer.blocks]
        return _encode(self._message(content, self._stop_reason(), self._answer.stop_text, self._usage()))

    # --- the message -------------------------------------------------------------------------------------------------

    def _start(self) -> bytes:
        prompt_tokens, reuse = self._answer.prompt_tokens, self._answer.reuse
        if reuse is None:  # not known yet; the last event's usage replaces this one
            usage = usage_object(Usage(prompt_tokens, 0, 0), 0)
        else:
            known = Usage(prompt_tokens, 0, reuse.cached_tokens, reuse.diverged_at, 0, reuse.reason)
            usage = usage_object(known, self._shape.page_tokens)
        return _event("message_start", message=self._message([], None, None, usage))

    def _message(
        self, content: list[dict[str, Any]], reason: str | None, stop: str | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "id": self._shape.id,
            "type": "message",
            "role": "assistant",
            "model": self._shape.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }

    def _usage(self) -> dict[str, Any]:
        assert self._answer.usage is not None
        return usage_object(self._answer.usage, self._shape.page_tokens)

    def _stop_reason(self) -> str:
        answer = self._answer
        if answer.finish is FinishReason.LENGTH:
            short = answer.usage is not None and answer.usage.completion_tokens < self._shape.max_tokens
            return "model_context_window_exceeded" if short else "max_tokens"
        if answer.called:
            return "tool_use"
        return "end_turn" if answer.stop_text is None else "stop_sequence"

    # --- events ------------------------------------------------------------------------------------------------------

    def _events(self, change: BlockEvent) -> Iterator[bytes]:
        block = change.block
        if change.kind == "opened":
            yield _event("content_block_start", index=block.index, content_block=_block(block, whole=False))
        elif change.kind == "more":
            yield _delta(block, _DELTAS[block.kind], change.text)
        else:
            if block.kind == "reasoning":
                yield _delta(block, (b"signature_delta", b"signature"), _signature(block))
            yield _event("content_block_stop", index=block.index)


def _delta(block: Block, names: tuple[bytes, bytes], text: str) -> bytes:
    # Not through `_event`: most events of a stream are these.
    return b"event: content_block_delta\ndata: " + (
        b'{"type":"content_block_delta","index":%d,"delta":{"type":"%b","%b":%b}}\n\n'
        % (block.index, *names, _encode(text))
    )


def usage_object(usage: Usage, page_tokens: int) -> dict[str, Any]:
    """Usage as Anthropic has it: the prompt's tokens are the sum of those read from the cache, those written to it, and
    the rest; `page_tokens` as in `MessageShape`."""
    written = written_tokens(usage, page_tokens)
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - written,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": written,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        **reuse_fields(usage),
    }


def _block(block: Block, *, whole: bool) -> dict[str, Any]:
    """A content block; as it begins, unless it is whole."""
    content: dict[str, Any] = {"type": _TYPES[block.kind]}
    if block.kind == "call":
        return content | {
            "id": block.call_id,
            "name": block.name,
            # As the model has spelled it: no other order of keys, no other numbers.
            "input": _input(block) if whole else {},
        }
    if block.kind == "text":
        # No `citations`: Anthropic has the field only where there are some, and Vercel's AI SDK refuses null.
        return content | {"text": block.text if whole else ""}
    return content | {
        "thinking": block.text if whole else "",
        "signature": _signature(block) if whole else "",
    }


def _input(block: Block) -> Any:
    """A call's arguments. Where they are no JSON object (cut off, or written wrongly) they stand in one, under the name
    that Anthropic's documentation has for this; it comes back as what it is (see `messages_requests`)."""
    if block.whole:
        return msgspec.Raw(block.text.encode())
    return {INVALID_INPUT: block.text} if block.text else {}


def _signature(block: Block) -> str:
    """Clients drop thinking without one. Nothing is checked when it comes back."""
    return hashlib.blake2b(block.text.encode(), digest_size=24).hexdigest()


def _event(name: str, /, **fields: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode({"type": name, **fields}))
