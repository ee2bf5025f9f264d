"""A real uvicorn on a free loopback port, in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import openai
import uvicorn

from longturn.config import EngineConfig, ServerConfig
from longturn.server.app import create_app
from longturn.server.ports import ServedModel
from longturn.server.run import bind, url_of
from tests.server.byte_service import CONTEXT, ByteService


@dataclasses.dataclass
class Served:
    url: str
    service: ByteService
    engine: Any

    def __post_init__(self) -> None:
        self.sdk = self.client()

    def client(self, **options: Any) -> openai.AsyncOpenAI:
        values = {"base_url": f"{self.url}/v1", "api_key": "key", "max_retries": 0, **options}
        return openai.AsyncOpenAI(**values)

    def http(self, **options: Any) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=20, **options)

    async def chat(self, content: Any = "hello", **options: Any) -> Any:
        messages = [{"role": "user", "content": content}]
        return await self.sdk.chat.completions.create(**{"model": "mock", "messages": messages, **options})


@contextlib.asynccontextmanager
async def serving(
    engine: Any, config: EngineConfig | None = None, cached_tokens: int = 0, service: Any = None
) -> AsyncIterator[Served]:
    config = config or EngineConfig()
    service = service or ByteService(engine, cached_tokens)
    app = create_app(service, config, engine=engine, model=ServedModel("mock", CONTEXT, 1, "/models/mock"))
    sock = bind(ServerConfig(port=0))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=1))
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign]
    task = asyncio.create_task(server.serve(sockets=[sock]))
    while not server.started:
        await asyncio.sleep(0.005)
    served = Served(url_of(sock), service, engine)
    try:
        yield served
    finally:
        await served.sdk.close()
        server.should_exit = True
        await task
        sock.close()


Start = Callable[..., Any]
