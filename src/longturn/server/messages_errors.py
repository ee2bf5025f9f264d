"""Errors as Anthropic's API shows them: `{"type": "error", "error": {"type", "message"}}`."""

from __future__ import annotations

import msgspec

PATH = "/v1/messages"
"""Where they are shown so: here and below it."""

_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


NO_THREADS = "thread_unsupported_request"
"""Code of the refusal of a conversation that the server shall hold. Anthropic's clients, which ask for one in each run
of tools, look for it in the error's `details`, and go on with whole conversations."""


def is_messages_path(path: str) -> bool:
    """Whether clients of a path speak Anthropic's dialect."""
    return path == PATH or path.startswith(f"{PATH}/")


def messages_error(status: int, body: bytes, request_id: str | None = None) -> bytes:
    """An error in Anthropic's form.

    Args:
        status: of the answer.
        body: the error in OpenAI's form.
        request_id: shown beside it.
    """
    error = msgspec.json.decode(body)["error"]
    details = {"details": {"error_code": NO_THREADS}} if error["code"] == NO_THREADS else {}
    kind = _KINDS.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    return msgspec.json.encode(
        {
            "type": "error",
            # Anthropic's errors do not name the field apart; the message does.
            "error": {
                "type": kind,
                "message": error["message"],
                "param": error["param"],
                "code": error["code"],
                **details,
            },
            "request_id": request_id,
        }
    )
