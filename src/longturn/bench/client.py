"""A light streaming client for OpenAI's chat and completions APIs: one asyncio process, with the server's own counts.

Answers are read by `http_stream` and `event_stream`, without a task's wake-up for each event and with the fields alone
that are needed; it never tokenises, since a client that does becomes the bottleneck at long prompts and measures
itself.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
import msgspec

from longturn.bench.event_stream import EventStream, error_text
from longturn.bench.http_connection import HttpError
from longturn.bench.http_stream import AddressError, HttpStream, NoConnectionError
from longturn.bench.records import Answer
from longturn.bench.target import TargetModel, target_model
from longturn.errors import LongturnError

Kind = TypeVar("Kind")


class TargetError(LongturnError):
    """The server under test cannot be reached, or does not speak the API."""

    exit_code = 5


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
        self._timeout_s = timeout_s
        try:
            self._streams = HttpStream(self.url, headers=self._headers | {"Content-Type": "application/json"})
        except AddressError as error:
            raise TargetError(f"'{url}' is not an http:// or https:// address") from error
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ChatClient:
        self._session = aiohttp.ClientSession(
            headers=self._headers, timeout=aiohttp.ClientTimeout(total=self._timeout_s)
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._streams.close()
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
        return {name: model.context_tokens for name, model in (await self.served_models()).items()}

    async def served_models(self) -> dict[str, TargetModel]:
        """What the server's list tells of each model that it offers.

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
            raise TargetError(f"{self.url}/v1/models answered {response.status}: {error_text(body)}")
        try:
            return {(model := target_model(item)).name: model for item in msgspec.json.decode(body)["data"]}
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
        on_reasoning: Callable[[str], None] | None = None,
        path: str = "/v1/chat/completions",
    ) -> Answer:
        """Send one request and read its stream to the end.

        Args:
            body: the request without `stream` and `stream_options`, which are set here.
            intended_ns: when the schedule wanted it sent (`time.perf_counter_ns`); now if None.
            session_id: sent as `X-Session-ID`.
            on_text: called with each piece of text as it arrives.
            on_reasoning: called with each piece of a reasoning model's thoughts, which come before the text.
            path: `/v1/completions` for a completion.

        Returns:
            The answer. What goes wrong with this request is in `error`; nothing is raised but a cancellation.
        """
        asked = body.get("stream_options") or {}
        options = {"stream": True, "stream_options": {**asked, "include_usage": True}}
        payload = msgspec.json.encode({**body, **options})
        headers = {"X-Session-ID": session_id} if session_id else {}
        intended = time.perf_counter_ns() if intended_ns is None else intended_ns
        stream = EventStream(on_text, on_reasoning)
        for attempt in (0, 1):
            sent = time.perf_counter_ns()
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._streams.post(path, payload, headers, stream)
            except TimeoutError:
                stream.error = stream.error or "timed out"
            except OSError as error:
                # A server closes an idle keep-alive connection whenever it likes, also while we write to it. Before the
                # first byte the request can be sent again; after it the output would be counted twice.
                if attempt == 0 and stream.first_byte_ns is None:
                    continue
                what = "no connection" if isinstance(error, NoConnectionError) else "connection lost"
                stream.error = stream.error or f"{what}: {_reason(error)}"
            except HttpError as error:
                stream.error = stream.error or str(error)
            break
        return stream.answer(intended, sent, time.perf_counter_ns())

    async def get(self, path: str, *, timeout_s: float = 15.0) -> bytes:
        """The body of a GET.

        Raises:
            TargetError: unreachable, too slow, or refused.
        """
        try:
            async with self._http.get(f"{self.url}{path}", timeout=aiohttp.ClientTimeout(total=timeout_s)) as response:
                body = await response.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise TargetError(f"no answer from {self.url}{path}: {_reason(error)}") from error
        if response.status != 200:
            raise TargetError(f"{self.url}{path} answered {response.status}: {error_text(body)}")
        return body

    async def get_json(self, path: str, kind: type[Kind]) -> Kind:
        """What a GET brings, checked against a type that msgspec knows.

        Raises:
            TargetError: unreachable, refused, or something else came back.
        """
        try:
            return msgspec.json.decode(await self.get(path), type=kind)
        except msgspec.DecodeError as error:
            raise TargetError(f"{self.url}{path} sent something else: {error}") from error


def _reason(error: BaseException) -> str:
    """One line for a transport error; aiohttp leaves some of them without a message, and asyncio replaces the system's
    words with the address, which the reader knows already."""
    if isinstance(error, TimeoutError):
        return "timed out"
    cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
    if isinstance(error, NoConnectionError) and error.__cause__ is not None:
        cause = error.__cause__
    # Where a name has several addresses, all errors are in one text.
    if isinstance(cause, ConnectionRefusedError) or f"[Errno {errno.ECONNREFUSED}]" in str(cause):
        return "connection refused"
    if isinstance(cause, socket.gaierror | ssl.SSLError):  # with numbers of their own
        return str(cause.strerror or cause).lower()
    if isinstance(cause, OSError) and cause.errno:
        return os.strerror(cause.errno).lower()
    return " ".join(str(error).split()) or type(error).__name__
