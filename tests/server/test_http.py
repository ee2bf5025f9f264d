"""What the SDK does not show: bad bodies, headers, limits, metrics, and the tokenizer endpoints."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from longturn.config import EngineConfig, ServerConfig
from longturn.server.app import create_app
from longturn.server.ports import ServedModel
from tests.server.byte_service import ByteService
from tests.server.engine_mock import MockEngine
from tests.server.served import Start


class Healthy(MockEngine):
    """An engine that is asked for its health only."""

    alive = True
    restarts = 0

    def health(self) -> str:
        return "ok"


CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


BAD: list[tuple[str, Any, str | None, str]] = [
    (CHAT, b"{not json", None, "not valid JSON"),
    (CHAT, b"\xff\xfe", None, "not valid JSON"),
    (CHAT, b"", None, "not valid JSON"),
    (CHAT, b"[1]", None, "request body: expected `object`, got `array`"),
    (CHAT, {}, "messages", "'messages' is missing"),
    (CHAT, {"messages": "hello"}, "messages", "expected `array`, got `str`"),
    (CHAT, {"messages": []}, "messages", "at least one"),
    (CHAT, {"messages": ["hello"]}, "messages[0]", "expected `object`"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "must be a text"),
    (
        CHAT,
        {"messages": [{"role": "asistant", "content": "x"}]},
        "messages[0].role",
        "must be system, developer, user, assistant or tool, not 'asistant'",
    ),
    (
        CHAT,
        {"messages": [*USER, {"role": "function", "name": "f", "content": "x"}]},
        "messages[1].role",
        "'function' is deprecated; use 'tool'",
    ),
    (
        CHAT,
        {"messages": [*USER, {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]},
        "messages[1].function_call",
        "use 'tool_calls'",
    ),
    ("/tokenize", {"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role", "not 'bot'"),
    (CHAT, {"messages": USER, "tools": [named("f"), named("f")]}, "tools[1].function.name", "'f', the name of another"),
    (CHAT, {"messages": USER, "tools": [named("f g!")]}, "tools[0].function.name", "not 'f g!'"),
    (CHAT, {"messages": [*USER, {"role": "user"}]}, "messages[1].content", "must be a text"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "must be a text"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
        "'image_url' is not supported",
    ),
    (CHAT, {"messages": [*USER, {"role": "assistant", "tool_calls": 1}]}, "messages[1].tool_calls", "list of objects"),
    (
        CHAT,
        {"messages": [*USER, {"role": "assistant", "tool_calls": ["f"]}]},
        "messages[1].tool_calls",
        "list of objects",
    ),
    (CHAT, {"messages": USER, "temperature": "hot"}, "temperature", "expected `float | null`, got `str`"),
    (CHAT, {"messages": USER, "max_tokens": 2.5}, "max_tokens", "expected `int | null`"),
    (CHAT, {"messages": USER, "max_tokens": 0}, "max_tokens", "at least 1, not 0"),
    (CHAT, {"messages": USER, "max_completion_tokens": -1}, "max_completion_tokens", "at least 1"),
    (CHAT, {"messages": USER, "top_k": 1 << 40}, "top_k", "expected `int` <= 2147483647"),
    (CHAT, {"messages": USER, "n": 0}, "n", "between 1 and 128"),
    (CHAT, {"messages": USER, "logit_bias": {"x": 1}}, "logit_bias", "expected"),
    (CHAT, {"messages": USER, "stop": [1]}, "stop[0]", "expected `str`, got `int`"),
    (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs", "needs 'logprobs'"),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20, not 21"),
    (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice", "there are no tools"),
    (CHAT, {"messages": USER, "tool_choice": {"type": "function"}}, "tool_choice.function.name", "must be a text"),
    (CHAT, {"messages": USER, "response_format": {"type": "xml"}}, "response_format.type", "must be 'text'"),
    (CHAT, {"messages": USER, "guided_regex": ""}, "guided_regex", "non-empty text"),
    (CHAT, {"messages": USER, "functions": [{}]}, "functions", "use 'tools'"),
    (CHAT, {"messages": USER, "stream_options": {"include_usage": True}}, "stream_options", "'stream' is true"),
    (CHAT, {"messages": USER, "modalities": ["audio"]}, "modalities", "only 'text'"),
    (TEXT, {"prompt": []}, "prompt", "non-empty list"),
    (TEXT, {"prompt": ["a", 1]}, "prompt", "non-empty list"),
    (TEXT, {"prompt": [[1.5]]}, "prompt[0][0]", "expected `int`"),
    (TEXT, {"prompt": "a", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "'stream' is not true"),
    (TEXT, {"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
    (TEXT, {"prompt": "a", "best_of": 1, "n": 2}, "best_of", "between 'n' (2) and 128, not 1"),
    (TEXT, {"prompt": "a", "best_of": 129}, "best_of", "not 129"),
    (TEXT, {"prompt": "a", "best_of": 2, "stream": True}, "best_of", "must equal 'n'"),
    (TEXT, {"prompt": ["a"] * 100, "best_of": 2}, "prompt", "more than 128"),
    (TEXT, {"prompt": ["a"] * 100, "n": 2}, "prompt", "more than 128"),
    (TEXT, {"prompt": "a", "logprobs": True}, "logprobs", "expected `int | null`, got `bool`"),
    ("/tokenize", {}, "prompt", "either 'prompt' or 'messages'"),
    ("/detokenize", {"tokens": "x"}, "tokens", "expected `array`"),
]


@pytest.mark.parametrize(("path", "body", "param", "says"), BAD)
async def test_bad_bodies_name_what_is_wrong(path: str, body: Any, param: str | None, says: str) -> None:
    engine: Any = Healthy()
    service = ByteService(engine)
    app = create_app(service, EngineConfig(), engine=engine, model=ServedModel("mock", 2000))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        reply = await http.post(path, **({"content": body} if isinstance(body, bytes) else {"json": body}))
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert says in error["message"] and "\n" not in error["message"]
    assert service.requests == []


async def test_nothing_asked_for_is_not_refused(start: Start) -> None:
    served = await start()
    neutral = {
        "response_format": {"type": "text"}, "tool_choice": "none", "n": 1, "stop": None, "modalities": ["text"],
        "stream": False, "logprobs": False, "seed": None, "tools": None, "stream_options": None, "max_tokens": 1,
    }  # fmt: skip
    async with served.http() as http:
        assert (await http.post(CHAT, json={"messages": USER, **neutral})).status_code == 200


async def test_request_ids(start: Start) -> None:
    served = await start()
    async with served.http() as http:
        given = await http.get("/version", headers={"X-Request-Id": "my-id.1"})
        made = [(await http.get("/version")).headers["x-request-id"] for _ in range(2)]
        forged = await http.get("/version", headers={"X-Request-Id": "a b"})
        crash = await http.post(
            CHAT, json={"messages": [{"role": "user", "content": "@crash"}]}, headers={"X-Request-Id": "it-crashed"}
        )
    assert given.headers.get_list("x-request-id") == ["my-id.1"]
    assert made[0] != made[1] and forged.headers["x-request-id"] != "a b"
    assert crash.status_code == 500 and "it-crashed" in crash.json()["error"]["message"]


async def test_a_bug_is_logged_with_its_trace_and_not_shown(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    served = await start()
    body = {"messages": [{"role": "user", "content": "@crash"}]}
    async with served.http() as http:
        plain = await http.post(CHAT, json=body, headers={"X-Request-Id": "find-me"})
        stream = await http.post(CHAT, json={**body, "stream": True})
    assert plain.status_code == stream.status_code == 500
    assert "ZeroDivisionError" not in plain.text + stream.text
    assert "find-me" in caplog.text and "ZeroDivisionError: a secret of the inside" in caplog.text


async def test_paths_and_methods(start: Start) -> None:
    served = await start()
    async with served.http() as http:
        missing = await http.get("/v2/nothing")
        wrong = await http.get(CHAT)
    assert missing.status_code == 404 and "/v2/nothing" in missing.json()["error"]["message"]
    assert wrong.status_code == 405 and wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["code"] == "method_not_allowed"


async def test_absurd_bodies_are_refused(start: Start) -> None:
    served = await start(config=EngineConfig(server=ServerConfig(max_body_bytes=1000)))

    async def pieces() -> Any:
        for _ in range(20):
            yield b"x" * 100

    async with served.http() as http:
        announced = await http.post(CHAT, content=b"x" * 1001)
        chunked = await http.post(CHAT, content=pieces())
        allowed = await http.post(CHAT, content=b"x" * 1000)
    assert announced.status_code == chunked.status_code == 413
    assert announced.json()["error"]["code"] == "request_too_large" and allowed.status_code == 400


async def test_a_request_may_take_only_so_long(start: Start) -> None:
    served = await start(step_s=0.01, config=EngineConfig(server=ServerConfig(request_timeout_s=0.1)))
    async with served.http() as http:
        body = {"messages": USER, "max_tokens": 1_000_000}
        plain = await http.post(CHAT, json=body)
        stream = await http.post(CHAT, json={**body, "stream": True})
    assert plain.status_code == 504 and "0.1 s" in plain.json()["error"]["message"]
    assert stream.status_code == 200
    last = stream.text.split("\n\n")[-2]
    assert last.startswith('data: {"error":') and '"code":"timeout"' in last and "[DONE]" not in stream.text
    await asyncio.sleep(0.1)
    assert served.engine.stats().running == 0


async def test_browsers_may_call_where_allowed(start: Start) -> None:
    server = ServerConfig(api_keys=("k",), cors_origins=("https://app.example",))
    served = await start(config=EngineConfig(server=server))
    ask = {"Origin": "https://app.example", "Access-Control-Request-Method": "POST"}
    async with served.http() as http:
        preflight = await http.options(CHAT, headers=ask)
        refused = await http.post(CHAT, json={}, headers={"Origin": "https://app.example"})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://app.example"
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://app.example"


async def test_tokenize_and_back(start: Start) -> None:
    served = await start()
    async with served.http() as http:
        made = (await http.post("/tokenize", json={"prompt": "hé"})).json()
        assert made == {"count": 4, "max_model_len": 2000, "tokens": [0, *"hé".encode()]}
        plain = (await http.post("/tokenize", json={"prompt": "hé", "add_special_tokens": False})).json()
        assert (await http.post("/detokenize", json={"tokens": plain["tokens"]})).json() == {"prompt": "hé"}
        assert (await http.post("/tokenize", json={"messages": USER})).json()["count"] == 2


async def test_metrics(start: Start) -> None:
    served = await start(cached_tokens=1)
    await served.chat("hello", max_tokens=5)
    async for _ in await served.chat("hello", max_tokens=3, stream=True):
        pass
    task = asyncio.create_task(served.chat(max_tokens=1_000_000))
    while served.engine.stats().running == 0:
        await asyncio.sleep(0.005)
    task.cancel()
    async with served.http() as http:
        while served.engine.stats().aborts == 0:
            await asyncio.sleep(0.005)
        text = (await http.get("/metrics")).text

    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }

    def value(name: str, **labels: str) -> float:
        return samples[(name, *sorted({"model_name": "mock", **labels}.items()))]

    for name in ("longturn_ttft_seconds_count", "vllm:time_to_first_token_seconds_count"):
        assert value(name) == 3
    for name in ("longturn_request_generation_tokens_sum", "vllm:request_generation_tokens_sum"):
        assert value(name) == 8
    assert value("vllm:request_prompt_tokens_bucket", le="4.0") == 0
    assert value("vllm:request_prompt_tokens_bucket", le="16.0") == 2
    assert value("longturn_request_cached_tokens_sum") == 2
    assert value("vllm:request_queue_time_seconds_sum") == pytest.approx(2 * 0.001)
    assert value("vllm:request_prefill_time_seconds_sum") == pytest.approx(2 * 0.002)
    assert value("vllm:request_decode_time_seconds_sum") == pytest.approx(2 * 0.006)
    assert value("vllm:request_inference_time_seconds_sum") == pytest.approx(2 * 0.008)
    assert value("vllm:request_success_total", finished_reason="length") == 2
    assert value("vllm:request_success_total", finished_reason="abort") == 1
    assert value("longturn_requests_finished_total", finished_reason="error") == 0
    assert value("longturn_requests_open") == 0 and value("longturn_engine_up") == 1
    assert value("vllm:prompt_tokens_total") == 15 and value("longturn_aborts_total") == 1
    assert 'longturn_http_responses_total{path="/v1/chat/completions",status="200"} 2.0' in text
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total",
                 "prefix_cache_queries_total", "prefix_cache_hits_total", "generation_tokens_total",
                 "inter_token_latency_seconds_count", "e2e_request_latency_seconds_count",
                 "request_time_per_output_token_seconds_count", "prompt_tokens_cached_total"):  # fmt: skip
        value(f"vllm:{name}")
    assert 'vllm:cache_config_info{block_size="128",model_name="mock",num_gpu_blocks="99"} 1.0' in text


async def test_two_servers_count_apart(start: Start) -> None:
    one, two = await start(), await start()
    await one.chat(max_tokens=1)
    async with two.http() as http:
        assert 'longturn_e2e_latency_seconds_count{model_name="mock"} 0.0' in (await http.get("/metrics")).text


async def test_a_waiting_stream_is_kept_alive(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longturn.server.sse.FIRST_CHUNK_GRACE_S", 0.05)
    monkeypatch.setattr("longturn.server.sse.KEEP_ALIVE_S", 0.05)
    served = await start(step_s=0.3)
    async with served.http() as http:
        reply = await http.post(CHAT, json={"messages": USER, "max_tokens": 1, "stream": True})
    events = reply.text.split("\n\n")
    assert '"role":"assistant"' in events[0] and events[1] == ": waiting" and events[-2] == "data: [DONE]"


async def test_a_client_that_goes_away_while_it_sends_is_no_error(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    served = await start()
    host, port = served.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    await writer.wait_closed()
    await asyncio.sleep(0.05)
    assert caplog.text == ""


async def test_a_compressed_body_is_refused_in_words(start: Start) -> None:
    served = await start()
    async with served.http() as http:
        body = gzip.compress(b'{"messages": []}')
        reply = await http.post("/v1/chat/completions", content=body, headers={"content-encoding": "gzip"})
    assert reply.status_code == 415 and "'gzip' is not supported" in reply.json()["error"]["message"]
