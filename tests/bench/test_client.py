from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import pytest

from longturn.bench.client import ChatClient, TargetError
from longturn.bench.metrics import itl_s, ttft_s
from longturn.bench.records import Answer
from tests.bench.fake_server import FakeServer, running

BODY: dict[str, Any] = {"model": "fake-1", "messages": [{"role": "user", "content": "a b c"}], "max_tokens": 5}


async def ask(url: str, body: dict[str, Any] = BODY, **more: Any) -> Answer:
    async with ChatClient(url) as client:
        return await client.send(body, **more)


async def test_an_answer_has_times_text_and_the_servers_counts() -> None:
    with running(FakeServer(token_s=0.01)) as url:
        pieces: list[str] = []
        answer = await ask(url, on_text=pieces.append)
    assert answer.error is None
    assert answer.text == "w w w w w " == "".join(pieces)
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (4, 0, 5)
    assert answer.finish == "length"
    assert len(answer.chunks) == 5  # the empty role event is no output
    times = [answer.intended_ns, answer.sent_ns, *(c.at_ns for c in answer.chunks), answer.end_ns]
    assert times == sorted(times)
    assert ttft_s(answer) is not None
    assert itl_s(answer) is not None


async def test_bundled_tokens_are_counted_from_token_ids() -> None:
    with running(FakeServer(bundle=2)) as url:
        answer = await ask(url, {**BODY, "return_token_ids": True})
        silent = await ask(url)
    assert [chunk.tokens for chunk in answer.chunks] == [2, 2, 1]
    assert [chunk.tokens for chunk in silent.chunks] == [None, None, None]


async def test_a_server_without_cache_counts_is_not_zero() -> None:
    with running(FakeServer(report_cached=False)) as url:
        assert (await ask(url)).cached_tokens is None


async def test_headers_and_intended_time() -> None:
    fake = FakeServer()
    with running(fake) as url:
        intended = time.perf_counter_ns() - 1_000_000
        async with ChatClient(f"{url}/v1/", api_key="k-1") as client:
            answer = await client.send(BODY, intended_ns=intended, session_id="s-1")
    assert fake.headers[0]["Authorization"] == "Bearer k-1"
    assert fake.headers[0]["X-Session-ID"] == "s-1"
    assert fake.requests[0]["stream_options"] == {"include_usage": True}
    assert answer.intended_ns == intended < answer.sent_ns


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("500", "HTTP 500: scripted failure"),
        ("cut", "connection lost|Response payload"),
        ("error-event", "engine died"),
    ],
)
async def test_failures_are_one_line_in_the_answer(failure: str, message: str) -> None:
    fake = FakeServer(fail_turns={0: failure})
    with running(fake) as url:
        answer = await ask(url)
    assert answer.error is not None
    assert re.search(message, answer.error)
    assert "\n" not in answer.error
    assert len(fake.requests) == 1, "after the first byte nothing is sent again"


async def test_a_reset_before_the_first_byte_is_sent_again_once() -> None:
    fake = FakeServer(fail_turns={0: "reset"})
    with running(fake) as url:
        answer = await ask(url)
    assert answer.error is None
    assert len(fake.requests) == 2
    fake = FakeServer(fail_turns={0: "reset", 1: "reset"})
    with running(fake) as url:
        answer = await ask(url)
    assert answer.error is not None
    assert len(fake.requests) == 2


async def test_a_kept_connection_that_the_server_has_closed_costs_no_answer() -> None:
    fake = FakeServer(fail_turns={1: "reset", 4: "cut"})
    with running(fake) as url:
        async with ChatClient(url) as client:
            answers = [await client.send(BODY) for _ in range(4)]
    assert [answer.ok for answer in answers] == [True, True, True, False]
    assert len(fake.requests) == 5, "sent again before the first byte, and not after it"


async def test_a_slow_answer_times_out() -> None:
    with running(FakeServer(token_s=5)) as url:
        async with ChatClient(url, timeout_s=0.2) as client:
            answer = await client.send(BODY)
    assert answer.error == "timed out"


async def test_cancelling_closes_the_connection() -> None:
    fake = FakeServer(token_s=0.05)
    with running(fake) as url:
        task = asyncio.create_task(ask(url, {**BODY, "max_tokens": 1000}))
        while not fake.alive:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(200):
            if fake.aborted:
                break
            await asyncio.sleep(0.01)
    assert fake.aborted == 1


async def test_choosing_a_model() -> None:
    with running(FakeServer()) as url:
        async with ChatClient(url) as client:
            assert await client.choose_model(None) == "fake-1"
            assert await client.choose_model("fake-1") == "fake-1"
            with pytest.raises(TargetError, match=r"no model 'other' .it has: fake-1"):
                await client.choose_model("other")


async def test_unreachable_servers_are_target_errors() -> None:
    with running(FakeServer()) as url:
        gone = url
    assert (await ask(gone)).error == "no connection: connection refused"
    assert (await ask(gone.replace("127.0.0.1", "localhost"))).error == "no connection: connection refused"
    assert (await ask("http://name.invalid")).error in (
        "no connection: name or service not known",
        "no connection: temporary failure in name resolution",
    )
    async with ChatClient(gone) as client:
        with pytest.raises(TargetError, match="no answer from"):
            await client.models()
    with pytest.raises(TargetError, match="not an http"):
        ChatClient("localhost:8000")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("ftp://h", "'ftp://h' is not an http:// or https:// address"),
        ("http://127.0.0.1:99999", "'http://127.0.0.1:99999' is not an http:// or https:// address"),
        ("http://[::1", "is not an http:// or https:// address"),
        ("http://127.0.0.1:1", "no answer from http://127.0.0.1:1: connection refused"),
    ],
)
async def test_addresses_that_cannot_be_asked(url: str, message: str) -> None:
    with pytest.raises(TargetError) as caught:
        async with ChatClient(url) as client:
            await client.models()
    assert message in str(caught.value)
