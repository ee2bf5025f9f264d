"""Both engine clients: the same contract over a thread and over a process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from longturn.config import EngineConfig, ModelConfig, ServerConfig
from longturn.engine.records import FinishReason, RequestOutput, SamplingParams, TokenLogprobs
from longturn.errors import EngineDeadError, LongturnError, RequestError
from longturn.frontend.inprocess_engine import InProcessEngine
from longturn.frontend.output_stream import OutputStream, merge_outputs
from longturn.frontend.remote_engine import RemoteEngine
from tests.server.byte_service import engine_request, text
from tests.server.engine_mock import INFO, MockEngine, text_of

CONFIG = EngineConfig(model=ModelConfig(path="0.002"), server=ServerConfig(api_keys=("secret",)))


@contextlib.asynccontextmanager
async def remote(factory: str = "tests.server.engine_mock:build", **options: Any) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine(CONFIG, factory=factory, **options)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


@contextlib.asynccontextmanager
async def in_process() -> AsyncIterator[InProcessEngine]:
    mock = MockEngine(0.002)
    engine = InProcessEngine(mock)
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.close)
        assert mock.closed


BOTH = pytest.mark.parametrize("make", [in_process, remote])


async def read(engine: Any, name: str, prompt: str, tokens: int = 5) -> str:
    ids: list[int] = []
    async for output in engine.generate(engine_request(name, prompt, SamplingParams(max_tokens=tokens))):
        ids += output.token_ids
    return text(ids)


async def until(condition: Any, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.005)


@BOTH
async def test_requests_at_once_get_their_own_tokens(make: Any) -> None:
    async with make() as engine:
        prompts = [f"prompt {n}" for n in range(20)]
        answers = await asyncio.gather(*(read(engine, p, p, 5 + n) for n, p in enumerate(prompts)))
        assert answers == [text_of(p, 5 + n) for n, p in enumerate(prompts)]
        await until(lambda: engine.stats().running == 0)
        assert engine.stats().generated_tokens == sum(5 + n for n in range(20))


@BOTH
async def test_closing_the_iterator_aborts(make: Any) -> None:
    async with make() as engine:
        outputs = engine.generate(engine_request("long", "hello", SamplingParams(max_tokens=1_000_000)))
        await anext(outputs)
        assert engine.stats().running == 1
        await outputs.aclose()
        await until(lambda: engine.stats().running == 0, 1.0)
        assert engine.stats().aborts == 1
        assert await read(engine, "long", "again") == text_of("again", 5), "the id can be used again"


@BOTH
async def test_cancelling_the_reader_aborts(make: Any) -> None:
    async with make() as engine:
        task = asyncio.create_task(read(engine, "long", "hello", 1_000_000))
        await until(lambda: engine.stats().running == 1)
        task.cancel()
        await until(lambda: engine.stats().aborts == 1, 1.0)


@BOTH
async def test_readers_that_come_and_go_leave_nothing(make: Any) -> None:
    rng = random.Random(7)
    async with make() as engine:

        async def one(n: int) -> None:
            await asyncio.sleep(rng.random() * 0.3)
            name, tokens, patience = f"r{n}", rng.randrange(1, 40), rng.random() * 0.1
            task = asyncio.create_task(read(engine, name, name, tokens))
            done, _ = await asyncio.wait({task}, timeout=patience)
            if done:
                assert task.result() == text_of(name, tokens)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        await asyncio.gather(*(one(n) for n in range(150)))
        await until(lambda: engine.stats().running == 0, 2.0)
        assert 0 < engine.stats().aborts < 150
        assert engine._streams == {}


@BOTH
async def test_a_refusal_keeps_its_status(make: Any) -> None:
    async with make() as engine:
        with pytest.raises(RequestError, match="too many requests wait") as caught:
            await read(engine, "a", "@refuse")
        assert (caught.value.http_status, caught.value.code) == (429, "too_many_requests")
        with pytest.raises(RequestError, match="internal error") as caught:
            await read(engine, "b", "@bug")
        assert caught.value.http_status == 500
        assert await read(engine, "c", "fine") == text_of("fine", 5)


@BOTH
async def test_an_id_in_use_is_refused(make: Any) -> None:
    async with make() as engine:
        outputs = engine.generate(engine_request("same", "hello", SamplingParams(max_tokens=1_000_000)))
        await anext(outputs)
        with pytest.raises(RequestError, match="in use"):
            await read(engine, "same", "other")
        await anext(outputs)
        await outputs.aclose()


async def test_a_thread_that_dies_fails_its_requests() -> None:
    async with in_process() as engine:
        other = asyncio.create_task(read(engine, "other", "hello", 1_000_000))
        with pytest.raises(EngineDeadError, match="the executor failed twice"):
            await read(engine, "bad", "@raise")
        with pytest.raises(EngineDeadError):
            await other
        assert not engine.alive and "failed twice" in engine.health()
        with pytest.raises(EngineDeadError):
            await read(engine, "late", "hello")


def test_an_engine_in_process_serves_one_loop_after_another() -> None:
    engine = InProcessEngine(MockEngine())
    assert asyncio.run(read(engine, "a", "one")) == text_of("one", 5)
    assert asyncio.run(read(engine, "a", "two")) == text_of("two", 5)
    engine.close()


async def test_a_killed_process_is_restarted_once(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 1000.0
    async with remote(monotonic_s=lambda: now_s) as engine:
        assert engine.info == INFO
        first = engine.pid
        other = asyncio.create_task(read(engine, "other", "hello", 1_000_000))
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await read(engine, "bad", "@kill", 10)
        with pytest.raises(EngineDeadError):
            await other
        assert not engine.alive and "restarted" in engine.health()
        with pytest.raises(EngineDeadError, match="being restarted"):
            await read(engine, "early", "hello")
        await until(lambda: engine.alive, 20)
        assert engine.pid != first and engine.restarts == 1
        assert await read(engine, "fine", "fine") == text_of("fine", 5)
        assert "killed by SIGKILL" in caplog.text and "a library prints" in caplog.text

        # Within ten minutes of the first death: it stays dead. The exception's last line is in the cause.
        now_s += 599
        with pytest.raises(EngineDeadError, match=r"exit code 1.*the executor failed twice"):
            await read(engine, "bad", "@raise", 10)
        await asyncio.sleep(0.1)
        assert not engine.alive and "twice within ten minutes" in engine.health()
        assert engine.restarts == 1 and engine.pid is None


async def test_deaths_far_apart_are_both_healed() -> None:
    now_s = 0.0
    async with remote(monotonic_s=lambda: now_s) as engine:
        for restarts in (1, 2):
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            await until(lambda n=restarts: engine.alive and engine.restarts == n, 20)
            now_s += 601


async def test_a_model_that_cannot_be_built_is_one_line_with_its_exit_code() -> None:
    with pytest.raises(LongturnError) as caught:
        async with remote("tests.server.engine_mock:build_no_model"):
            pass
    assert str(caught.value) == "there is no model at /nowhere" and caught.value.exit_code == 3


async def test_a_process_that_ends_while_starting_says_how() -> None:
    with pytest.raises(EngineDeadError, match=r"exit code 7 \(the last words\)"):
        async with remote("tests.server.engine_mock:build_exits"):
            pass


async def test_a_slow_start_can_be_given_up() -> None:
    engine = RemoteEngine(CONFIG, factory="tests.server.engine_mock:build_slowly")
    starting = asyncio.create_task(engine.start())
    await until(lambda: engine.pid is not None)
    pid = engine.pid
    assert pid is not None
    starting.cancel()
    begin = time.monotonic()
    await asyncio.gather(starting, return_exceptions=True)
    assert time.monotonic() - begin < 4
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_engine_ends_with_its_parent(tmp_path: Path) -> None:
    script = textwrap.dedent(
        """
        import asyncio
        from longturn.config import EngineConfig
        from longturn.frontend.remote_engine import RemoteEngine

        async def main():
            engine = RemoteEngine(EngineConfig(), factory="tests.server.engine_mock:build")
            await engine.start()
            print(engine.pid, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())
        """
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "TMPDIR": str(tmp_path)}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    os.kill(pid, 0)
    parent.kill()
    parent.wait()
    end = time.monotonic() + 5
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            break
        # An ended process that nobody has waited for still has its id.
        if " Z " in Path(f"/proc/{pid}/stat").read_text():
            break
        time.sleep(0.02)
    else:
        pytest.fail("the engine process outlived its parent")
    assert list(tmp_path.iterdir()) == [], "the socket's directory is left"


async def test_outputs_for_a_busy_reader_are_merged() -> None:
    stream = OutputStream()
    entry = TokenLogprobs(-1.0)
    stream.push(RequestOutput("a", (1, 2), (entry, entry), cached_tokens=128))
    stream.push(RequestOutput("a", (3,), (entry,), FinishReason.STOP, stop_token_id=9))
    assert await stream.next() == RequestOutput(
        "a", (1, 2, 3), (entry,) * 3, FinishReason.STOP, stop_token_id=9, cached_tokens=128
    )
    stream.push(RequestOutput("a", (4,)))
    stream.fail(EngineDeadError("gone"))
    assert (await stream.next()).token_ids == (4,), "what arrived before the failure is not lost"
    with pytest.raises(EngineDeadError):
        await stream.next()


def test_merging_keeps_every_token() -> None:
    parts = [RequestOutput("a", (n,)) for n in range(5)]
    merged = parts[0]
    for part in parts[1:]:
        merged = merge_outputs(merged, part)
    assert merged.token_ids == (0, 1, 2, 3, 4)
