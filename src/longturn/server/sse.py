"""Server-sent events: a response that streams chunks as they come and stops computing when nobody listens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from starlette.types import Receive, Scope, Send

from longturn.errors import LongturnError
from longturn.frontend.records import TextChunk, TextRequest
from longturn.server.errors import body_of, error_body
from longturn.server.generation import Indexed, time_limit, unless_disconnected

log = logging.getLogger(__name__)

FIRST_CHUNK_GRACE_S = 2.0
"""The answer's head waits this long for a first chunk, so that a refused request gets its proper status."""
GRAMMAR_GRACE_S = 10.0
"""The same where a grammar must be compiled first, which may take seconds to fail."""
KEEP_ALIVE_S = 15.0
"""Pause between comments while nothing can be shown; proxies cut connections that stay silent."""
_WAITING = b": waiting\n\n"

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # nginx would otherwise collect the stream and deliver it in one piece.
    (b"x-accel-buffering", b"no"),
]


class EventEncoder(Protocol):
    """How one API dialect writes its events. Every method returns whole events, or nothing."""

    def opening(self) -> bytes: ...

    def chunk(self, index: int, chunk: TextChunk) -> bytes: ...

    def closing(self) -> bytes: ...


def error_event(status: int, body: bytes) -> bytes:
    """An error in mid-stream, as the chat API has it: its JSON, which a status would have come with."""
    return b"data: " + body + b"\n\n"


def grace_of(request: TextRequest) -> float:
    """How long the head of this request's stream waits for a first chunk."""
    return GRAMMAR_GRACE_S if request.grammar is not None or request.parse_tools else FIRST_CHUNK_GRACE_S


class EventStream:
    """An ASGI response over `events`. An error before the head is sent is raised, so that it gets its own status."""

    def __init__(
        self,
        events: AsyncGenerator[Indexed, None],
        encoder: EventEncoder,
        *,
        timeout_s: float,
        request_id: str,
        on_error: Callable[[int, bytes], bytes] = error_event,
        grace_s: float | None = None,
    ) -> None:
        """
        Args:
            events: chunks; closed at the end.
            encoder: the dialect.
            timeout_s: longest time that the whole may take; 0 is no limit.
            request_id: for the log.
            on_error: the last events of a stream that fails, from the status and the error as OpenAI's JSON.
            grace_s: how long the head waits for a first chunk (see `grace_of`); FIRST_CHUNK_GRACE_S if None.
        """
        self._grace_s = FIRST_CHUNK_GRACE_S if grace_s is None else grace_s
        self._events = events
        self._encoder = encoder
        self._timeout_s = timeout_s
        self._request_id = request_id
        self._on_error = on_error
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_disconnected(receive, self._write(send))

    async def _write(self, send: Send) -> None:
        try:
            async with contextlib.aclosing(self._events), time_limit(self._timeout_s):
                first = await self._first(send)
                if first is not None:
                    await _send(send, self._encoder.chunk(*first))
                    loop = asyncio.get_running_loop()
                    sent_s = loop.time()
                    async for index, chunk in self._events:
                        event = self._encoder.chunk(index, chunk)
                        # An argument of a call may be sent when it is whole, which may take a while.
                        if not event and loop.time() - sent_s >= KEEP_ALIVE_S:
                            event = _WAITING
                        if event:
                            sent_s = loop.time()
                        await _send(send, event)
            last = self._encoder.closing()
        except LongturnError as error:
            if not self._started:
                raise
            last = self._on_error(error.http_status, body_of(error))
        except Exception:
            if not self._started:
                raise
            log.exception("request %s failed while streaming", self._request_id)
            message = f"internal server error (request id {self._request_id})"
            last = self._on_error(500, error_body(500, message, code="internal_error"))
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _first(self, send: Send) -> Indexed | None:
        """The first chunk, or None when there is none; sends the head and keeps the connection alive meanwhile."""
        first = asyncio.ensure_future(_next(self._events))
        try:
            await asyncio.wait({first}, timeout=self._grace_s)
            if first.done():
                first.result()
            self._started = True
            await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await _send(send, self._encoder.opening())
            while not first.done():
                await asyncio.wait({first}, timeout=KEEP_ALIVE_S)
                if not first.done():
                    await _send(send, _WAITING)
            return first.result()
        finally:
            # The generator cannot be closed while this task is still inside it.
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)


async def _next(events: AsyncGenerator[Indexed, None]) -> Indexed | None:
    # StopAsyncIteration must not leave a task.
    return await anext(events, None)


async def _send(send: Send, body: bytes) -> None:
    if body:
        await send({"type": "http.response.body", "body": body, "more_body": True})
