"""Errors that a user can act on.

Every error that reaches a person is a `LongturnError` with one line that names the thing that is wrong.
The command line prints that line and exits with `exit_code`; the server answers `http_status`.
Anything else that escapes is a bug in Longturn and keeps its stack trace.
"""

from __future__ import annotations


class LongturnError(Exception):
    """Base of all user-facing errors: one line, an exit code and an HTTP status."""

    exit_code = 1
    http_status = 500


class ConfigError(LongturnError):
    """A configuration value is unknown, of the wrong type, or out of range."""

    exit_code = 2
    http_status = 400


class ModelError(LongturnError):
    """A model directory or file is missing, damaged, or of a kind that Longturn does not serve."""

    exit_code = 3
    http_status = 500


class RequestError(LongturnError):
    """A request asks for something that cannot be done; `param` names the field at fault."""

    exit_code = 2
    http_status = 400

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class NotFoundError(RequestError):
    """The named model or object does not exist."""

    http_status = 404


class OverloadedError(RequestError):
    """Too many requests wait already; the client may try again later."""

    http_status = 429


class EngineDeadError(LongturnError):
    """The engine process has died; the request could not be answered."""

    exit_code = 4
    http_status = 503
