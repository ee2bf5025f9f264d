"""From the frontend's chunks to the OpenAI API's JSON: whole answers, and the events of streamed ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from longturn.engine.records import FinishReason
from longturn.errors import LongturnError
from longturn.frontend.parsers.base import join_calls, join_pieces
from longturn.frontend.records import PromptLogprobs, TextChunk, ToolCall, ToolCallDelta, Usage
from longturn.server.openai_logprobs import chat_logprobs, completion_logprobs, prompt_logprobs
from longturn.server.usage import reuse_fields, written_tokens

_encode = msgspec.json.encode
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """What every object of one answer carries, and how much of it the client asked for."""

    id: str
    object: str
    """`chat.completion` or `text_completion`."""
    created_s: int
    model: str
    prompts: int = 1
    """Prompts in the request; each has the same number of choices."""
    choices: int = 1
    """Choices of all prompts."""
    logprobs: bool = False
    token_ids: bool = False
    """Return token ids beside the text (`return_token_ids`)."""
    stream_usage: bool = False
    running_usage: bool = False
    """Usage so far in every streamed event (`continuous_usage_stats`); needs `stream_usage`."""
    echo: tuple[str, ...] = ()
    """Texts of the prompts, which the texts of their choices begin with; empty if they do not."""
    page_tokens: int = 0
    """Tokens of a cached page; 0 if prompts are not kept."""
    prompt_logprobs: bool = False
    """Show the prompts' log-probabilities apart from the choices' texts (`prompt_logprobs`)."""

    @property
    def chat(self) -> bool:
        return self.object == "chat.completion"

    def prompt_of(self, index: int) -> int:
        """The prompt of a choice."""
        return index // (self.choices // self.prompts)

    def echoed(self, index: int) -> str:
        """What the text of a choice begins with."""
        return self.echo[self.prompt_of(index)] if self.echo else ""


def usage_object(usages: Sequence[Usage | None], prompts: int, page_tokens: int) -> dict[str, Any]:
    """Usage over all choices. A prompt counts once, however many choices it has. `page_tokens` as in `Answer`."""
    known = [usage for usage in usages if usage is not None]
    leaders = [usage for usage in usages[:: max(1, len(usages) // prompts)] if usage is not None]
    prompt_tokens = sum(usage.prompt_tokens for usage in leaders)
    completion_tokens = sum(usage.completion_tokens for usage in known)
    reasoning_tokens = sum(usage.reasoning_tokens for usage in known)
    # Always there, also when 0: a client cannot tell "no hit" from "not known" otherwise.
    details = {
        "cached_tokens": sum(usage.cached_tokens for usage in leaders),
        "cache_write_tokens": sum(written_tokens(usage, page_tokens) for usage in leaders),
    }
    reuse: dict[str, Any] = {}
    for usage in reversed(leaders):
        reuse |= reuse_fields(usage)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": details,
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
        **reuse,
    }


def finish_reason(finish: FinishReason | None, *, called: bool = False) -> str | None:
    """OpenAI's word for the end of a choice; `called` is whether it has tool calls, which end it unless it was cut off.

    Raises:
        LongturnError: the executor failed on the request, so there is no answer.
    """
    if finish is FinishReason.ERROR:
        raise LongturnError("the model could not be computed for this request")
    if called and finish is FinishReason.STOP:
        return "tool_calls"
    return None if finish is None else finish.value


def best_choices(chunks: Sequence[Sequence[TextChunk]], candidates: int, choices: int) -> list[Sequence[TextChunk]]:
    """Of each prompt's `candidates` the `choices` whose tokens are likeliest in the mean, the best first."""

    def mean(candidate: Sequence[TextChunk]) -> float:
        values = [token.logprob for chunk in candidate for token in chunk.logprobs]
        return sum(values) / len(values) if values else -math.inf

    best: list[Sequence[TextChunk]] = []
    for begin in range(0, len(chunks), candidates):
        best += sorted(chunks[begin : begin + candidates], key=mean, reverse=True)[:choices]
    return best


def without_answer(chunk: TextChunk) -> TextChunk:
    """A chunk of an answer of which the prompt alone is wanted (`max_tokens` 0)."""
    usage = None if chunk.usage is None else replace(chunk.usage, completion_tokens=0)
    finish = FinishReason.LENGTH if chunk.finish is FinishReason.STOP else chunk.finish
    return replace(chunk, text="", token_ids=(), logprobs=(), usage=usage, finish=finish, stop_text=None)


