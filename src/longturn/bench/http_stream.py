"""HTTP/1.1 for a load client: posts a body and hands on the pieces of the answer inside the socket's own callback.

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
from typing import Protocol, cast

_MOST_HEAD_BYTES = 65536
_IDLE_S = 4.0
"""An idle connection is used again for this long: uvicorn closes them after five seconds."""
_CONNECT_S = 30.0
_DIGITS = frozenset(b"0123456789abcdefABCDEF")


class HttpError(Exception):
    """The server sent what is not HTTP/1.1."""


class NoConnectionError(OSError):
    """No connection could be made; the cause says why."""


class AddressError(ValueError):
    """Not an http:// or https:// address."""


class Sink(Protocol):
    """Takes one answer."""

    def head(self, status: int, headers: Mapping[str, str], at_ns: int) -> None:
        """The status and the headers, by lower-case names, have come."""
        ...

    def data(self, data: bytes, at_ns: int) -> None:
        """A piece of the body has come, cut anywhere. Must not raise."""
        ...


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
        self._idle: deque[tuple[float, _Connection]] = deque()
        self._busy: set[_Connection] = set()

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

    async def _connection(self) -> _Connection:
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
                    _Connection, self._host, self._port, ssl=self._tls, happy_eyeballs_delay=0.25
                )
        except OSError as error:
            raise NoConnectionError(str(error)) from error
        return connection


