"""One HTTP/1.1 connection of the load client: sends a request and reads its answer inside the socket's own callback."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Protocol, cast

_MOST_HEAD_BYTES = 65536
_DIGITS = frozenset(b"0123456789abcdefABCDEF")


class HttpError(Exception):
    """The server sent what is not HTTP/1.1."""


class Sink(Protocol):
    """Takes one answer."""

    def head(self, status: int, headers: Mapping[str, str], at_ns: int) -> None:
        """The status and the headers, by lower-case names, have come."""
        ...

    def data(self, data: bytes, at_ns: int) -> None:
        """A piece of the body has come, cut anywhere. Must not raise."""
        ...


class HttpConnection(asyncio.Protocol):
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
