"""The OpenAI API through the official SDK, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from typing import Any

import openai
import pytest

from longturn.config import EngineConfig, ModelConfig
from longturn.frontend.remote_engine import RemoteEngine
from tests.server.engine_mock import text_of
from tests.server.served import Start, serving


async def until(condition: Any, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        await asyncio.sleep(0.005)


async def chunks_of(stream: Any) -> list[Any]:
    return [chunk async for chunk in stream]


async def test_a_plain_answer(start: Start) -> None:
    served = await start(cached_tokens=3)
    reply = await served.chat("hello", max_tokens=7, seed=0)
    choice = reply.choices[0]
    assert choice.message.content == text_of("hello", 7)
    assert (choice.message.role, choice.finish_reason, reply.model) == ("assistant", "length", "mock")
    usage = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (5, 7, 12)
    assert usage.prompt_tokens_details.cached_tokens == 3


async def test_tokens_of_the_cache_are_there_when_0(start: Start) -> None:
    served = await start()
    async with served.http() as http:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
        reply = (await http.post("/v1/chat/completions", json=body)).json()
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}


async def test_a_streamed_answer(start: Start) -> None:
    served = await start()
    stream = await served.chat("hello", max_tokens=9, seed=0, stream=True, stream_options={"include_usage": True})
    chunks = await chunks_of(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text_of("hello", 9)
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["length"]
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 9
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


async def test_the_bytes_of_a_stream(start: Start) -> None:
    served = await start()
    async with served.http() as http:
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "stream": True, "seed": 0}
        reply = await http.post("/v1/chat/completions", json=body)
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = reply.text.split("\n\n")
    assert events[-1] == "" and events[-2] == "data: [DONE]"
    assert all(event.startswith("data: {") for event in events[:-2])
    assert '"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]' in events[0]
    assert f'"delta":{{"content":"{text_of("x", 1)}"}},"logprobs":null,"finish_reason":null' in events[1]
    assert '"delta":{},"finish_reason":"length"' in events[2] and '"usage"' not in events[2]
    assert len(events) == 5


@pytest.mark.parametrize("as_list", [False, True])
async def test_stop_strings(start: Start, as_list: bool) -> None:
    served = await start()
    whole = text_of("hello", 40)
    stop = whole[5]
    reply = await served.chat("hello", max_tokens=40, seed=0, stop=[stop, "!!"] if as_list else stop)
    assert reply.choices[0].message.content == whole[: whole.index(stop)]
    assert reply.choices[0].finish_reason == "stop" and reply.choices[0].stop_reason == stop
    chunks = await chunks_of(await served.chat("hello", max_tokens=40, seed=0, stop=stop, stream=True))
    assert chunks[-1].choices[0].finish_reason == "stop" and chunks[-1].choices[0].stop_reason == stop


async def test_seeds(start: Start) -> None:
    served = await start()

    async def text(seed: int | None) -> str:
        options = {} if seed is None else {"seed": seed}
        return (await served.chat("hello", max_tokens=6, **options)).choices[0].message.content

    assert await text(3) == text_of("hello", 6, seed=3) == await text(3)
    assert await text(-1) == text_of("hello", 6, seed=2**63 - 1), "any 64-bit seed is taken"
    await text(None), await text(None)
    seeds = [request.sampling.seed for request in served.service.requests[-2:]]
    assert seeds[0] != seeds[1], "requests without a seed must not all sample alike"


async def test_several_choices(start: Start) -> None:
    served = await start()
    reply = await served.chat("hello", max_tokens=5, seed=4, n=3)
    assert [c.index for c in reply.choices] == [0, 1, 2]
    assert [c.message.content for c in reply.choices] == [text_of("hello", 5, seed) for seed in (4, 5, 6)]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (5, 15), "the prompt counts once"
    chunks = await chunks_of(await served.chat("hello", max_tokens=5, seed=4, n=2, stream=True))
    texts = ["", ""]
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [text_of("hello", 5, 4), text_of("hello", 5, 5)]


async def test_chat_logprobs(start: Start) -> None:
    served = await start()
    reply = await served.chat("hello", max_tokens=3, seed=0, logprobs=True, top_logprobs=2)
    content = reply.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == text_of("hello", 3)
    assert [(t.token, t.bytes, t.logprob) for t in content[0].top_logprobs] == [("A", [65], -1.0), ("B", [66], -2.0)]
    stream = await served.chat("hello", max_tokens=3, seed=0, logprobs=True, stream=True)
    entries = [e for c in await chunks_of(stream) if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert [e.logprob for e in entries] == [-0.5] * 3 and all(e.top_logprobs == [] for e in entries)


async def test_text_completions(start: Start) -> None:
    served = await start()
    async with served.client() as client:
        create = client.completions.create
        by_text = await create(model="mock", prompt="hello", max_tokens=6, seed=0, logprobs=1)
        assert by_text.choices[0].text == text_of("hello", 6)
        logprobs = by_text.choices[0].logprobs
        assert logprobs.text_offset == list(range(6)) and logprobs.token_logprobs == [-0.5] * 6
        assert logprobs.top_logprobs[0] == {"A": -1.0, text_of("hello", 1): -0.5}
        by_ids = await create(
            model="mock", prompt=list(b"hello"), seed=0, extra_body={"return_token_ids": True, "ignore_eos": True}
        )
        choice = by_ids.choices[0].model_dump()
        assert choice["text"] == text_of("hello", 16), "OpenAI's default is 16 tokens"
        assert choice["token_ids"] == list(choice["text"].encode()) and choice["prompt_token_ids"] == list(b"hello")
        assert served.service.requests[-1].ignore_eos
        many = await create(model="mock", prompt=["one", "three"], n=2, max_tokens=4, seed=0)
        expected = [text_of(p, 4, s) for p in ("one", "three") for s in (0, 1)]
        assert [c.text for c in many.choices] == expected
        assert many.usage.prompt_tokens == 8 and many.usage.completion_tokens == 16
        of_ids = await create(model="mock", prompt=[list(b"one"), list(b"three")], max_tokens=4, seed=0)
        assert [c.text for c in of_ids.choices] == [expected[0], expected[2]]
        chunks = await chunks_of(await create(model="mock", prompt="hello", max_tokens=6, seed=0, stream=True))
        assert "".join(c.choices[0].text for c in chunks) == text_of("hello", 6)
        assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_of_a_chat(start: Start, stream: bool) -> None:
    served = await start()
    reply = await served.chat("hi", max_tokens=4, seed=0, stream=stream, extra_body={"return_token_ids": True})
    parts = [chunk.model_dump() for chunk in (await chunks_of(reply) if stream else [reply])]
    assert [p["prompt_token_ids"] for p in parts if p.get("prompt_token_ids")] == [list(b"hi")]
    ids = [i for p in parts for i in p["choices"][0].get("token_ids") or ()]
    assert ids == list(text_of("hi", 4).encode())


async def test_every_extension_reaches_the_frontend(start: Start) -> None:
    served = await start()
    tool = {"type": "function", "function": {"name": "look"}}
    extra = {
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "stop_token_ids": [4],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "priority": 3,
        "cache_salt": "salt",
        "chat_template_kwargs": {"thinking": True},
        "add_generation_prompt": False,
        "an_unknown_field": 1,
    }
    await served.chat(
        [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        max_completion_tokens=4,
        temperature=0.5,
        top_p=0.9,
        frequency_penalty=0.3,
        presence_penalty=-0.2,
        logit_bias={"7": -100},
        user="someone",
        tools=[tool],
        tool_choice="auto",
        extra_body=extra,
        extra_headers={"X-Session-ID": "session-1"},
    )
    request = served.service.requests[0]
    sampling = request.sampling
    assert request.prompt.messages == ({"role": "user", "content": "a\nb"},)
    assert request.prompt.tools == (tool,)
    assert request.prompt.template_kwargs == {"thinking": True} and not request.prompt.add_generation_prompt
    assert (sampling.max_tokens, sampling.min_tokens, sampling.stop_token_ids) == (4, 2, (4,))
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.frequency_penalty, sampling.presence_penalty) == (0.3, -0.2)
    assert (sampling.repetition_penalty, sampling.logit_bias, sampling.logprobs) == (1.5, ((7, -100.0),), None)
    assert request.ignore_eos and request.include_stop_text and not request.skip_special_tokens
    assert (request.session_id, request.cache_salt, request.priority) == ("session-1", "salt", 3)
    await served.chat("a", top_p=0)  # in OpenAI's range, and asks for the likeliest token
    assert 0 < served.service.requests[1].sampling.top_p < 1e-5


async def test_sixteen_clients_at_once(start: Start) -> None:
    served = await start(step_s=0.002)

    async def one(n: int) -> str:
        chunks = await chunks_of(await served.chat(f"client {n}", max_tokens=30 + n, seed=0, stream=True))
        return "".join(c.choices[0].delta.content or "" for c in chunks)

    answers = await asyncio.gather(*(one(n) for n in range(16)))
    assert answers == [text_of(f"client {n}", 30 + n) for n in range(16)]


@pytest.mark.parametrize("choices", [1, 3])
async def test_a_stream_that_nobody_reads_is_aborted(start: Start, choices: int) -> None:
    served = await start(step_s=0.005)
    async with served.client() as client:
        messages: Any = [{"role": "user", "content": "hello"}]
        stream: Any = await client.chat.completions.create(
            model="mock", messages=messages, max_tokens=1_000_000, stream=True, n=choices
        )
        await anext(aiter(stream))
        await until(lambda: served.engine.stats().running == choices)
        await stream.close()
        await until(lambda: served.engine.stats().running == 0, 1.0)
    assert served.engine.stats().aborts == choices and len(served.service.closed) == choices


async def test_a_plain_request_whose_client_goes_away_is_aborted(start: Start) -> None:
    served = await start(step_s=0.005)
    task = asyncio.create_task(served.chat(max_tokens=1_000_000))
    await until(lambda: served.engine.stats().running == 1)
    task.cancel()
    await until(lambda: served.engine.stats().running == 0, 1.0)
    assert served.engine.stats().aborts == 1


async def test_errors_are_the_sdks_exceptions(start: Start) -> None:
    served = await start()
    with pytest.raises(openai.NotFoundError, match="serves 'mock'") as caught:
        await served.chat(model="gpt-9")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await served.chat("x" * 3000)
    assert (bad.value.code, bad.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError):
        await served.chat("x" * 3000, stream=True)
    with pytest.raises(openai.RateLimitError) as busy:
        await served.chat("@refuse", stream=True)
    assert busy.value.response.headers["retry-after"]
    with pytest.raises(openai.InternalServerError) as crash:
        await served.chat("@crash")
    assert "secret" not in str(crash.value) and crash.value.status_code == 500
    assert (await served.chat(max_tokens=2, seed=0)).choices[0].message.content == text_of("hello", 2)


async def test_a_wrong_key_is_refused(start: Start) -> None:
    config = EngineConfig(server=EngineConfig().server.__class__(api_keys=("right", "key")))
    served = await start(config=config)
    await served.chat(max_tokens=1)
    assert served.service.requests[0].tenant not in (None, "key")
    async with served.client(api_key="wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
    async with served.http() as http:
        assert [(await http.get(path)).status_code for path in ("/health", "/metrics", "/v1/models")] == [200, 200, 401]
        told = [
            (await http.get("/version", headers=headers)).json()["error"]["message"].partition(":")[0]
            for headers in ({}, {"x-api-key": "guess"}, {"authorization": "Bearer guess"})
        ]
        assert told == ["no API key", "incorrect API key", "incorrect API key"]


async def test_models(start: Start) -> None:
    served = await start()
    async with served.client() as client:
        assert [model.id for model in (await client.models.list()).data] == ["mock"]
        assert (await client.models.retrieve("mock")).model_dump()["max_model_len"] == 2000
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("org/other")


async def test_an_engine_that_dies_answers_503_and_comes_back() -> None:
    engine = RemoteEngine(EngineConfig(model=ModelConfig(path="0.005")), factory="tests.server.engine_mock:build")
    async with contextlib.aclosing(_Closing(engine)):
        await engine.start()
        async with serving(engine) as served, served.http() as http:
            plain = asyncio.create_task(served.chat(max_tokens=1_000_000))
            stream = await served.chat(max_tokens=1_000_000, stream=True)
            await anext(aiter(stream))
            await until(lambda: engine.stats().running == 2)
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            with pytest.raises(openai.InternalServerError, match="SIGKILL") as dead:
                await plain
            assert dead.value.status_code == 503 and dead.value.response.headers["retry-after"]
            with pytest.raises(openai.APIError, match="SIGKILL"):
                await chunks_of(stream)
            assert (await http.get("/health")).status_code == 503
            with pytest.raises(openai.InternalServerError, match="being restarted"):
                await served.chat()
            await until(lambda: engine.alive, 20)
            assert (await http.get("/health")).json() == {"status": "ok"}
            assert (await served.chat(max_tokens=3, seed=0)).choices[0].message.content == text_of("hello", 3)
            assert 'longturn_engine_restarts_total{model_name="mock"} 1.0' in (await http.get("/metrics")).text


class _Closing:
    """`aclosing` wants `aclose`."""

    def __init__(self, engine: RemoteEngine) -> None:
        self.aclose = engine.close