class _Connection(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport
        self._sink: Sink | None = None
        self._done: asyncio.Future[None] | None = None
        self._rest = b""
        """Read and not understood yet: part of a head, or of a line between chunks."""
        self._in_body = False
        self._chunked = False
        self._left: int | None = None
        """Bytes to the end of the chunk with its line end, or of a body without chunks; None: up to its end."""
        self._trailer = False
        self._keep = True
        self._open = False

    @property
    def reusable(self) -> bool:
        return self._open and self._keep and self._done is None and not self._transport.is_closing()

    def abort(self) -> None:
        self._open = False
        self._transport.abort()

    async def exchange(self, head: bytes, body: bytes, sink: Sink) -> None:
        """Send one request and wait for its answer's end; see `HttpStream.post`."""
        self._sink, self._in_body, self._chunked, self._trailer, self._left = sink, False, False, False, None
        self._done = asyncio.get_running_loop().create_future()
        if not self._open:
            raise ConnectionResetError("the server closed the connection")
        # Apart: in one write a megabyte would be copied once more.
        self._transport.write(head)
        self._transport.write(body)
        try:
            await self._done
        finally:
            self._done = self._sink = None

    # --- what asyncio calls ------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._open = True

    def connection_lost(self, exc: Exception | None) -> None:
        self._open = False
        if self._done is None or self._done.done():
            return
        if self._in_body and not self._chunked and self._left is None and exc is None:
            self._done.set_result(None)  # a body without a length ends with the connection
        elif self._rest and not self._in_body:
            # No lost connection, after which a request may be sent again: an answer had begun.
            self._done.set_exception(HttpError("the server closed the connection within its headers"))
        elif isinstance(exc, OSError):
            self._done.set_exception(exc)
        else:
            self._done.set_exception(ConnectionResetError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter_ns()
        if self._done is None or self._done.done():
            self._keep = False  # nothing was asked: whatever it is, the next answer could not be told from it
            self._transport.abort()
            return
        try:
            if not self._in_body:
                data = self._head(self._rest + data, now)
            if data and self._in_body and not self._done.done():
                if self._chunked:
                    self._chunks(data, now)
                else:
                    self._plain(data, now)
        except HttpError as error:
            self._keep = False
            if not self._done.done():
                self._done.set_exception(error)

    # --- the answer --------------------------------------------------------------------------------------------------

    def _head(self, data: bytes, now: int) -> bytes:
        """Take the head if it is whole; returns what follows it."""
        assert self._sink is not None and self._done is not None
        while True:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                if len(data) > _MOST_HEAD_BYTES:
                    raise HttpError("the server's headers do not end")
                self._rest = data
                return b""
            status, version, headers = _parse_head(data[:end])
            data, self._rest = data[end + 4 :], b""
            if status >= 200:  # before it there may be any number of interim answers
                break
        coding, length = headers.get("transfer-encoding", "identity").lower(), headers.get("content-length")
        tokens = [word.strip() for word in headers.get("connection", "").lower().split(",")]
        self._keep = "close" not in tokens and (version == b"HTTP/1.1" or "keep-alive" in tokens)
        self._in_body, self._chunked = True, coding == "chunked"
        if coding not in ("chunked", "identity"):
            raise HttpError(f"the server encodes its answer as '{coding}', which was not asked for")
        if not self._chunked and length is not None:
            if not length.isdecimal():
                raise HttpError(f"the server's Content-Length is '{length}'")
            self._left = int(length)
        elif not self._chunked:
            self._left = 0 if status in (204, 304) else None
            self._keep = self._left == 0 and self._keep
        self._sink.head(status, headers, now)
        if self._left == 0 and not self._chunked:
            self._finish(data)
            return b""
        self._left = 0 if self._chunked else self._left
        return data

    def _plain(self, data: bytes, now: int) -> None:
        """A body with a length, or up to the connection's end."""
        assert self._sink is not None
        if self._left is None:
            self._sink.data(data, now)
            return
        self._sink.data(data[: self._left], now)
        rest = data[self._left :]
        self._left -= len(data) - len(rest)
        if not self._left:
            self._finish(rest)

    def _chunks(self, data: bytes, now: int) -> None:
        """A chunked body (RFC 9112, 7.1)."""
        assert self._sink is not None and self._left is not None
        if self._rest:
            data, self._rest = self._rest + data, b""
        at, size = 0, len(data)
        while at < size:
            if self._left > 2:
                piece = data[at : min(size, at + self._left - 2)]
                self._sink.data(piece, now)
                at += len(piece)
                self._left -= len(piece)
                if self._left > 2:
                    return
            if self._left:  # the line end after a chunk
                if data[at : at + self._left] != b"\r\n"[2 - self._left :][: size - at]:
                    raise HttpError("a chunk of the server's answer is longer than it says")
                taken = min(self._left, size - at)
                at, self._left = at + taken, self._left - taken
                continue
            end = data.find(b"\r\n", at)
            if end < 0:
                if size - at > _MOST_HEAD_BYTES:
                    raise HttpError("a chunk of the server's answer has no size")
                self._rest = data[at:]
                return
            line, at = data[at:end], end + 2
            if self._trailer:
                if not line:
                    self._finish(data[at:])
                    return
                continue
            digits = line.split(b";", 1)[0].strip()
            if not digits or len(digits) > 12 or not _DIGITS.issuperset(digits):
                raise HttpError("a chunk of the server's answer has no size")
            length = int(digits, 16)
            self._trailer, self._left = not length, length + 2 if length else 0

    def _finish(self, rest: bytes) -> None:
        assert self._done is not None
        self._rest = b""
        # More than was asked for, or an answer before the request was sent whole: the next one could not be told apart.
        if rest or self._transport.get_write_buffer_size():
            self._keep = False
        self._done.set_result(None)


def _header_lines(headers: Mapping[str, str]) -> bytes:
    """Raises ValueError where a value would end its line."""
    lines = []
    for name, value in headers.items():
        if "\r" in value or "\n" in value:
            raise ValueError(f"the header {name} holds a line end")
        lines.append(f"{name}: {value}\r\n")
    return "".join(lines).encode()


def _parse_head(data: bytes) -> tuple[int, bytes, dict[str, str]]:
    """Status, version and headers; the last of several headers of one name counts."""
    first, *lines = data.split(b"\r\n")
    version, _, rest = first.partition(b" ")
    status = rest[:3]
    if not version.startswith(b"HTTP/1.") or not status.isdigit() or rest[3:4] not in (b"", b" "):
        raise HttpError("the server does not speak HTTP/1.1")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(b":")
        if not colon:
            raise HttpError("a header of the server's answer has no colon")
        headers[name.decode("latin-1").lower()] = value.strip().decode("latin-1")
    return int(status), version, headers
