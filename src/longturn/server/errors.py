"""Errors as the OpenAI API shows them (`{"error": {"message", "type", "param", "code"}}`), or as Anthropic's does."""

from __future__ import annotations

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from longturn.errors import LongturnError, RequestError
from longturn.server.messages_errors import is_messages_path, messages_error

RETRY_AFTER_S = 5
"""What 429 and 503 answers ask clients to wait."""
CLIENT_GONE = 499
"""nginx's status for a client that closed the connection; nobody sees it but the metrics."""

_CODES = {
    401: "invalid_api_key",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    415: "unsupported_media_type",
    429: "too_many_requests",
    503: "engine_unavailable",
    504: "timeout",
}


class AuthError(RequestError):
    """The request carries no accepted API key."""

    http_status = 401


class TooLargeError(RequestError):
    """The body is larger than any sensible request."""

    http_status = 413


class EncodingError(RequestError):
    """The body is compressed."""

    http_status = 415


class DrainingError(LongturnError):
    """The server was told to stop: it finishes what it has and takes nothing new."""

    http_status = 503


class TimedOutError(LongturnError):
    """The request took longer than `server.request_timeout_s`."""

    http_status = 504


def error_body(status: int, message: str, *, param: str | None = None, code: str | None = None) -> bytes:
    """The JSON object of one error."""
    if status == 401:
        kind = "authentication_error"
    elif status == 429:
        kind = "rate_limit_error"
    elif status < 500:
        kind = "invalid_request_error"
    else:
        kind = "server_error"
    error = {"message": message, "type": kind, "param": param, "code": code or _CODES.get(status)}
    return msgspec.json.encode({"error": error})


def body_of(error: LongturnError) -> bytes:
    """`error_body` of an error that a user can act on."""
    if isinstance(error, RequestError):
        code = error.code
        if code is None and error.param is not None and error.http_status == 400:
            code = "invalid_value"  # most of what rooms below refuse is a value out of its range
        return error_body(error.http_status, str(error), param=error.param, code=code)
    return error_body(error.http_status, str(error))


def error_response(
    status: int, body: bytes, headers: dict[str, str] | None = None, *, scope: Scope | None = None
) -> Response:
    """An error answer; 429 and 503 say when to try again.

    Args:
        status: HTTP status.
        body: of `error_body`.
        headers: more headers.
        scope: of the request, whose path tells the dialect; OpenAI's if None.
    """
    headers = dict(headers or {})
    if scope is not None and is_messages_path(scope["path"]):
        body = messages_error(status, body, scope["state"]["request_id"])
    if status in (429, 503):
        headers.setdefault("retry-after", str(RETRY_AFTER_S))
    if status == 401:
        headers.setdefault("www-authenticate", "Bearer")
    return Response(body, status, headers, media_type="application/json")


async def on_longturn_error(request: Request, error: Exception) -> Response:
    """Starlette exception handler."""
    assert isinstance(error, LongturnError)
    return error_response(error.http_status, body_of(error), scope=request.scope)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Starlette exception handler for what the router itself refuses (404, 405)."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(
        error.status_code, error_body(error.status_code, message), dict(error.headers or {}), scope=request.scope
    )


async def on_too_deep(request: Request, error: Exception) -> Response:
    """Starlette exception handler for a body whose nesting is too deep for whoever walks through it."""
    body = error_body(400, "the request body is nested too deeply", code="invalid_json")
    return error_response(400, body, scope=request.scope)


async def on_client_gone(request: Request, error: Exception) -> Response:
    """Starlette exception handler for a client that closes the connection while it sends its request."""
    return Response(status_code=CLIENT_GONE)


async def on_unexpected(request: Request, error: Exception) -> Response:
    """Starlette exception handler for bugs; the gate logs what it re-raises."""
    return internal_error(request.scope["state"]["request_id"], request.scope)


def internal_error(request_id: str, scope: Scope) -> Response:
    """The answer to a bug: the details are in the log, under this id."""
    body = error_body(500, f"internal server error (request id {request_id})", code="internal_error")
    return error_response(500, body, scope=scope)
