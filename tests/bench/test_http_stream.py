"""The load client's own HTTP: answers cut anywhere, connections used again, and what is not HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.bench.http_connection import HttpError
from longturn.bench.http_stream import AddressError, HttpStream, NoConnectionError


@dataclass
class Collected:
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    def head(self, status: int, headers: Mapping[str, str], at_ns: int) -> None:
        self.status, self.headers = status, dict(headers)

    def data(self, data: bytes, at_ns: int) -> None:
        assert data
        self.body += data


@dataclass
class Scripted:
    """A server that answers each request with the next pieces of its script; None closes the connection."""

    script: list[list[bytes | None]]
    connections: int = 0
    requests: list[tuple[bytes, bytes]] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    """Number of the connection that each request came on."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        number = self.connections
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                self.requests.append((head, await reader.readexactly(length)))
                self.used.append(number)
                for piece in self.script.pop(0):
                    if piece is None:
                        return
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def scripted(*script: list[bytes | None], path: str = "") -> AsyncIterator[tuple[Scripted, HttpStream]]:
    server = Scripted(list(script))
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        http = HttpStream(f"http://127.0.0.1:{port}{path}", headers={"X-All": "1"})
        try:
            yield server, http
        finally:
            http.close()


def chunked(*pieces: bytes, trailer: bytes = b"") -> bytes:
    body = b"".join(b"%x;note=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Name:  v \r\n\r\n" + body + b"0\r\n" + trailer + b"\r\n"


def cut(data: bytes, places: list[int]) -> list[bytes | None]:
    ends = sorted({place % len(data) for place in places} - {0})
    return [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]


@settings(max_examples=60, deadline=None)
@given(
    pieces=st.lists(st.binary(min_size=1, max_size=40), max_size=8),
    places=st.lists(st.integers(0, 10_000), max_size=30),
    trailer=st.sampled_from([b"", b"X-Sum: 1\r\n", b"A: 1\r\nB: 2\r\n"]),
    interim=st.sampled_from([b"", b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"]),
)
def test_chunked_bodies_are_read_however_they_are_cut(
    pieces: list[bytes], places: list[int], trailer: bytes, interim: bytes
) -> None:
    async def run() -> None:
        data = interim + chunked(*pieces, trailer=trailer)
        async with scripted(cut(data, places), [chunked(b"next")]) as (server, http):
            for wanted in (b"".join(pieces), b"next"):
                found = Collected()
                await http.post("/v1/x", b"body", {"X-One": "2"}, found)
                assert (found.status, found.body, found.headers["x-name"]) == (200, wanted, "v")
            assert server.connections == 1
            head, body = server.requests[0]
            assert body == b"body" and head.startswith(b"POST /v1/x HTTP/1.1\r\n")
            assert b"\r\nX-All: 1\r\n" in head and b"\r\nX-One: 2\r\n" in head and b"\r\nHost: 127.0.0.1:" in head

    asyncio.run(run())


@pytest.mark.parametrize("places", [[], [1, 2, 3], [20, 40, 41, 45], list(range(200))])
async def test_bodies_with_a_length_and_bodies_up_to_the_end(places: list[int]) -> None:
    fixed = b"HTTP/1.1 404 Not Found\r\nContent-Length: 7\r\n\r\nnothing"
    empty = b"HTTP/1.1 204 No Content\r\n\r\n"
    ended = b"HTTP/1.1 200 OK\r\n\r\nto the end"
    async with scripted(cut(fixed, places), cut(empty, places), [*cut(ended, places), None]) as (server, http):
        answers = []
        for _ in range(3):
            found = Collected()
            await http.post("/x", b"", {}, found)
            answers.append((found.status, found.body))
    assert answers == [(404, b"nothing"), (204, b""), (200, b"to the end")]
    assert server.connections == 1


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nConnection: Keep-Alive, Close\r\nContent-Length: 1\r\n\r\nx",
        b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nxy",
    ],
)
async def test_connections_that_cannot_be_used_again_are_not(head: bytes) -> None:
    async with scripted([head], [head]) as (server, http):
        for _ in range(2):
            found = Collected()
            await http.post("/x", b"", {}, found)
            assert found.body == b"x"
    assert server.connections == 2


async def test_a_connection_that_was_idle_for_long_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longturn.bench.http_stream._IDLE_S", -1.0)
    async with scripted([chunked(b"a")], [chunked(b"b")]) as (server, http):
        await http.post("/x", b"", {}, Collected())
        await http.post("/x", b"", {}, Collected())
    assert server.connections == 2


async def test_requests_at_once_have_connections_of_their_own() -> None:
    async with scripted(*[[chunked(b"a")]] * 6) as (server, http):
        await asyncio.gather(*(http.post("/x", b"", {}, Collected()) for _ in range(3)))
        await asyncio.gather(*(http.post("/x", b"", {}, Collected()) for _ in range(3)))
    assert server.connections == 3


@pytest.mark.parametrize(
    "pieces",
    [
        [None],
        [b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", None],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n", None],
    ],
)
async def test_a_lost_connection_is_an_error(pieces: list[bytes | None]) -> None:
    async with scripted(pieces) as (_, http):
        with pytest.raises(ConnectionError):
            await http.post("/x", b"", {}, Collected())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", r"does not speak HTTP/1\.1"),
        (b"HTTP/1.1 abc\r\n\r\n", r"does not speak HTTP/1\.1"),
        (b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n", "has no colon"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "Content-Length is '-1'"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n", "encodes its answer as 'gzip, chunked'"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n", "no size"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n", "no size"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n", "longer than it says"),
        (b"x" * 70_000, "headers do not end"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "within its headers"),
    ],
)
async def test_what_is_not_http(answer: bytes, message: str) -> None:
    async with scripted([answer, None]) as (_, http):
        with pytest.raises(HttpError, match=message):
            await http.post("/x", b"", {}, Collected())


