"""The generations that a server has in hand: each can be aborted by name, and has its span in the traces.

It stands before the text service, so that every API dialect passes through it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from longturn.engine.records import FinishReason
from longturn.frontend.records import Prompt, TextChunk, TextRequest, Usage
from longturn.server.ports import TextService
from longturn.server.request_context import RequestContext, current_request
from longturn.server.reuse_headers import note_reuse


class Span(Protocol):
    """The trace of one generation."""

    def chunk(self, chunk: TextChunk) -> None:
        """A piece of the answer has come."""
        ...

    def end(self, error: BaseException | None) -> None:
        """The generation is over; `error` is why, if it did not end by itself."""
        ...


class Tracer(Protocol):
    """Starts spans; `tracing` has the one for OpenTelemetry."""

    def start(self, request: TextRequest, model: str, context: RequestContext | None) -> Span: ...


@dataclass(slots=True)
class _Generation:
    tenant: str | None
    http_id: str | None
    """Id of the HTTP request that it belongs to."""
    aborted: bool = False


class Generations:
    """A `TextService` around another one."""

    def __init__(
        self, service: TextService, abort: Callable[[str], bool], model_name: str, tracer: Tracer | None = None
    ) -> None:
        """
        Args:
            service: what generates.
            abort: ends a request in the engine by its id.
            model_name: for traces.
            tracer: None traces nothing.
        """
        self._service = service
        self._abort = abort
        self._model_name = model_name
        self._tracer = tracer
        self._open: dict[str, _Generation] = {}

    def __len__(self) -> int:
        return len(self._open)

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextChunk, None]:
        """See `TextService.generate`. An aborted generation ends with a chunk whose `finish` is ABORT."""
        context = current_request()
        entry = _Generation(request.tenant, None if context is None else context.request_id)
        self._open[request.request_id] = entry
        span = None if self._tracer is None else self._tracer.start(request, self._model_name, context)
        failure: BaseException | None = None
        try:
            async with aclosing(self._service.generate(request)) as chunks:  # type: ignore[type-var]
                async for chunk in chunks:
                    if entry.aborted and chunk.finish is None:
                        # The abort came before the engine had the request, so nobody else ends it.
                        chunk = _aborted(chunk)
                    if chunk.reuse is not None and context is not None:
                        note_reuse(context, chunk.reuse)
                    if span is not None:
                        span.chunk(chunk)
                    yield chunk
                    if chunk.finish is not None:
                        return
        except BaseException as error:
            failure = error
            raise
        finally:
            if self._open.get(request.request_id) is entry:
                del self._open[request.request_id]
            if span is not None:
                span.end(failure)

    def abort(self, names: Iterable[str] | None, tenant: str | None) -> list[str]:
        """End generations; the ids of those that were ended.

        Args:
            names: ids of answers (all their choices), of single choices, or of HTTP requests; None is all.
            tenant: who asks. Generations of others are not found, whatever their name.
        """
        wanted = None if names is None else frozenset(names)
        found: list[str] = []
        for request_id, entry in self._open.items():
            if entry.tenant != tenant or entry.aborted:
                continue
            if wanted is None or not wanted.isdisjoint(
                (request_id, request_id.rpartition("-")[0], entry.http_id or request_id)
            ):
                entry.aborted = True
                found.append(request_id)
        for request_id in found:
            self._abort(request_id)
        return found

    def tokenize(
        self, prompt: Prompt, *, add_special_tokens: bool, tenant: str | None = None, cache_salt: str | None = None
    ) -> Awaitable[Sequence[int]]:
        """See `TextService.tokenize`."""
        return self._service.tokenize(
            prompt, add_special_tokens=add_special_tokens, tenant=tenant, cache_salt=cache_salt
        )

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """See `TextService.detokenize`."""
        return self._service.detokenize(token_ids)


def _aborted(chunk: TextChunk) -> TextChunk:
    """`chunk` as the last of its generation."""
    usage = Usage(len(chunk.prompt_token_ids or ()), len(chunk.token_ids), 0)
    return dataclasses.replace(chunk, finish=FinishReason.ABORT, usage=usage)