def whole_answer(
    answer: Answer,
    choices: Sequence[Sequence[TextChunk]],
    all_choices: Sequence[Sequence[TextChunk]] | None = None,
    scores: Sequence[PromptLogprobs | None] = (),
) -> bytes:
    """The JSON of an answer that was not streamed.

    Args:
        answer: what it is an answer to.
        choices: the chunks of each choice, at least one.
        all_choices: where more were made than are shown: all of them, for the usage.
        scores: log-probabilities of each prompt, where they were asked for.
    """
    scores = scores or [None] * answer.prompts
    body: dict[str, Any] = {
        "id": answer.id,
        "object": answer.object,
        "created": answer.created_s,
        "model": answer.model,
        "choices": [
            _whole_choice(answer, index, chunks, scores[answer.prompt_of(index)])
            for index, chunks in enumerate(choices)
        ],
        "usage": usage_object(
            [chunks[-1].usage for chunks in all_choices or choices], answer.prompts, answer.page_tokens
        ),
    }
    if answer.token_ids and answer.chat:
        body["prompt_token_ids"] = list(choices[0][0].prompt_token_ids or ())
    if answer.chat and answer.prompt_logprobs and scores[0] is not None:
        body["prompt_logprobs"] = prompt_logprobs(scores[0])
    return _encode(body)


def _whole_choice(
    answer: Answer, index: int, chunks: Sequence[TextChunk], scores: PromptLogprobs | None
) -> dict[str, Any]:
    text = "".join(chunk.text for chunk in chunks)
    tokens = [token for chunk in chunks for token in chunk.logprobs]
    calls = join_calls(delta for chunk in chunks for delta in chunk.tool_calls)
    choice: dict[str, Any] = {"index": index}
    if answer.chat:
        choice["message"] = _message(text, "".join(chunk.reasoning for chunk in chunks), calls)
        choice["logprobs"] = chat_logprobs(tokens) if answer.logprobs else None
    else:
        choice["text"] = answer.echoed(index) + text
        echoed = scores if answer.echo else None
        choice["logprobs"] = completion_logprobs(tokens, 0, echoed) if answer.logprobs else None
        if answer.prompt_logprobs and scores is not None:
            choice["prompt_logprobs"] = prompt_logprobs(scores)
    choice["finish_reason"] = finish_reason(chunks[-1].finish, called=bool(calls))
    choice["stop_reason"] = chunks[-1].stop_text
    if answer.token_ids:
        choice["token_ids"] = [token for chunk in chunks for token in chunk.token_ids]
        if not answer.chat:
            choice["prompt_token_ids"] = list(chunks[0].prompt_token_ids or ())
    return choice