async def test_a_cancelled_request_closes_its_connection() -> None:
    async with scripted([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"], [chunked(b"a")]) as (server, http):
        task = asyncio.create_task(http.post("/x", b"", {}, Collected()))
        while not server.requests:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await http.post("/x", b"", {}, Collected())
    assert server.connections == 2


async def test_a_path_before_ours_is_kept() -> None:
    async with scripted([chunked(b"a")], path="/proxy/one") as (server, http):
        await http.post("/v1/x", b"", {}, Collected())
    assert server.requests[0][0].startswith(b"POST /proxy/one/v1/x HTTP/1.1\r\n")


def test_addresses_and_headers() -> None:
    for url in ("localhost:8000", "ftp://h", "http://", "http://h:99999", "http://[::1"):
        with pytest.raises(AddressError):
            HttpStream(url, headers={})
    with pytest.raises(ValueError, match="X-A holds a line end"):
        HttpStream("http://h", headers={"X-A": "1\r\nX-B: 2"})


async def test_the_connection_used_last_is_used_again_and_old_ones_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("longturn.bench.http_stream.time.monotonic", lambda: now_s)
    async with scripted(*[[chunked(b"a")]] * 7) as (server, http):

        async def both() -> None:
            await asyncio.gather(*(http.post("/x", b"", {}, Collected()) for _ in range(2)))

        await both()
        now_s = 3.0
        await http.post("/x", b"", {}, Collected())
        await http.post("/x", b"", {}, Collected())
        assert server.connections == 2 and server.used[-2] == server.used[-1]
        now_s = 6.0  # the other one has been idle for 6 s, this one for 3
        await both()
        assert server.connections == 3 and server.used[3] in server.used[4:]


async def test_an_answer_before_the_request_was_sent_whole_ends_the_connection() -> None:
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 1\r\n\r\nx")
        await writer.drain()
        await asyncio.sleep(0.05)  # the body is never read
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        http = HttpStream(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}", headers={})
        for _ in range(2):
            found = Collected()
            await http.post("/x", bytes(32 << 20), {}, found)
            assert found.status == 413
        http.close()
    assert connections == 2


async def test_ports_and_credentials_of_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[tuple[object, ...]] = []

    async def refuse(self: object, factory: object, host: str, port: int, **more: object) -> None:
        places.append((host, port, more["ssl"] is not None))
        raise ConnectionRefusedError

    monkeypatch.setattr("asyncio.BaseEventLoop.create_connection", refuse)
    for url in ("http://h", "https://h", "https://h:8443", "http://[::1]:80"):
        with pytest.raises(NoConnectionError):
            await HttpStream(url, headers={}).post("/x", b"", {}, Collected())
    assert places == [("h", 80, False), ("h", 443, True), ("h", 8443, True), ("::1", 80, False)]


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [({}, b"Authorization: Basic dTpwQA=="), ({"Authorization": "Bearer k"}, b"Authorization: Bearer k")],
)
async def test_a_key_comes_before_the_addresss_user(headers: dict[str, str], wanted: bytes) -> None:
    server = Scripted([[chunked(b"a")]])
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        http = HttpStream(f"http://u:p%40@127.0.0.1:{listening.sockets[0].getsockname()[1]}", headers=headers)
        await http.post("/x", b"", {}, Collected())
        http.close()
    assert [line for line in server.requests[0][0].split(b"\r\n") if line.startswith(b"Authorization")] == [wanted]
