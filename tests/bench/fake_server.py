"""A small OpenAI server with scripted delays and counts, which records what it was sent.

One word is one token. It keeps a prefix cache in whole pages of `PAGE` tokens, apart by `cache_salt`, so that counts
can be checked by hand.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

PAGE = 8


@dataclass
class FakeServer:
    prefill_s_per_token: float = 0.0
    token_s: float = 0.0
    bundle: int = 1
    """Output tokens in one event."""
    caching: bool = True
    report_cached: bool = True
    send_token_ids: bool = True
    fail_turns: dict[int, str] = field(default_factory=dict)
    """Request number -> "500", "overflow", "reset" (before the first byte), "cut" (mid-stream) or "error-event"."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    seen: dict[str, set[tuple[int, ...]]] = field(default_factory=dict)
    aborted: int = 0
    alive: int = 0
    most_alive: int = 0
    max_model_len: int | None = None
    device: str | None = None
    """What it tells of it, as Longturn does."""
    vocabulary: dict[str, int] = field(default_factory=dict)

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._chat)
        app.router.add_post("/tokenize", self._tokenize)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def _models(self, request: web.Request) -> web.Response:
        model: dict[str, Any] = {"id": "fake-1", "object": "model"}
        if self.max_model_len is not None:
            model["max_model_len"] = self.max_model_len
        if self.device is not None:
            model["longturn"] = {"device": self.device}
        return web.json_response({"object": "list", "data": [model]})

    def tokens(self, body: dict[str, Any]) -> list[int]:
        """Token ids of a prompt; a chat message has one for its role and one for each word."""
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            return prompt
        if isinstance(prompt, str):
            words = prompt.split()
        else:
            words = [word for message in body["messages"] for word in (message["role"], *message["content"].split())]
        return [self.vocabulary.setdefault(word, len(self.vocabulary)) for word in words]

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": self.tokens(json.loads(await request.read()))})

    def _count(self, body: dict[str, Any]) -> tuple[int, int]:
        """(prompt tokens, cached tokens); remembers the prompt's pages."""
        words = tuple(self.tokens(body))
        seen = self.seen.setdefault(body.get("cache_salt", ""), set())
        pages = [words[: end + PAGE] for end in range(0, len(words) - PAGE, PAGE)]
        hits = 0
        while self.caching and hits < len(pages) and pages[hits] in seen:
            hits += 1
        seen.update(pages)
        return len(words), hits * PAGE

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        number = len(self.requests)
        body = json.loads(await request.read())
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        failure = self.fail_turns.get(number)
        if failure == "500":
            return web.json_response({"error": {"message": "scripted\nfailure"}}, status=500)
        if failure == "overflow":
            return web.json_response({"error": {"message": "the context holds fewer tokens"}}, status=400)
        if failure == "reset":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        self.alive += 1
        self.most_alive = max(self.most_alive, self.alive)
        try:
            return await self._answer(request, body, failure)
        except (asyncio.CancelledError, ConnectionResetError):
            self.aborted += 1
            raise
        finally:
            self.alive -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any], failure: str | None) -> web.StreamResponse:
        prompt, cached = self._count(body)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await asyncio.sleep(self.prefill_s_per_token * (prompt - cached))
        await self._event(response, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        written = 0
        while written < body["max_tokens"]:
            count = min(self.bundle, body["max_tokens"] - written)
            await asyncio.sleep(self.token_s * count)
            text = "w " * count
            choice: dict[str, Any] = {
                "index": 0,
                **({"text": text} if "prompt" in body else {"delta": {"content": text}}),
            }
            if self.send_token_ids and body.get("return_token_ids"):
                choice["token_ids"] = list(range(count))
            await self._event(response, {"choices": [choice]})
            written += count
            if failure == "cut":
                assert request.transport is not None
                request.transport.abort()
                return response
            if failure == "error-event":
                await self._event(response, {"error": {"message": "engine died", "code": 503}})
                return response
        await self._event(response, {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": written}
        if self.report_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        await self._event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response

    @staticmethod
    async def _event(response: web.StreamResponse, event: dict[str, Any]) -> None:
        # Cut in two writes, since a client must not rely on whole events.
        data = f"data: {json.dumps(event)}\n\n".encode()
        await response.write(data[:11])
        await response.write(data[11:])


@contextmanager
def running(fake: FakeServer) -> Iterator[str]:
    """Run it on a thread of its own; yields its URL."""
    ready = threading.Event()
    url: list[str] = []
    loop = asyncio.new_event_loop()

    async def start() -> web.AppRunner:
        runner = web.AppRunner(fake.app(), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        url.append(f"http://127.0.0.1:{port}")
        return runner

    def serve() -> None:
        asyncio.set_event_loop(loop)
        runner = loop.run_until_complete(start())
        ready.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield url[0]
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
