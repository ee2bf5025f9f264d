"""The page over HTTP, made anew when its results change. A reader's browser asks for changes and offers to reload.

It is for the person at this machine: it listens on the loopback address unless told otherwise, answers two paths, and
writes nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from longturn.errors import LongturnError
from longturn.report.schema import ResultError


class LivePage:
    """Renders at most once for each state of the results. Safe for several threads."""

    def __init__(self, render: Callable[[str], str], stamp: Callable[[], str]) -> None:
        """
        Args:
            render: makes the page, given the stamp that it is to carry.
            stamp: names the state of the results cheaply, without reading them: another text after any change.
        """
        self._render = render
        self._stamp = stamp
        self._lock = threading.Lock()
        self._made: tuple[str, bytes] | None = None

    def stamp(self) -> str:
        return self._stamp()

    def page(self) -> bytes:
        """The page as it should be now.

        Raises:
            LongturnError: the results cannot be read.
        """
        with self._lock:
            # Taken before reading: a change while we read makes the page stale, not the stamp.
            stamp = self._stamp()
            if self._made is None or self._made[0] != stamp:
                self._made = (stamp, self._render(stamp).encode())
            return self._made[1]


def live_server(page: LivePage, host: str, port: int) -> ThreadingHTTPServer:
    """A server that is bound and not yet serving: call `serve_forever`, then `server_close`.

    Args:
        page: what it serves at `/`; its stamp is at `/stamp`.
        host: address to listen on.
        port: 0 takes a free one, which `server_address` tells.

    Raises:
        ResultError: the address cannot be listened on.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            try:
                if self.path == "/":
                    self._send(HTTPStatus.OK, "text/html; charset=utf-8", page.page())
                elif self.path == "/stamp":
                    self._send(HTTPStatus.OK, "text/plain; charset=utf-8", page.stamp().encode())
                else:
                    self._send(HTTPStatus.NOT_FOUND, "text/plain; charset=utf-8", b"nothing here\n")
            except LongturnError as error:
                # A file that is just being written, or was damaged: said, and tried again with the next request.
                self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain; charset=utf-8", f"{error}\n".encode())

        def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Nothing: a line every few seconds for each open page hides what the terminal should show."""

    try:
        return ThreadingHTTPServer((host, port), Handler)
    except (OSError, OverflowError) as error:
        raise ResultError(f"cannot listen on {host}:{port}: {getattr(error, 'strerror', None) or error}") from error
