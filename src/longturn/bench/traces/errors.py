"""The error of everything that reads traces."""

from __future__ import annotations

from longturn.errors import LongturnError


class TraceError(LongturnError):
    """A trace is missing, is not JSON, or breaks its format; the message names the file, the place and the value."""

    exit_code = 2
    http_status = 400
