"""Log lines as JSON objects, one a line, for collectors: time, level, logger, message, and what the record brings."""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Callable
from typing import Any

FIELDS = ("request_id", "method", "path", "status", "duration_ms", "model", "source")
"""Attributes of a record (`extra`) that become members of the object."""


def json_line(message: str, *, level: str, logger: str, created_s: float, **fields: Any) -> str:
    """One log line. `created_s` is Unix time; fields that are None are left out."""
    moment = datetime.datetime.fromtimestamp(created_s, datetime.UTC)
    line = {
        "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": level,
        "logger": logger,
        "message": message,
    }
    return json.dumps(line | {name: value for name, value in fields.items() if value is not None}, ensure_ascii=False)


class JsonFormatter(logging.Formatter):
    """Formats records with `json_line`."""

    def __init__(self, request_id: Callable[[], str | None] = lambda: None) -> None:
        """`request_id` tells which request the current task serves, for records that do not say."""
        super().__init__()
        self._request_id = request_id

    def format(self, record: logging.LogRecord) -> str:
        fields = {name: getattr(record, name, None) for name in FIELDS}
        if fields["request_id"] is None:
            fields["request_id"] = self._request_id()
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        return json_line(
            record.getMessage(),
            level=record.levelname.lower(),
            logger=record.name,
            created_s=record.created,
            **fields,
        )
