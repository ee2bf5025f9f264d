"""`longturn.LLM`: the same engine, frontend and configuration as the server, inside a Python program.

    from longturn import LLM

    with LLM() as llm:
        print(llm.chat([{"role": "user", "content": "Name a colour."}], max_tokens=8).text)

One thread runs the engine and another the event loop of the frontend; callers block in threads of their own.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from longturn.assemble import build_engine, build_frontend
from longturn.config import EngineConfig, check_config
from longturn.engine.records import EngineStats, FinishReason, SamplingParams
from longturn.errors import ConfigError, EngineDeadError, LongturnError, RequestError
from longturn.frontend.grammar import GrammarSpec
from longturn.frontend.inprocess_engine import InProcessEngine
from longturn.frontend.parsers.base import join_calls
from longturn.frontend.records import (
    ChatPrompt,
    Prompt,
    PromptLogprobs,
    TextChunk,
    TextPrompt,
    TextRequest,
    TokenLogprob,
    TokenPrompt,
    ToolCall,
    ToolCallDelta,
    Usage,
)

Message = Mapping[str, Any]
T = TypeVar("T")

_SAMPLING = frozenset(field.name for field in fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer."""

    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()
    reasoning: str = ""
    """What a reasoning model thought before a chat's answer."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls that a chat's answer makes, if it was given tools and the model has a parser for them."""
    prompt_logprobs: PromptLogprobs | None = None
    """With `prompt_logprobs` in the sampling: the prompt's tokens."""


