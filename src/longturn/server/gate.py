"""What every HTTP request passes first: request id, API key, body limit, drain, and the net for unexpected errors.

Plain ASGI: a middleware that buffers or re-wraps responses costs time on every streamed chunk and hides the client's
going away.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longturn.errors import LongturnError
from longturn.server.drain import Drain
from longturn.server.errors import (
    AuthError,
    DrainingError,
    EncodingError,
    TooLargeError,
    body_of,
    error_response,
    internal_error,
)
from longturn.server.messages_errors import is_messages_path
from longturn.server.request_context import RequestContext, set_current_request

log = logging.getLogger(__name__)
access = logging.getLogger("longturn.access")

OPEN_PATHS = frozenset({"/health", "/ping", "/metrics"})
"""Paths that need no API key: what load balancers and scrapers ask."""

_REQUEST_ID = re.compile(r"[\w.:@/+=-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True)
class GateRules:
    """What the gate lets pass, and whom it tells."""

    api_keys: tuple[str, ...]
    """Accepted keys; empty admits everyone."""
    max_body_bytes: int
    drain: Drain
    on_response: Callable[[str, int], None]
    """Called with the route's path and the status of every response."""
    retry_after_s: Callable[[], int]
    """Seconds that a client refused with 429 should wait."""


class Gate:
    """ASGI wrapper around the whole application."""

    def __init__(self, app: ASGIApp, rules: GateRules) -> None:
        self._app = app
        self._rules = rules
        self._keys = tuple(key.encode() for key in rules.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id"))
        context = RequestContext(request_id, _text(headers.get(b"traceparent")), _text(headers.get(b"tracestate")))
        set_current_request(context)
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        started_s = time.perf_counter()
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *self._waiting_time(status, message.get("headers", [])),
                    (b"x-request-id", request_id.encode()),
                    *((name.lower().encode(), value.encode()) for name, value in context.response_headers.items()),
                    # Anthropic's clients show this one.
                    *([(b"request-id", request_id.encode())] if is_messages_path(scope["path"]) else ()),
                ]
                route = scope.get("route")
                self._rules.on_response(getattr(route, "path", "other"), status)
            await send(message)

        drain = self._rules.drain
        closed = scope["path"] not in OPEN_PATHS
        if closed:
            drain.enter()
        try:
            state["tenant"] = self._authenticate(headers) if closed else None
            if drain.draining and scope["path"] != "/metrics":
                raise DrainingError("the server is stopping and takes no new requests")
            if (coding := headers.get(b"content-encoding", b"identity")).lower() != b"identity":
                raise EncodingError(f"content-encoding {_text(coding)!a} is not supported; send the body as it is")
            await self._app(scope, _limited(headers, receive, self._rules.max_body_bytes), send_with_id)
        except LongturnError as error:
            if not status:
                await error_response(error.http_status, body_of(error), scope=scope)(scope, receive, send_with_id)
        except Exception:
            log.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"])
            if not status:
                await internal_error(request_id, scope)(scope, receive, send_with_id)
        finally:
            if closed:
                drain.leave()
                _log_access(scope, request_id, status, time.perf_counter() - started_s)

    def _authenticate(self, headers: dict[bytes, bytes]) -> str | None:
        """What keeps this client's conversations apart from others': a digest of its key, since ids get logged."""
        if not self._keys:
            return None
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        key = key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        # No early exit: the time must not tell which key came close.
        matches = [hmac.compare_digest(key, accepted) for accepted in self._keys]
        if not any(matches):
            fault = "incorrect API key" if key else "no API key"
            raise AuthError(f"{fault}: send an accepted one as 'Authorization: Bearer KEY'")
        return hashlib.sha256(key).hexdigest()[:32]

    def _waiting_time(self, status: int, headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
        """The response's headers; those of a 429 say when the queue is likely to have room."""
        if status != 429:
            return list(headers)
        kept = [(name, value) for name, value in headers if name.lower() != b"retry-after"]
        return [*kept, (b"retry-after", str(self._rules.retry_after_s()).encode())]


def _log_access(scope: Scope, request_id: str, status: int, duration_s: float) -> None:
    if not access.isEnabledFor(logging.INFO):
        return
    method, path, milliseconds = scope["method"], scope["path"], round(duration_s * 1e3, 3)
    access.info(
        "%s %s %s %.1f ms",
        method,
        # Decoded from the request line, so it may hold anything; a line of the log it must not break.
        ascii(path)[1:-1],
        status,
        milliseconds,
        extra={
            "request_id": request_id,
            "method": method,
            "path": path,
            "status": status,
            "duration_ms": milliseconds,
        },
    )


def _request_id(header: bytes | None) -> str:
    text = "" if header is None else header.decode("latin-1")
    return text if _REQUEST_ID.fullmatch(text) else uuid.uuid4().hex


def _text(header: bytes | None) -> str | None:
    return None if header is None else header.decode("latin-1")


def _limited(headers: dict[bytes, bytes], receive: Receive, max_bytes: int) -> Receive:
    """`receive` that refuses a body of more than `max_bytes`, announced or not."""
    announced = headers.get(b"content-length", b"0")
    # The length of the number too: int() of a number of 5,000 digits is an error of its own.
    if announced.isdigit() and (len(announced) > 19 or int(announced) > max_bytes):
        raise _too_large(max_bytes)
    received = 0

    async def receive_limited() -> Message:
        nonlocal received
        message = await receive()
        if message["type"] == "http.request":
            received += len(message.get("body", b""))
            if received > max_bytes:
                raise _too_large(max_bytes)
        return message

    return receive_limited


def _too_large(max_bytes: int) -> TooLargeError:
    return TooLargeError(f"the request body is larger than {max_bytes} bytes (server.max_body_bytes)")
