"""A light streaming client for OpenAI's chat and completions APIs: one asyncio process, with the server's own counts.

It parses server-sent events as bytes and decodes only the fields it needs; it never tokenises, since a client that does
becomes the bottleneck at long prompts and measures itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import aiohttp
import msgspec

from longturn.bench.records import Answer, Chunk
from longturn.errors import LongturnError


class TargetError(LongturnError):
    """The server under test cannot be reached, or does not speak the API."""

    exit_code = 5


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    text: str | None = None
    """Of a completion, which has no delta."""
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: Any = None


_decode_event = msgspec.json.Decoder(_Event).decode


class ChatClient:
    """Streams chat completions, or plain ones, from one server. Use as an async context manager."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        """
        Args:
            url: the server's base, with or without `/v1`: `http://127.0.0.1:8000`.
            api_key: sent as a bearer token.
            timeout_s: longest time for one whole answer.
        """
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise TargetError(f"'{url}' is not an http:// or https:// address")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ChatClient:
        self._session = aiohttp.ClientSession(
            headers=self._headers, timeout=self._timeout, connector=aiohttp.TCPConnector(limit=0)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def _http(self) -> aiohttp.ClientSession:
        assert self._session is not None, "use ChatClient in an `async with`"
        return self._session

    async def models(self) -> list[str]:
        """Ids of the models that the server offers.

        Raises:
            TargetError: unreachable, refused, or no model list came back.
        """
        return list(await self.context_limits())

    async def context_limits(self) -> dict[str, int | None]:
        """For each model that the server offers its longest context in tokens, where the list tells (`max_model_len`).

        Raises:
            TargetError: as `models`.
        """
        try:
            async with self._http.get(f"{self.url}/v1/models", timeout=aiohttp.ClientTimeout(total=15)) as response:
                body = await response.read()
        except (aiohttp.InvalidURL, ValueError) as error:
            raise TargetError(f"'{self.url}' is not an http:// or https:// address") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TargetError(f"no answer from {self.url}: {_reason(error)}") from error
        if response.status != 200:
            raise TargetError(f"{self.url}/v1/models answered {response.status}: {_error_text(body)}")
        try:
            found = {str(item["id"]): item.get("max_model_len") for item in msgspec.json.decode(body)["data"]}
            return {name: limit if isinstance(limit, int) else None for name, limit in found.items()}
        except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
            raise TargetError(f"{self.url}/v1/models sent no OpenAI model list") from error

    async def choose_model(self, name: str | None) -> str:
        """`name` if the server offers it, its first model if `name` is None.

        Raises:
            TargetError: the server has no such model.
        """
        offered = await self.models()
        if name is None:
            if not offered:
                raise TargetError(f"{self.url} offers no model")
            return offered[0]
        if name not in offered:
            raise TargetError(f"{self.url} has no model '{name}' (it has: {', '.join(offered)})")
        return name

    async def send(
        self,
        body: Mapping[str, Any],
        *,
        intended_ns: int | None = None,
        session_id: str | None = None,
        on_text: Callable[[str], None] | None = None,
        path: str = "/v1/chat/completions",
    ) -> Answer:
        """Send one request and read its stream to the end.

        Args:
            body: the request without `stream` and `stream_options`, which are set here.
            intended_ns: when the schedule wanted it sent (`time.perf_counter_ns`); now if None.
            session_id: sent as `X-Session-ID`.
            on_text: called with each piece of text as it arrives.
            path: `/v1/completions` for a completion.

        Returns:
            The answer. What goes wrong with this request is in `error`; nothing is raised but a cancellation.
        """
        payload = msgspec.json.encode({**body, "stream": True, "stream_options": {"include_usage": True}})
        headers = {"Content-Type": "application/json", **({"X-Session-ID": session_id} if session_id else {})}
        intended = time.perf_counter_ns() if intended_ns is None else intended_ns
        stream = _Stream(on_text)
        for attempt in (0, 1):
            sent = time.perf_counter_ns()
            try:
                async with self._http.post(f"{self.url}{path}", data=payload, headers=headers) as response:
                    stream.first_byte_ns = time.perf_counter_ns()
                    if response.status != 200:
                        stream.error = f"HTTP {response.status}: {_error_text(await response.read())}"
                    else:
                        async for data in response.content.iter_any():
                            stream.feed(data)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                # A server closes an idle keep-alive connection whenever it likes, also while we write to it. Before the
                # first byte the request can be sent again; after it the output would be counted twice.
                if attempt == 0 and stream.first_byte_ns is None:
                    continue
                stream.error = stream.error or f"connection lost: {_reason(error)}"
            except (aiohttp.ClientError, TimeoutError) as error:
                stream.error = stream.error or _reason(error)
            break
        return stream.answer(intended, sent, time.perf_counter_ns())


class _Stream:
    """Collects one event stream."""

    def __init__(self, on_text: Callable[[str], None] | None) -> None:
        self.first_byte_ns: int | None = None
        self.error: str | None = None
        self._on_text = on_text
        self._rest = b""
        self._chunks: list[Chunk] = []
        self._text: list[str] = []
        self._usage: _Usage | None = None
        self._finish: str | None = None
        self._end_ns: int | None = None

    def feed(self, data: bytes) -> None:
        """Take bytes as they came from the socket; an event may be cut anywhere."""
        now = time.perf_counter_ns()
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: int) -> None:
        if data == b"[DONE]":
            self._end_ns = now
            return
        try:
            event = _decode_event(data)
        except msgspec.DecodeError as error:
            self.error = self.error or f"unreadable event: {error}"
            return
        if event.error is not None:
            self.error = self.error or _error_text(data)
        if event.usage is not None:
            self._usage = event.usage
        for choice in event.choices:
            delta = choice.delta or _Delta()
            text = delta.content or choice.text
            if text or delta.reasoning_content or delta.reasoning or delta.tool_calls or choice.token_ids:
                self._chunks.append(Chunk(now, None if choice.token_ids is None else len(choice.token_ids)))
            if text:
                self._text.append(text)
                if self._on_text is not None:
                    self._on_text(text)
            self._finish = choice.finish_reason or self._finish

    def answer(self, intended_ns: int, sent_ns: int, now_ns: int) -> Answer:
        usage = self._usage or _Usage()
        details = usage.prompt_tokens_details or _PromptDetails()
        error = self.error
        if error is None and self._end_ns is None and self._finish is None:
            error = "the stream ended before the answer was complete"
        return Answer(
            intended_ns=intended_ns,
            sent_ns=sent_ns,
            end_ns=now_ns if self._end_ns is None else self._end_ns,
            first_byte_ns=self.first_byte_ns,
            chunks=tuple(self._chunks),
            text="".join(self._text),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=details.cached_tokens,
            output_tokens=usage.completion_tokens,
            finish=self._finish,
            error=error,
        )


def _reason(error: BaseException) -> str:
    """One line for a transport error; aiohttp leaves some of them without a message."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, aiohttp.ClientConnectorError):
        # asyncio replaces the system's words with the address, which the reader knows already.
        cause = error.os_error
        refused = isinstance(cause, ConnectionRefusedError)
        return "connection refused" if refused else str(cause.strerror or cause).lower()
    return " ".join(str(error).split()) or type(error).__name__


def _error_text(body: bytes) -> str:
    """The message of an OpenAI error body, or the start of whatever came instead."""
    try:
        error = msgspec.json.decode(body)["error"]
        return " ".join(str(error["message"] if isinstance(error, dict) else error).split())
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return " ".join(body[:200].decode(errors="replace").split()) or "no text"
