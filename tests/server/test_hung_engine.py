"""vllm-project/vllm#41530, #46611, #51921: an engine that is alive and silent. It is noticed, its requests end with an
error and do not wait for ever, /health says why, and it is started again."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import httpx
import pytest

from longturn.config import CacheConfig, EngineConfig, SchedulerConfig, ServerConfig
from longturn.engine.clock import SystemClock
from longturn.engine.loop import Engine
from longturn.engine.records import SamplingParams
from longturn.errors import EngineDeadError
from longturn.frontend.inprocess_engine import InProcessEngine
from longturn.frontend.remote_engine import RemoteEngine
from longturn.server.app import create_app
from longturn.server.ports import ServedModel
from tests.server.byte_service import ByteService, engine_request
from tests.server.hanging_engine import HangingExecutor
from tests.server.test_engine_clients import read, until

SILENCE_S = 4.0
CONFIG = EngineConfig(server=ServerConfig(engine_silence_s=SILENCE_S))


async def test_the_engines_process_is_ended_and_started_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "longturn")
    engine = RemoteEngine(CONFIG, factory="tests.server.hanging_engine:build")
    app = create_app(ByteService(engine), CONFIG, engine=engine, model=ServedModel("mock", 2000))
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
    await engine.start()
    try:
        assert await read(engine, "before", "hello") != ""
        await asyncio.sleep(SILENCE_S + 0.5)
        assert (await http.get("/health")).status_code == 200, "one that has nothing to do does not hang"
        hanging = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x @hang", "max_tokens": 5}))
        other = asyncio.create_task(http.post("/v1/completions", json={"prompt": "y", "max_tokens": 1500}))
        await until(lambda: not engine.alive, SILENCE_S + 5)
        health = await http.get("/health")
        assert health.status_code == 503 and f"said nothing for {SILENCE_S:g} s" in health.text
        for reply in await asyncio.gather(hanging, other):
            assert reply.status_code == 503 and "the engine hangs" in reply.json()["error"]["message"]
        await until(lambda: engine.alive, 20)
        assert engine.restarts == 1 and (await http.get("/health")).status_code == 200
        assert await read(engine, "after", "hello") != ""
        assert "hanging_engine.py" in caplog.text, "where its threads stood is in the log"
    finally:
        await http.aclose()
        await engine.close()


async def test_silence_can_be_allowed() -> None:
    config = replace(CONFIG, server=ServerConfig(engine_silence_s=0))
    engine = RemoteEngine(config, factory="tests.server.hanging_engine:build")
    await engine.start()
    try:
        waiting = asyncio.create_task(read(engine, "r", "@hang"))
        await asyncio.sleep(SILENCE_S + 0.5)
        assert not waiting.done() and engine.alive
        waiting.cancel()
    finally:
        await engine.close()


async def test_an_engine_in_this_process() -> None:
    executor = HangingExecutor()
    engine = InProcessEngine(Engine(executor, SchedulerConfig(), CacheConfig(), SystemClock()), silence_s=1.5)
    try:
        await asyncio.sleep(2)
        assert engine.alive, "one that has nothing to do looks for commands every second"
        with pytest.raises(EngineDeadError, match="the engine hangs"):
            await read(engine, "r", "@hang", 1000)
        assert not engine.alive and "did nothing for 1.5 s" in engine.health()
        with pytest.raises(EngineDeadError):
            await anext(engine.generate(engine_request("s", "x", SamplingParams(max_tokens=1))))
        executor.goes_on.set()
        await until(lambda: engine.alive and engine.stats().running == 0)
        assert await read(engine, "t", "hello") != ""
        assert engine.stats().aborts == 1, "nobody reads what it would have gone on with"
    finally:
        await asyncio.to_thread(engine.close)
