"""What the code that serves one HTTP request may ask about it, or say of it, without being handed it: for logs, traces
and response headers."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One HTTP request."""

    request_id: str
    traceparent: str | None = None
    """W3C trace context of the client, if it sent one."""
    tracestate: str | None = None
    response_headers: dict[str, str] = field(default_factory=dict)
    """Headers that the answer gets, filled until its head is sent."""


_CURRENT: ContextVar[RequestContext | None] = ContextVar("longturn_request", default=None)


def current_request() -> RequestContext | None:
    """The request that the current task serves."""
    return _CURRENT.get()


def set_current_request(context: RequestContext) -> None:
    """Say which request the current task, and those that it starts, serve."""
    _CURRENT.set(context)


def current_request_id() -> str | None:
    """Id of the request that the current task serves."""
    context = _CURRENT.get()
    return None if context is None else context.request_id
