"""The protocol of `null_server`: just enough HTTP/1.1 and OpenAI for a load client, and one timer that writes answers.

Answers come from buffers that were made once; nothing is parsed but heads, and `max_tokens` of a body.
"""

from __future__ import annotations

import asyncio
import heapq
import re
import time
from dataclasses import asdict, dataclass
from typing import cast

import msgspec

_COUNT = re.compile(rb"\s*:\s*(\d+)")
_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.I)
_SESSION = re.compile(rb"\r\nx-session-id:\s*([^\r]*)", re.I)
_DEFAULT_TOKENS = 16
_END = b"0\r\n\r\n"
_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


@dataclass(frozen=True, slots=True)
class NullOptions:
    """What the server pretends to be."""

    ttft_s: float = 0.1
    """From a whole request to its first token."""
    rate: float = 100.0
    """Tokens per second and stream."""
    bundle: int = 1
    """Tokens in one event."""
    prompt_tokens: int | None = None
    """What usage tells; nothing is counted. None: usage has no such field."""
    model: str = "null"


@dataclass(frozen=True, slots=True)
class NullStream:
    """What the server did for one request. Nanoseconds of `time.perf_counter_ns`, which all processes of one machine
    share on Linux, macOS and Windows."""

    session: str
    """Its `X-Session-ID`; empty without one."""
    received_ns: int
    """The request was there, whole."""
    first_ns: int
    """Its first token was written."""
    last_ns: int
    """Its end was written."""
    late_ns: int
    """Most by which a token was written after its time: the server's own lag."""
    tokens: int
    events: int
    """Events with tokens."""


class _Answer:
    """One answer being written."""

    __slots__ = ("connection", "due_ns", "events", "first_ns", "late_ns", "left", "received_ns", "session", "total")

    def __init__(self, connection: NullConnection, session: str, tokens: int, received_ns: int, due_ns: int) -> None:
        self.connection = connection
        self.session = session
        self.total = self.left = tokens
        self.received_ns = received_ns
        self.due_ns = due_ns
        self.first_ns = 0
        self.late_ns = 0
        self.events = 0


