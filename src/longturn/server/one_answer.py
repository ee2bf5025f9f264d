"""What the dialects with one answer a request share: the internal request, and the answer whole or streamed."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from longturn.errors import RequestError
from longturn.frontend.grammar import GrammarSpec
from longturn.frontend.records import ChatPrompt, TextChunk, TextRequest, ToolChoice
from longturn.server import openai_requests
from longturn.server.errors import CLIENT_GONE
from longturn.server.generation import collect, run_choices, time_limit, unless_disconnected
from longturn.server.metrics import ServerMetrics
from longturn.server.openai_routes import SEED_BITS, mix64
from longturn.server.openai_types import SamplingFields
from longturn.server.ports import ServedModel, TextService
from longturn.server.sessions import session_of
from longturn.server.sse import EventEncoder, EventStream, grace_of

SEED_STREAM = 1 << 62
"""Added to the server's seed: requests without one must not sample what those of the chat endpoint sample."""


class AnswerWriter(EventEncoder, Protocol):
    """Writes one answer: events while it comes, or the whole when it is there."""

    def whole(self) -> bytes:
        """The JSON of the answer, once its last chunk was written."""
        ...


@dataclass(frozen=True, slots=True)
class OneAnswer:
    """Generates single answers."""

    service: TextService
    model: ServedModel
    metrics: ServerMetrics
    seed: int
    timeout_s: float
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def request(
        self,
        http: Request,
        body: SamplingFields,
        prompt: ChatPrompt,
        *,
        request_id: str,
        max_tokens: int,
        choice: ToolChoice,
        stop: tuple[str, ...] = (),
        grammar: GrammarSpec | None = None,
        session_id: str | None = None,
    ) -> TextRequest:
        """The internal form of a request.

        Args:
            http: carries the client's key and session.
            body: sampling, and the extensions that every dialect takes.
            prompt: the conversation.
            request_id: the answer's id.
            max_tokens: 0 is up to the context's end.
            choice: what the answer may call.
            stop: stop strings.
            grammar: what the answer must be.
            session_id: what the dialect itself has for a session, where the client names none in the usual ways.
        """
        seed = mix64(self.seed + SEED_STREAM, next(self._numbers)) if body.seed is None else body.seed
        return TextRequest(
            request_id=request_id,
            prompt=prompt,
            sampling=openai_requests.sampling_params(
                body, max_tokens=max_tokens, logprobs=None, seed=seed & ((1 << SEED_BITS) - 1)
            ),
            stop=stop,
            ignore_eos=bool(body.ignore_eos),
            include_stop_text=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            split_reasoning=True,
            parse_tools=choice.mode != "none",
            tool_choice=choice,
            grammar=grammar,
            allowed_token_ids=openai_requests.allowed_ids(body),
            session_id=session_of(http.headers, body.session_id, body.prompt_cache_key, session_id),
            cache_salt=body.cache_salt,
            tenant=http.scope["state"]["tenant"],
            priority=body.priority or 0,
        )

    async def respond(
        self,
        http: Request,
        request: TextRequest,
        writer: AnswerWriter,
        *,
        stream: bool,
        on_error: Callable[[int, bytes], bytes],
        names: Mapping[str, str],
    ) -> Response | ASGIApp:
        """Generate the answer to a request.

        Args:
            http: the connection; the answer is given up when it closes.
            request: what to generate.
            writer: takes the chunks.
            stream: send events instead of one JSON object.
            on_error: the last events of a stream that fails, from the status and the error as OpenAI's JSON.
            names: the dialect's fields by the chat API's names, for errors that name one.
        """
        events = run_choices(partial(self._watched, names), [[request]])
        if stream:
            return EventStream(
                events,
                writer,
                timeout_s=self.timeout_s,
                request_id=http.scope["state"]["request_id"],
                on_error=on_error,
                grace_s=grace_of(request),
            )
        chunks = await unless_disconnected(http.receive, self._collect(events))
        if chunks is None:
            return Response(status_code=CLIENT_GONE)
        for chunk in chunks:
            writer.chunk(0, chunk)
        return Response(writer.whole(), media_type="application/json")

    async def write(self, request: TextRequest, writer: AnswerWriter, names: Mapping[str, str]) -> None:
        """Generate the answer to a request without anybody who waits for it; as `respond`."""
        async with (
            time_limit(self.timeout_s),
            aclosing(run_choices(partial(self._watched, names), [[request]])) as events,
        ):
            async for index, chunk in events:
                writer.chunk(index, chunk)
        writer.whole()

    async def _watched(self, names: Mapping[str, str], request: TextRequest) -> AsyncGenerator[TextChunk, None]:
        try:
            async with aclosing(self.metrics.watch(self.service.generate(request))) as chunks:
                async for chunk in chunks:
                    yield chunk
        except RequestError as error:
            if error.param is not None:
                error.param = names.get(error.param, error.param)
            raise

    async def _collect(self, events: AsyncGenerator[tuple[int, TextChunk], None]) -> list[TextChunk]:
        async with time_limit(self.timeout_s):
            (chunks,) = await collect(events, 1)
            return chunks