class LLM:
    """A model in this process. Its methods block; several threads may call them, and their requests are batched."""

    def __init__(self, model: str | None = None, *, config: EngineConfig | None = None) -> None:
        """
        Args:
            model: Hugging Face directory or GGUF file; what `config` names if None, the embedded model by default.
            config: everything else; see `longturn.config`.

        Raises:
            ModelError: the model is missing, damaged or not supported.
            ConfigError: a setting has the wrong type, is out of range, or does not fit the model.
        """
        given = config if config is not None else EngineConfig()
        if not isinstance(given, EngineConfig):
            raise ConfigError(f"config must be a longturn.config.EngineConfig, not {type(given).__name__}")
        if model is not None:
            given = replace(given, model=replace(given.model, path=model))
        self.config = check_config(given)
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._closed = False
        self._engine = InProcessEngine(build_engine(self.config), silence_s=self.config.server.engine_silence_s)
        try:
            self._frontend = build_frontend(self.config, self._engine)
        except LongturnError:
            self._engine.close()
            raise
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="longturn-llm", daemon=True)
        self._thread.start()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        sampling: SamplingParams | None = None,
        *,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        grammar: GrammarSpec | None = None,
        **sampling_options: Any,
    ) -> list[Completion]:
        """Continue texts, or sequences of token ids; all of them are computed together.

        Args:
            prompts: one text, several, or several sequences of token ids.
            sampling: how to sample; by default temperature 1 up to the context's end.
            stop: a text that ends an answer, or several.
            ignore_eos: go on past the model's own end of text.
            grammar: what each answer must be (`longturn.frontend.grammar`).
            **sampling_options: fields of `SamplingParams` that replace those of `sampling`.

        Raises:
            RequestError: a value has the wrong type or is out of range, or a prompt is too long.
            EngineDeadError: the LLM has been closed.
        """
        items: Sequence[str] | Sequence[Sequence[int]] = [prompts] if isinstance(prompts, str) else prompts
        if not _is_list(items) or not all(isinstance(item, str) or _is_list(item) for item in items):
            raise RequestError("prompts must be a text, texts, or lists of token ids", param="prompts")
        forms = [TextPrompt(p) if isinstance(p, str) else TokenPrompt(tuple(p)) for p in items]
        requests = [
            self._request(form, sampling, sampling_options, stop, ignore_eos, grammar=grammar) for form in forms
        ]
        return self._run(requests)

    def chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        session_id: str | None = None,
        grammar: GrammarSpec | None = None,
        **sampling_options: Any,
    ) -> Completion:
        """Answer a conversation. A later call that adds messages to it reuses what has been computed."""
        prompt = _conversation(messages, tools)
        return self._run([self._request(prompt, sampling, sampling_options, stop, ignore_eos, session_id, grammar)])[0]

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        session_id: str | None = None,
        grammar: GrammarSpec | None = None,
        **sampling_options: Any,
    ) -> Iterator[TextChunk]:
        """Like `chat`, piece by piece. Closing the iterator ends the request."""
        prompt = _conversation(messages, tools)
        request = self._request(prompt, sampling, sampling_options, stop, ignore_eos, session_id, grammar)
        pieces: queue.SimpleQueue[TextChunk | BaseException | None] = queue.SimpleQueue()

        async def pump() -> None:
            try:
                async for chunk in self._frontend.generate(request):
                    pieces.put(chunk)
            except BaseException as error:
                pieces.put(error)
                raise
            finally:
                pieces.put(None)

        future = self._submit(pump())
        try:
            while (piece := pieces.get()) is not None:
                if isinstance(piece, BaseException):
                    raise piece
                yield piece
        finally:
            future.cancel()

    def stats(self) -> EngineStats:
        """Counters and gauges of the engine."""
        return self._engine.stats()

    def close(self) -> None:
        """End the engine and its threads. Requests in flight fail with `EngineDeadError`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._engine.close()
        # Callers wait for the results of their tasks: a loop that stopped before those ended would never wake them.
        asyncio.run_coroutine_threadsafe(_others_ended(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        options: Mapping[str, Any],
        stop: str | Sequence[str],
        ignore_eos: bool,
        session_id: str | None = None,
        grammar: GrammarSpec | None = None,
    ) -> TextRequest:
        unknown = options.keys() - _SAMPLING
        if unknown:
            name = min(unknown)
            raise RequestError(
                f"there is no sampling option '{name}' (known: {', '.join(sorted(_SAMPLING))})", param=name
            )
        number = next(self._numbers)
        base = sampling or SamplingParams(max_tokens=0, seed=self.config.seed + number)
        return TextRequest(
            request_id=f"llm-{number}",
            prompt=prompt,
            sampling=_checked(replace(base, **options)),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            ignore_eos=ignore_eos,
            session_id=session_id,
            grammar=grammar,
            split_reasoning=isinstance(prompt, ChatPrompt),
            parse_tools=isinstance(prompt, ChatPrompt) and bool(prompt.tools),
        )

    def _run(self, requests: Sequence[TextRequest]) -> list[Completion]:
        async def together() -> list[Completion]:
            return await asyncio.gather(*(_collect(self._frontend.generate(request)) for request in requests))

        return self._submit(together()).result()

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        with self._lock:
            if self._closed:
                work.close()
                raise EngineDeadError("this LLM is closed")
            return asyncio.run_coroutine_threadsafe(work, self._loop)


def _checked(sampling: SamplingParams) -> SamplingParams:
    """`sampling` with its types checked, as the server checks them when it reads JSON; ranges are the frontend's."""
    try:
        return msgspec.convert({f.name: getattr(sampling, f.name) for f in fields(sampling)}, SamplingParams)
    except msgspec.ValidationError as error:
        what, _, at = str(error).partition(" - at `$.")
        name = at.rstrip("`")
        raise RequestError(f"{name}: {what[0].lower()}{what[1:]}", param=name) from None


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _conversation(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> ChatPrompt:
    for name, items in (("messages", messages), ("tools", tools)):
        if not _is_list(items) or not all(isinstance(item, Mapping) for item in items):
            raise RequestError(f"{name} must be a list of dictionaries", param=name)
    return ChatPrompt(tuple(messages), tuple(tools))


async def _others_ended() -> None:
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)


async def _collect(chunks: AsyncIterator[TextChunk]) -> Completion:
    text: list[str] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    reasoning: list[str] = []
    calls: list[ToolCallDelta] = []
    scores: PromptLogprobs | None = None
    async for chunk in chunks:
        text.append(chunk.text)
        reasoning.append(chunk.reasoning)
        calls += chunk.tool_calls
        token_ids += chunk.token_ids
        logprobs += chunk.logprobs
        scores = scores or chunk.prompt_logprobs
        if chunk.finish is not None:
            assert chunk.usage is not None
            return Completion(
                text="".join(text),
                token_ids=tuple(token_ids),
                finish=chunk.finish,
                usage=chunk.usage,
                logprobs=tuple(logprobs),
                reasoning="".join(reasoning),
                tool_calls=join_calls(calls),
                prompt_logprobs=scores,
            )
    raise LongturnError("the engine ended a request without a result")
