"""HTTP/1.1 for a load client: posts a body over connections that are kept, and hands on the pieces of the answer.

A general client wakes a task for each piece. At thousands of events a second that is most of a load client's time, and
it puts a trip through the event loop between an event's arrival and its time. Here nothing runs between: pieces go to
a plain function together with the time at which they were read, and the task wakes once, at the end.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
import time
import urllib.parse
from collections import deque
from collections.abc import Mapping

from longturn.bench.http_connection import HttpConnection, Sink

_IDLE_S = 4.0
"""An idle connection is used again for this long: uvicorn closes them after five seconds."""
_CONNECT_S = 30.0


class NoConnectionError(OSError):
    """No connection could be made; the cause says why."""


class AddressError(ValueError):
    """Not an http:// or https:// address."""


class HttpStream:
    """Keep-alive connections to one server."""

    def __init__(self, url: str, *, headers: Mapping[str, str]) -> None:
        """
        Args:
            url: base address; paths of requests are put behind its own.
            headers: sent with every request.

        Raises:
            AddressError: not an http:// or https:// address.
        """
        try:
            parts = urllib.parse.urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise AddressError(url) from error
        if parts.scheme not in ("http", "https") or not host:
            raise AddressError(url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = host
        self._port = port if port is not None else 443 if self._tls else 80
        self._path = parts.path.rstrip("/")
        named = f"[{host}]" if ":" in host else host
        fixed = {"Host": named if port is None else f"{named}:{port}", "Accept-Encoding": "identity", **headers}
        if parts.username is not None and "Authorization" not in headers:
            user = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
            fixed["Authorization"] = "Basic " + base64.b64encode(user.encode()).decode()
        self._fixed = _header_lines(fixed)
        self._idle: deque[tuple[float, HttpConnection]] = deque()
        self._busy: set[HttpConnection] = set()

    def close(self) -> None:
        """Close all connections; answers in progress are cut."""
        for connection in (*self._busy, *(item for _, item in self._idle)):
            connection.abort()
        self._idle.clear()

    async def post(self, path: str, body: bytes, headers: Mapping[str, str], sink: Sink) -> None:
        """Post one body and wait for the end of the answer.

        Args:
            path: behind the base address, such as `/v1/completions`.
            body: sent with its length.
            headers: beside those of every request.
            sink: takes the answer.

        Raises:
            ConnectionError: the connection was lost before the answer's end.
            NoConnectionError: none could be made.
            HttpError: not HTTP.
        """
        connection = await self._connection()
        self._busy.add(connection)
        head = b"POST %b HTTP/1.1\r\n%b%bContent-Length: %d\r\n\r\n" % (
            urllib.parse.quote(self._path + path, safe="/%:@!$&'()*+,;=~").encode(),
            self._fixed,
            _header_lines(headers),
            len(body),
        )
        whole = False
        try:
            await connection.exchange(head, body, sink)
            whole = True
        finally:
            self._busy.discard(connection)
            if whole and connection.reusable:
                self._idle.append((time.monotonic(), connection))
            else:
                connection.abort()

    async def _connection(self) -> HttpConnection:
        """The connection that was used last, if the server is likely to hold it still, else a new one."""
        now = time.monotonic()
        while self._idle and now - self._idle[0][0] > _IDLE_S:
            self._idle.popleft()[1].abort()
        while self._idle:
            _, connection = self._idle.pop()
            if connection.reusable:
                return connection
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, connection = await loop.create_connection(
                    HttpConnection, self._host, self._port, ssl=self._tls, happy_eyeballs_delay=0.25
                )
        except OSError as error:
            raise NoConnectionError(str(error)) from error
        return connection


def _header_lines(headers: Mapping[str, str]) -> bytes:
    """Raises ValueError where a value would end its line."""
    lines = []
    for name, value in headers.items():
        if "\r" in value or "\n" in value:
            raise ValueError(f"the header {name} holds a line end")
        lines.append(f"{name}: {value}\r\n")
    return "".join(lines).encode()