def _message(text: str, reasoning: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    # A message that only calls tools has no content, which is not the same as an empty one.
    message: dict[str, Any] = {"role": "assistant", "content": None if calls and not text else text, "refusal": None}
    if reasoning:
        message |= _reasoning(reasoning)
    if calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
    return message


def _reasoning(text: str) -> dict[str, str]:
    """OpenAI's chat API has no field for reasoning; half of the clients read the one name and half the other."""
    return {"reasoning_content": text, "reasoning": text}


def _call_delta(delta: ToolCallDelta) -> dict[str, Any]:
    function: dict[str, str] = {"arguments": delta.arguments}
    if not delta.name:
        return {"index": delta.index, "function": function}
    return {"index": delta.index, "id": delta.id, "type": "function", "function": {"name": delta.name, **function}}


@dataclass(slots=True)
class EventWriter:
    """Writes the events of one streamed answer; an `EventEncoder`.

    What is the same in every event is encoded once: with many streams this is most of each event's bytes.
    """

    answer: Answer
    _head: bytes = field(init=False)
    _tail: bytes = field(init=False)
    _usages: list[Usage | None] = field(init=False)
    _called: list[bool] = field(init=False)
    """Whether each choice has tool calls."""
    _offsets: list[int] = field(init=False)
    """Characters of each choice's text so far."""
    _scores: dict[int, PromptLogprobs] = field(default_factory=dict)
    """By prompt, as far as they have come."""
    _unechoed: set[int] = field(default_factory=set)
    """Choices whose prompt is shown when its log-probabilities have come."""
    _prompt_tokens: int = 0
    _completion_tokens: int = 0
    """So far, over all choices."""

    def __post_init__(self) -> None:
        answer = self.answer
        kind = "chat.completion.chunk" if answer.chat else answer.object
        common = {"id": answer.id, "object": kind, "created": answer.created_s, "model": answer.model}
        self._head = b"data: " + _encode(common)[:-1]
        # OpenAI's server shows a null usage in every event when the last one has it.
        self._tail = b',"usage":null}\n\n' if answer.stream_usage else b"}\n\n"
        self._usages = [None] * answer.choices
        self._called = [False] * answer.choices
        self._offsets = [0] * answer.choices

    def opening(self) -> bytes:
        if not self.answer.chat:
            if not self.answer.echo:
                return b""
            if self.answer.logprobs:
                self._unechoed = set(range(self.answer.choices))
                return b""
            return b"".join(
                self._event(index, b'"text":' + _encode(self.answer.echoed(index)), b"null", b',"logprobs":null')
                for index in range(self.answer.choices)
            )
        delta = b'"delta":{"role":"assistant","content":""}'
        return b"".join(self._event(index, delta, b"null") for index in range(self.answer.choices))

    def chunk(self, index: int, chunk: TextChunk) -> bytes:
        if chunk.prompt_logprobs is not None:
            self._scores[self.answer.prompt_of(index)] = chunk.prompt_logprobs
        return self._echo(index) + self._chunk(index, chunk) if self._unechoed else self._chunk(index, chunk)

    def _echo(self, index: int) -> bytes:
        """The event with the prompt of a choice and its log-probabilities, as soon as there are some."""
        scores = self._scores.get(self.answer.prompt_of(index))
        if scores is None or index not in self._unechoed:
            return b""
        self._unechoed.remove(index)
        found = completion_logprobs((), 0, scores)
        self._offsets[index] = sum(map(len, found["tokens"]))
        text = b'"text":' + _encode(self.answer.echoed(index))
        return self._event(index, text, b"null", b',"logprobs":' + _encode(found))

    def _chunk(self, index: int, chunk: TextChunk) -> bytes:
        if chunk.usage is not None:
            self._usages[index] = chunk.usage
        if self.answer.running_usage and self.answer.stream_usage:
            self._count(index, chunk)
        if chunk.tool_calls:
            self._called[index] = True
        finish = finish_reason(chunk.finish, called=self._called[index])
        has_content = bool(chunk.text or chunk.logprobs or (self.answer.token_ids and chunk.token_ids))
        if not self.answer.chat:
            end = _encode(finish)
            if not has_content and finish is None:
                return b""
            return self._content(index, chunk, end, b'"text":' + _encode(chunk.text))
        events = b"".join(self._deltas(index, chunk)) if has_content or chunk.reasoning or chunk.tool_calls else b""
        if finish is not None:
            extra = b"" if chunk.stop_text is None else b',"stop_reason":' + _encode(chunk.stop_text)
            events += self._event(index, b'"delta":{}', _encode(finish), extra)
        return events

    def closing(self) -> bytes:
        if not self.answer.stream_usage:
            return DONE
        usage = _encode(usage_object(self._usages, self.answer.prompts, self.answer.page_tokens))
        return self._head + b',"choices":[],"usage":' + usage + b"}\n\n" + DONE

    def _count(self, index: int, chunk: TextChunk) -> None:
        """Keep the usage that the next events show."""
        self._completion_tokens += len(chunk.token_ids)
        if chunk.prompt_token_ids is not None and index % (self.answer.choices // self.answer.prompts) == 0:
            self._prompt_tokens += len(chunk.prompt_token_ids)
        prompt, completion = self._prompt_tokens, self._completion_tokens
        self._tail = b',"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}}\n\n' % (
            prompt, completion, prompt + completion,
        )  # fmt: skip

    def _deltas(self, index: int, chunk: TextChunk) -> Iterable[bytes]:
        """Events of a chat's chunk, each with one kind of content; what belongs to its tokens is in the first."""
        deltas: list[dict[str, Any]] = []
        if chunk.reasoning:
            deltas.append(_reasoning(chunk.reasoning))
        if chunk.text or not (chunk.reasoning or chunk.tool_calls):
            deltas.append({"content": chunk.text})
        # One call an event, once: clients made for OpenAI's server read no more than the first piece of each.
        deltas += [{"tool_calls": [_call_delta(piece)]} for piece in join_pieces(chunk.tool_calls).values()]
        for number, delta in enumerate(deltas):
            body = b'"delta":' + _encode(delta)
            if number == 0:
                yield self._content(index, chunk, b"null", body)
            else:
                yield self._event(index, body, b"null", b',"logprobs":null')

    def _content(self, index: int, chunk: TextChunk, finish: bytes, body: bytes) -> bytes:
        extra = b""
        if self.answer.logprobs and chunk.logprobs:
            if self.answer.chat:
                extra = b',"logprobs":' + _encode(chat_logprobs(chunk.logprobs))
            else:
                extra = b',"logprobs":' + _encode(completion_logprobs(chunk.logprobs, self._offsets[index]))
                self._offsets[index] += sum(len(token.text) for token in chunk.logprobs)
        else:
            extra = b',"logprobs":null'
        if self.answer.token_ids:
            extra += b',"token_ids":' + _encode(chunk.token_ids)
            if chunk.prompt_token_ids is not None and not self.answer.chat:
                extra += b',"prompt_token_ids":' + _encode(list(chunk.prompt_token_ids))
        if not self.answer.chat and chunk.stop_text is not None:
            extra += b',"stop_reason":' + _encode(chunk.stop_text)
        beside = b""
        if self.answer.token_ids and self.answer.chat and index == 0 and chunk.prompt_token_ids is not None:
            # A chat has one prompt, so its ids stand beside the choices, as in an answer that is not streamed.
            beside = b',"prompt_token_ids":' + _encode(list(chunk.prompt_token_ids))
        return self._event(index, body, finish, extra, beside)

    def _event(self, index: int, body: bytes, finish: bytes, extra: bytes = b"", beside: bytes = b"") -> bytes:
        return b'%b,"choices":[{"index":%d,%b%b,"finish_reason":%b}]%b%b' % (
            self._head, index, body, extra, finish, beside, self._tail,
        )  # fmt: skip
