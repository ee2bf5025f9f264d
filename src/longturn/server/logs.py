"""Sets up the server's log: where it goes, from which level on, and how lines look."""

from __future__ import annotations

import logging
import sys

from longturn.config import ServerConfig
from longturn.json_log import JsonFormatter
from longturn.server.request_context import current_request_id

TEXT_FORMAT = "%(levelname)s %(name)s: %(message)s"


def configure_logs(server: ServerConfig) -> None:
    """Log to standard error as configured, unless the program that we are part of has set up its log already."""
    handler = logging.StreamHandler(sys.stderr)
    if server.log_format == "json":
        handler.setFormatter(JsonFormatter(current_request_id))
    else:
        handler.setFormatter(logging.Formatter(TEXT_FORMAT))
    root = logging.getLogger()
    if not root.handlers:
        root.addHandler(handler)
        root.setLevel(server.log_level.upper())
