"""A server for each test that asks for one."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from longturn.frontend.inprocess_engine import InProcessEngine
from tests.server.engine_mock import MockEngine
from tests.server.served import Served, Start, serving


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Start a server over a mock engine on a thread: `await start(step_s=..., config=..., cached_tokens=...)`."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(step_s: float = 0.001, **options: Any) -> Served:
            engine = InProcessEngine(MockEngine(step_s))
            stack.callback(engine.close)
            return await stack.enter_async_context(serving(engine, **options))

        yield make