class NullService:
    """All connections, and the one timer that writes what is due."""

    def __init__(self, options: NullOptions) -> None:
        self.options = options
        self.log: list[NullStream] = []
        self._loop = asyncio.get_running_loop()
        self._due: list[tuple[int, int, _Answer, bytes, int]] = []
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._ttft_ns = round(options.ttft_s * 1e9)
        self._step_ns = round(options.bundle / options.rate * 1e9)
        self._events = {
            True: b'"choices":[{"index":0,"delta":{"content":"%b"},"logprobs":null,"finish_reason":%b}],"usage":',
            False: b'"choices":[{"index":0,"text":"%b","logprobs":null,"finish_reason":%b}],"usage":',
        }
        self._full = {chat: self._event(chat, options.bundle) for chat in (True, False)}

    def _open(self, chat: bool) -> bytes:
        kind = b"chat.completion.chunk" if chat else b"text_completion"
        name = msgspec.json.encode(self.options.model)
        return b'data: {"id":"null-0000000000000000","object":"%b","created":0,"model":%b,' % (kind, name)

    def _event(self, chat: bool, tokens: int) -> bytes:
        return _frame(self._open(chat) + self._events[chat] % (b" word" * tokens, b"null") + b"null}\n\n")

    def _close(self, chat: bool, tokens: int) -> bytes:
        usage: dict[str, int] = {"completion_tokens": tokens}
        if self.options.prompt_tokens is not None:
            usage |= {"prompt_tokens": self.options.prompt_tokens}
            usage |= {"total_tokens": self.options.prompt_tokens + tokens}
        head = self._open(chat)
        finish = head + self._events[chat] % (b"", b'"length"') + b"null}\n\n"
        usage_event = head + b'"choices":[],"usage":' + msgspec.json.encode(usage) + b"}\n\n"
        return _frame(finish + usage_event + b"data: [DONE]\n\n") + _END

    def start(self, connection: NullConnection, head: bytes, body: bytes) -> None:
        """Answer one request for a completion."""
        now = time.perf_counter_ns()
        chat = b"/chat/" in head[: head.index(b"\r\n")]
        found = _SESSION.search(head)
        tokens = _max_tokens(body)
        answer = _Answer(connection, found[1].decode() if found else "", tokens, now, now + self._ttft_ns)
        role = b""
        if chat:
            role = _frame(self._open(chat) + b'"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n')
        connection.transport.write(_HEAD + role)
        connection.answer = answer
        self._push(answer, chat)

    def _push(self, answer: _Answer, chat: bool) -> None:
        self._number += 1
        heapq.heappush(self._due, (answer.due_ns, self._number, answer, self._full[chat], chat))
        if self._due[0][2] is answer:
            self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        wait_s = max(0.0, (self._due[0][0] - time.perf_counter_ns()) / 1e9)
        self._timer = self._loop.call_later(wait_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        due, bundle = self._due, self.options.bundle
        now = time.perf_counter_ns()
        while due and due[0][0] <= now:
            when, number, answer, event, chat = due[0]
            if answer.connection.answer is not answer:  # the client went away
                heapq.heappop(due)
                continue
            count = min(bundle, answer.left)
            answer.left -= count
            answer.events += 1
            data = event if count == bundle else self._event(bool(chat), count)
            if not answer.left:
                data += self._close(bool(chat), answer.total)
            now = time.perf_counter_ns()
            answer.first_ns = answer.first_ns or now
            answer.late_ns = max(answer.late_ns, now - when)
            answer.connection.transport.write(data)
            if answer.left:
                # From the time it was due, so that lateness does not add up.
                answer.due_ns = when + self._step_ns
                heapq.heapreplace(due, (answer.due_ns, number, answer, event, chat))
            else:
                heapq.heappop(due)
                self._ended(answer)
        if due:
            self._arm()

    def _ended(self, answer: _Answer) -> None:
        self.log.append(
            NullStream(
                session=answer.session,
                received_ns=answer.received_ns,
                first_ns=answer.first_ns,
                last_ns=time.perf_counter_ns(),
                late_ns=answer.late_ns,
                tokens=answer.total,
                events=answer.events,
            )
        )
        answer.connection.answered()

    def get(self, path: bytes) -> bytes:
        """The answer to a GET."""
        if path == b"/v1/models":
            return _json({"object": "list", "data": [{"id": self.options.model, "object": "model"}]})
        if path == b"/null/log":
            taken, self.log = self.log, []
            return _json([asdict(item) for item in taken])
        if path == b"/health":
            return _json({})
        return b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"


class NullConnection(asyncio.Protocol):
    """One connection; requests on it are answered one after the other."""

    def __init__(self, server: NullService) -> None:
        self._server = server
        self._parts: list[bytes] = []
        self._missing = 0
        """Bytes of a body that are still to come."""
        self.answer: _Answer | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.answer = None

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        if self._missing:
            self._missing -= len(data)
            if self._missing > 0:
                return
            self._missing = 0
        if self.answer is None:
            self._next()

    def answered(self) -> None:
        """The answer is written; go on with a request that came meanwhile."""
        self.answer = None
        if self._parts:
            self._next()

    def _next(self) -> None:
        data = b"".join(self._parts)
        while self.answer is None and not self.transport.is_closing():
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                break
            head = data[:end]
            length = _LENGTH.search(head)
            size = int(length[1]) if length else 0
            if len(data) - end < size:
                self._missing = size - (len(data) - end)
                break
            body, data = data[end : end + size], data[end + size :]
            self._request(head, body)
        self._parts = [data] if data else []

    def _request(self, head: bytes, body: bytes) -> None:
        method, path, *_ = head.split(b" ", 2)
        if b"\r\ntransfer-encoding:" in head.lower():
            self.transport.write(b"HTTP/1.1 411 Length Required\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.transport.close()
        elif b"\r\nexpect: 100-continue" in head.lower():
            self.transport.write(b"HTTP/1.1 417 Expectation Failed\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.transport.close()
        elif method == b"GET":
            self.transport.write(self._server.get(path))
        elif path == b"/tokenize":
            self.transport.write(_json({"tokens": _tokens(body)}))
        else:
            self._server.start(self, head, body)


def _frame(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def _json(value: object) -> bytes:
    body = msgspec.json.encode(value)
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def _max_tokens(body: bytes) -> int:
    """The asked length of the answer, without parsing a megabyte of prompt."""
    for name in (b'"max_tokens"', b'"max_completion_tokens"'):
        at = body.rfind(name)
        found = _COUNT.match(body, at + len(name)) if at >= 0 else None
        if found:
            return max(1, int(found[1]))
    return _DEFAULT_TOKENS


def _tokens(body: bytes) -> list[int]:
    """A token for each word, and one for each message's role."""
    request = msgspec.json.decode(body)
    words = [word for item in request.get("messages", ()) for word in (item["role"], *item["content"].split())]
    words += request.get("prompt", "").split()
    return [_hash_of(word) for word in words]


def _hash_of(word: str) -> int:
    """A token id for a word: the same in every process, and different for different short words."""
    return int.from_bytes(word.encode()[:6].rjust(6, b"\0"), "big") + (len(word) << 48)
