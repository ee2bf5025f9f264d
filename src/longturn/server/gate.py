"""What every HTTP request passes first: request id, API key, body limit, and the net for unexpected errors.

Plain ASGI: a middleware that buffers or re-wraps responses costs time on every streamed chunk and hides the client's
going away.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import uuid
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longturn.errors import LongturnError
from longturn.server.errors import AuthError, TooLargeError, body_of, error_response, internal_error

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 << 20
OPEN_PATHS = frozenset({"/health", "/ping", "/metrics"})
"""Paths that need no API key: what load balancers and scrapers ask."""

_REQUEST_ID = re.compile(r"[\w.:@/+=-]{1,128}", re.ASCII)


class Gate:
    """ASGI wrapper around the whole application."""

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...], on_response: Callable[[str, int], None]) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in api_keys)
        self._on_response = on_response
        """Called with the route's path and the status of every response."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id"))
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [*message.get("headers", []), (b"x-request-id", request_id.encode())]
                route = scope.get("route")
                self._on_response(getattr(route, "path", "other"), message["status"])
            await send(message)

        try:
            state["tenant"] = None if scope["path"] in OPEN_PATHS else self._authenticate(headers)
            await self._app(scope, _limited(headers, receive), send_with_id)
        except LongturnError as error:
            if not started:
                await error_response(error.http_status, body_of(error))(scope, receive, send_with_id)
        except Exception:
            log.exception("request %s: %s %s failed", request_id, scope["method"], scope["path"])
            if not started:
                await internal_error(request_id)(scope, receive, send_with_id)

    def _authenticate(self, headers: dict[bytes, bytes]) -> str | None:
        """What keeps this client's conversations apart from others': a digest of its key, since ids get logged."""
        if not self._keys:
            return None
        scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
        key = key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        # No early exit: the time must not tell which key came close.
        matches = [hmac.compare_digest(key, accepted) for accepted in self._keys]
        if not any(matches):
            raise AuthError("incorrect API key: send an accepted one as 'Authorization: Bearer KEY'")
        return hashlib.sha256(key).hexdigest()[:32]


def _request_id(header: bytes | None) -> str:
    text = "" if header is None else header.decode("latin-1")
    return text if _REQUEST_ID.fullmatch(text) else uuid.uuid4().hex


def _limited(headers: dict[bytes, bytes], receive: Receive) -> Receive:
    """`receive` that refuses a body of more than `MAX_BODY_BYTES`, announced or not."""
    announced = headers.get(b"content-length", b"0")
    if announced.isdigit() and int(announced) > MAX_BODY_BYTES:
        raise _too_large()
    received = 0

    async def receive_limited() -> Message:
        nonlocal received
        message = await receive()
        if message["type"] == "http.request":
            received += len(message.get("body", b""))
            if received > MAX_BODY_BYTES:
                raise _too_large()
        return message

    return receive_limited


def _too_large() -> TooLargeError:
    return TooLargeError(f"the request body is larger than {MAX_BODY_BYTES >> 20} MiB")
