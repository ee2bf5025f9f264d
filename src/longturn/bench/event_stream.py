"""One streamed answer of OpenAI's APIs, collected event by event as its bytes come."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from longturn.bench.records import Answer, Chunks


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    """Of a completion, which has no delta."""
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: Any = None


# Only these fields become objects: about a microsecond an event, whatever else is in it.
_decode_event = msgspec.json.Decoder(_Event).decode


class EventStream:
    """Collects one event stream; a `http_connection.Sink`."""

    def __init__(
        self, on_text: Callable[[str], None] | None, on_reasoning: Callable[[str], None] | None = None
    ) -> None:
        self.first_byte_ns: int | None = None
        """The answer's head arrived."""
        self.error: str | None = None
        self.status = 0
        self._on_text = on_text
        self._on_reasoning = on_reasoning
        self._rest = b""
        self._times = array("q")
        self._counts = array("i")
        self._text: list[str] = []
        self._ids: list[int] | None = None
        self._usage: _Usage | None = None
        self._counted = 0
        """Output tokens before the next event, where each event tells how many there were so far."""
        self._finish: str | None = None
        self._end_ns: int | None = None
        self._location = ""

    def head(self, status: int, headers: Mapping[str, str], at_ns: int) -> None:
        self.status = status
        self.first_byte_ns = at_ns
        self._location = headers.get("location", "")

    def data(self, data: bytes, at_ns: int) -> None:
        """Take bytes as they came from the socket; an event may be cut anywhere."""
        if self._rest:
            data = self._rest + data
        if self.status != 200:  # an error's body, kept for its message
            self._rest = data[:65536]
            return
        if data.endswith(b"\n"):
            self._rest = b""
        else:
            end = data.rfind(b"\n") + 1
            data, self._rest = data[:end], data[end:]
        for line in data.split(b"\n"):
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), at_ns)

    def _event(self, data: bytes, now: int) -> None:
        if data == b"[DONE]":
            self._end_ns = now
            return
        try:
            event = _decode_event(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self.error = self.error or f"unreadable event: {error}"
            return
        if event.error is not None:
            self.error = self.error or error_text(data)
        usage = event.usage
        if usage is not None:
            self._usage = usage
        for choice in event.choices:
            delta = choice.delta
            text = choice.text
            seen = bool(text)
            if delta is not None:
                text = delta.content or text
                reasoning = delta.reasoning_content or delta.reasoning  # two names for one text
                seen = bool(text or reasoning or delta.tool_calls)
                if reasoning and self._on_reasoning is not None:
                    self._on_reasoning(reasoning)
            ids = choice.token_ids
            if ids:
                self._ids = self._ids if self._ids is not None else []
                self._ids += ids
            if seen or ids:
                self._times.append(now)
                self._counts.append(self._count(ids, usage))
            if text:
                self._text.append(text)
                if self._on_text is not None:
                    self._on_text(text)
            self._finish = choice.finish_reason or self._finish

    def _count(self, ids: list[int] | None, usage: _Usage | None) -> int:
        """Tokens of an event that carries output; -1 if it does not tell. Tokens whose text a parser held back, or
        dropped, count for the next event that shows some."""
        if ids is not None:
            return len(ids)
        if usage is None or usage.completion_tokens is None:
            return -1
        count, self._counted = usage.completion_tokens - self._counted, usage.completion_tokens
        return max(0, count)

    def answer(self, intended_ns: int, sent_ns: int, now_ns: int) -> Answer:
        """What was collected, when the stream has ended.

        Args:
            intended_ns: when it should have been sent.
            sent_ns: when it was.
            now_ns: the end, if the stream told none.
        """
        usage = self._usage or _Usage()
        details = usage.prompt_tokens_details or _PromptDetails()
        error = self.error
        if error is None and self.status not in (0, 200):
            error = f"HTTP {self.status}: {self._refusal()}"
        if error is None and self._end_ns is None and self._finish is None:
            error = "the stream ended before the answer was complete"
        return Answer(
            intended_ns=intended_ns,
            sent_ns=sent_ns,
            end_ns=now_ns if self._end_ns is None else self._end_ns,
            chunks=Chunks(self._times, self._counts),
            text="".join(self._text),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=details.cached_tokens,
            output_tokens=usage.completion_tokens,
            token_ids=None if self._ids is None else tuple(self._ids),
            finish=self._finish,
            error=error,
        )

    def _refusal(self) -> str:
        if 300 <= self.status < 400 and self._location:
            return f"the server redirects to {self._location}: give that address"
        return error_text(self._rest)


def error_text(body: bytes) -> str:
    """The message of an OpenAI error body, or the start of whatever came instead."""
    try:
        error = msgspec.json.decode(body)["error"]
        return " ".join(str(error["message"] if isinstance(error, dict) else error).split())
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return " ".join(body[:200].decode(errors="replace").split()) or "no text"
