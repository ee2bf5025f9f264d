"""Anthropic's Messages API through the official SDK: plain and streamed messages are the same objects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longturn.config import EngineConfig, ServerConfig
from longturn.engine.records import FinishReason
from longturn.errors import RequestError
from longturn.frontend.conversation_keys import canonical_message
from longturn.frontend.records import TextChunk, TextRequest
from tests.frontend.m3 import Written, outputs
from tests.server.dialects import (
    ANSWER,
    CALLS,
    EXPECTED,
    MESSAGES_TOOLS,
    TOOLS,
    Scripted,
    claude,
    client,
    events_of,
)
from tests.server.served import Start

PATH = "/v1/messages"
USER: list[Any] = [{"role": "user", "content": "what is here?"}]
THINK: Any = {"type": "enabled", "budget_tokens": 1024}
BODY: dict[str, Any] = {"model": "mock", "max_tokens": 100, "messages": USER}


def written(message: Any) -> list[Any]:
    """The content without what differs between two messages, and without what the SDK adds."""
    blocks = message["content"] if isinstance(message, dict) else [block.to_dict() for block in message.content]
    return [{k: v for k, v in block.items() if k not in ("id", "parsed_output")} for block in blocks]


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(block.name, block.input) for block in message.content if block.type == "tool_use"]


# --- answers ---------------------------------------------------------------------------------------------------------


async def test_a_plain_message(start: Start) -> None:
    served = await start(service=Scripted("Hello.", cached=128))
    async with claude(served) as sdk:
        message = await sdk.messages.create(**BODY)
    assert message.id.startswith("msg_") and message.role == "assistant" and message.model == "mock"
    assert [(block.type, block.text) for block in message.content] == [("text", "Hello.")]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    usage = message.usage
    # Of 300 tokens one page was cached, another is new and whole, and the rest is no page.
    assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens, usage.input_tokens) == (128, 128, 44)
    assert usage.output_tokens == 1 and usage.output_tokens_details.thinking_tokens == 2


async def test_texts_have_no_field_for_citations() -> None:
    """Anthropic's have it where there are some; clients that check what they get take no null for none."""
    async with client(Scripted("Hello.")) as http:
        whole = (await http.post(PATH, json=BODY)).json()
        stream = events_of((await http.post(PATH, json={**BODY, "stream": True})).text)
    assert whole["content"] == [{"type": "text", "text": "Hello."}]
    begun = [data["content_block"] for name, data in stream if name == "content_block_start"]
    assert begun == [{"type": "text", "text": ""}]


async def test_cached_tokens_are_there_when_0(start: Start) -> None:
    # vllm-project/vllm#44377
    config = EngineConfig()
    async with client(Scripted("x"), config) as http:
        usage = (await http.post(PATH, json=BODY)).json()["usage"]
    assert usage["cache_read_input_tokens"] == 0 and usage["cache_creation_input_tokens"] == 256


@pytest.mark.parametrize("piece", [1, 7, 10_000])
async def test_streamed_and_plain_messages_are_the_same(start: Start, piece: int) -> None:
    served = await start(service=Scripted(ANSWER, piece=piece, cached=256))
    options = {**BODY, "tools": MESSAGES_TOOLS, "thinking": THINK}
    async with claude(served) as sdk:
        plain = await sdk.messages.create(**options)
        events = []
        async with sdk.messages.stream(**options) as stream:
            async for event in stream:
                events.append(event)
            whole = await stream.get_final_message()
    assert [block.type for block in plain.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert plain.content[0].thinking == "I must look." and plain.content[0].signature
    assert plain.content[1].text == "One moment." and calls_of(plain) == EXPECTED
    assert plain.stop_reason == "tool_use"
    assert written(whole) == written(plain)
    assert (whole.stop_reason, whole.usage) == (plain.stop_reason, plain.usage)
    assert "".join(event.text for event in events if event.type == "text") == "One moment."
    assert "".join(event.thinking for event in events if event.type == "thinking") == "I must look."


async def test_the_events_of_a_stream() -> None:
    async with client(Scripted(ANSWER, piece=10_000)) as http:
        reply = await http.post(PATH, json={**BODY, "tools": MESSAGES_TOOLS, "thinking": THINK, "stream": True})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(reply.text)
    assert all(name == event["type"] for name, event in events)
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    thinking = [*block[:2], "content_block_delta", block[2]]
    assert [name for name, _ in events] == [
        "message_start", "ping", *thinking, *block, *block, *block, "message_delta", "message_stop",
    ]  # fmt: skip
    first, last = events[0][1]["message"], events[-2][1]
    assert first["content"] == [] and first["stop_reason"] is None and first["usage"]["input_tokens"] == 300
    assert last["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert last["usage"]["output_tokens"] == 1
    deltas = [event["delta"]["type"] for name, event in events if name == "content_block_delta"]
    assert deltas == ["thinking_delta", "signature_delta", "text_delta", "input_json_delta", "input_json_delta"]
    indices = [event["index"] for name, event in events if name.startswith("content_block")]
    assert indices == sorted(indices), "one block ends before the next begins"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("finish", "stop_text", "max_tokens", "reason"),
    [
        (FinishReason.STOP, None, 9, "end_turn"),
        (FinishReason.STOP, "END", 9, "stop_sequence"),
        (FinishReason.LENGTH, None, 1, "max_tokens"),
        (FinishReason.LENGTH, None, 9, "model_context_window_exceeded"),
    ],
)
async def test_stop_reasons(
    finish: FinishReason, stop_text: str | None, max_tokens: int, reason: str, stream: bool
) -> None:
    service = Scripted("x", finish=finish)
    service.stop_text = stop_text
    body = {**BODY, "max_tokens": max_tokens, "stop_sequences": ["END"], "stream": stream}
    async with client(service) as http:
        reply = await http.post(PATH, json=body)
    ended = events_of(reply.text)[-2][1]["delta"] if stream else reply.json()
    assert (ended["stop_reason"], ended["stop_sequence"]) == (reason, stop_text)
    assert service.requests[0].stop == ("END",) and service.requests[0].sampling.max_tokens == max_tokens


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}])
async def test_thinking_that_nobody_asked_for_is_not_shown(thinking: Any) -> None:
    service = Scripted(ANSWER)
    body = {**BODY, "tools": MESSAGES_TOOLS, "thinking": thinking}
    async with client(service) as http:
        plain = (await http.post(PATH, json=body)).json()
        events = events_of((await http.post(PATH, json={**body, "stream": True})).text)
    assert [block["type"] for block in plain["content"]] == ["text", "tool_use", "tool_use"]
    assert not any("thinking" in json.dumps(event) for name, event in events if name.startswith("content_block"))
    assert service.requests[0].prompt.template_kwargs["enable_thinking"] is False


async def test_a_failure_in_mid_stream_is_an_event(start: Start) -> None:
    service = Scripted("Some text that is not finished")
    service.fail_at = 2
    served = await start(service=service)
    async with claude(served) as sdk:
        with pytest.raises(anthropic.APIStatusError) as caught:
            async with sdk.messages.stream(**BODY) as stream:
                async for _ in stream:
                    pass
    assert "api_error" in str(caught.value) and "secret" not in str(caught.value)


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(outputs(), st.integers(1, 40), st.booleans())
async def test_any_output_cut_anywhere(made: Written, piece: int, thinks: bool) -> None:
    tools = [{"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]} for tool in made.tools]
    service = Scripted(made.text, piece=piece)
    async with client(service) as http:
        body = {**BODY, "tools": tools} | ({"thinking": {"type": "adaptive"}} if thinks else {})
        plain = (await http.post(PATH, json=body)).json()
        events = events_of((await http.post(PATH, json={**body, "stream": True})).text)
        # What a client sends back is what the model has written, as conversations are remembered by.
        answer = {"role": "assistant", "content": plain["content"]}
        back = {**body, "messages": [*USER, answer, {"role": "user", "content": "on"}]}
        assert (await http.post(PATH, json=back)).status_code == 200
    calls = [(block["name"], block["input"]) for block in plain["content"] if block["type"] == "tool_use"]
    assert calls == made.calls
    assert "".join(block["text"] for block in plain["content"] if block["type"] == "text") == made.content
    deltas: dict[int, str] = {}
    for name, event in events:
        if name == "content_block_delta" and event["delta"]["type"] != "signature_delta":
            (text,) = (value for key, value in event["delta"].items() if key != "type")
            deltas[event["index"]] = deltas.get(event["index"], "") + text
    streamed = [
        json.loads(text) if block["type"] == "tool_use" else text
        for text, block in zip(deltas.values(), plain["content"], strict=True)
    ]
    fields = {"tool_use": "input", "text": "text", "thinking": "thinking"}
    assert streamed == [block[fields[block["type"]]] for block in plain["content"]]
    functions = [{"function": {"name": name, "arguments": json.dumps(given)}} for name, given in made.calls]
    remembered = {"role": "assistant", "content": made.content, "tool_calls": functions}
    assert canonical_message(service.messages()[1]) == canonical_message(remembered)


# --- input -----------------------------------------------------------------------------------------------------------


async def test_blocks_become_the_messages_that_the_model_wrote(start: Start) -> None:
    served = await start(service=Scripted("ok"))
    mark: Any = {"cache_control": {"type": "ephemeral"}}
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two", **mark}]},
        {"role": "user", "content": "three"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"path": "é"}, **mark},
                {"type": "tool_use", "id": "t2", "name": "run", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": "text"},
                {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "more"}], **mark},
                {"type": "text", "text": "and now?"},
            ],
        },
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t3", "is_error": True}]},
    ]
    system: list[Any] = [{"type": "text", "text": "You help."}, {"type": "text", "text": "Be brief.", **mark}]
    tools = [{**tool, **mark} for tool in MESSAGES_TOOLS]
    async with claude(served) as sdk:
        await sdk.messages.create(model="mock", max_tokens=5, system=system, messages=messages, tools=tools)

    def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert served.service.messages() == [
        {"role": "system", "content": "You help.\nBe brief."},
        {"role": "user", "content": "one\ntwo\nthree"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "hm",
            "tool_calls": [call("t1", "look", '{"path": "é"}'), call("t2", "run", "{}")],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "text"},
        {"role": "tool", "tool_call_id": "t2", "content": "more"},
        {"role": "user", "content": "and now?"},
        {"role": "assistant", "content": "Done."},
        {"role": "tool", "tool_call_id": "t3", "content": ""},
    ]
    assert served.service.tools() == TOOLS


async def test_what_is_asked_for_reaches_the_model(start: Start) -> None:
    served = await start(service=Scripted("ok"))
    async with claude(served) as sdk:
        await sdk.messages.create(
            **BODY,
            tools=MESSAGES_TOOLS,
            tool_choice={"type": "tool", "name": "look", "disable_parallel_tool_use": True},
            thinking=THINK,
            metadata={"user_id": "a session"},
            output_config={"effort": "max", "format": {"type": "json_schema", "schema": {"type": "object"}}},
            extra_body={"temperature": 0.5, "top_k": 3, "top_p": 0.5, "seed": 7, "something_new": [1]},
            extra_headers={"anthropic-version": "2099-01-01", "anthropic-beta": "anything"},
        )
    (request,) = served.service.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.5, 3, 7)
    assert request.session_id == "a session"
    assert (request.tool_choice.mode, request.tool_choice.names) == ("required", ("look",))
    assert request.prompt.template_kwargs == {"enable_thinking": True, "reasoning_effort": "high"}
    assert request.grammar.kind == "json_schema" and request.grammar.strict
    assert request.split_reasoning and request.parse_tools


@pytest.mark.parametrize(
    ("choice", "mode", "parallel"),
    [
        (None, "auto", True),
        ({"type": "auto"}, "auto", True),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any"}, "required", True),
        ({"type": "none"}, "none", True),
    ],
)
async def test_tool_choice(choice: Any, mode: str, parallel: bool) -> None:
    service = Scripted(ANSWER)
    async with client(service) as http:
        reply = (await http.post(PATH, json={**BODY, "tools": MESSAGES_TOOLS, "tool_choice": choice})).json()
    made = service.requests[0].tool_choice
    assert (made.mode, made.names, made.parallel) == (mode, None, parallel)
    # What looks like a call is text where none may be made.
    assert reply["stop_reason"] == ("end_turn" if mode == "none" else "tool_use")
    assert (CALLS in reply["content"][0]["text"]) == (mode == "none")


async def test_count_tokens(start: Start) -> None:
    served = await start(service=Scripted("ok"))
    async with claude(served) as sdk:
        counted = await sdk.messages.count_tokens(model="mock", messages=USER, system="You help.", tools=MESSAGES_TOOLS)
        assert counted.input_tokens == 11
        await sdk.messages.create(**BODY, system="You help.", tools=MESSAGES_TOOLS)
    ((prompt, special),) = served.service.counted
    assert prompt == served.service.requests[0].prompt and special is False


# --- errors ----------------------------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": None}, "max_tokens", "missing"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"messages": []}, "messages", "at least one"),
    ({"messages": "x"}, "messages", "expected"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'robot'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "must be a text or"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        "messages[0].content[0].type",
        "'image' is not supported",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        "messages[0].content[0].tool_use_id",
        "must be a text",
    ),
    (
        {
            "messages": [
                *USER,
                {"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": 1}]},
            ]
        },
        "messages[1].content[0].input",
        "must be an object",
    ),
    ({"messages": [*USER, {"role": "assistant", "content": "I"}]}, "messages[1]", "the user's"),
    ({"system": [{"type": "image"}]}, "system[0].type", "not supported"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type", "not supported"),
    ({"tools": [{"name": "x"}]}, "tools[0].input_schema", "JSON schema"),
    ({"tools": [{"input_schema": {}}]}, "tools[0].name", "must be a text"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name", "not 'a b'"),
    ({"tools": [{"name": "f", "input_schema": {}}] * 2}, "tools[1].name", "'f', the name of another tool"),
    ({"tool_choice": {"type": "any"}}, "tool_choice", "no tools"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type", "'some'"),
    ({"tools": MESSAGES_TOOLS, "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice", "'f'"),
    ({"thinking": {"type": "deeply"}}, "thinking.type", "'deeply'"),
    ({"mcp_servers": [{"url": "x"}]}, "mcp_servers", "calls no other servers"),
    ({"container": "x"}, "container", "not executed"),
    ({"n": 2}, "n", "one answer"),
    ({"prompt_logprobs": 1}, "prompt_logprobs", "not supported"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type", "must be"),
]


@pytest.mark.parametrize(("change", "param", "says"), BAD)
async def test_bad_bodies_name_what_is_wrong(change: dict[str, Any], param: str, says: str) -> None:
    service = Scripted("x")
    async with client(service) as http:
        reply = await http.post(PATH, json={**BODY, **change}, headers={"x-request-id": "my-id"})
    body = reply.json()
    error = body["error"]
    assert reply.status_code == 400 and body["type"] == "error" and error["type"] == "invalid_request_error"
    assert error["param"] == param and param in error["message"] and says in error["message"]
    assert "\n" not in error["message"]
    assert body["request_id"] == reply.headers["request-id"] == "my-id"
    assert not service.requests


async def test_errors_have_anthropics_form_everywhere_below_the_path(start: Start) -> None:
    config = EngineConfig(server=ServerConfig(api_keys=("right",), max_body_bytes=10_000))
    service = Scripted("x")
    served = await start(service=service, config=config)
    async with claude(served, api_key="wrong") as sdk:
        with pytest.raises(anthropic.AuthenticationError) as wrong_key:
            await sdk.messages.create(**BODY)
    assert wrong_key.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
    async with claude(served, api_key="right") as sdk:
        with pytest.raises(anthropic.NotFoundError) as model:
            await sdk.messages.create(**{**BODY, "model": "claude-9"})
        assert "--model-alias" in str(model.value)
        with pytest.raises(anthropic.NotFoundError):
            await sdk.messages.batches.list()
        with pytest.raises(anthropic.RequestTooLargeError):
            await sdk.messages.create(**{**BODY, "system": "x" * 20_000})
        service.fail_at = 0
        with pytest.raises(anthropic.InternalServerError) as bug:
            await sdk.messages.create(**BODY)
        assert bug.value.body["error"]["type"] == "api_error" and "secret" not in str(bug.value)  # type: ignore[index]
        assert bug.value.request_id
    # The key may come either way, and other paths keep their own form.
    service.fail_at = None
    async with claude(served, api_key=None, auth_token="right") as sdk:
        assert (await sdk.messages.create(**BODY)).content
    async with served.http() as http:
        reply = await http.post("/v1/responses", json={}, headers={"x-api-key": "wrong"})
    assert reply.status_code == 401 and "type" not in reply.json() and "request-id" not in reply.headers
    assert reply.headers["www-authenticate"] == "Bearer"


async def test_errors_of_the_frontend_name_the_dialects_own_fields() -> None:
    class Refusing(Scripted):
        async def generate(self, request: TextRequest) -> AsyncIterator[TextChunk]:
            raise RequestError("there is too much of it", param="messages" if not request.stop else "stop")
            yield

    async with client(Refusing("x")) as http:
        replies = [await http.post("/v1/responses", json={"input": "x", "stream": stream}) for stream in (False, True)]
        stop = await http.post(PATH, json={**BODY, "stop_sequences": ["x"]})
    assert [(r.status_code, r.json()["error"]["param"]) for r in replies] == [(400, "input")] * 2
    assert stop.status_code == 400 and stop.json()["error"]["param"] == "stop_sequences"


async def test_models(start: Start) -> None:
    served = await start(service=Scripted("x"))
    async with claude(served) as sdk:
        models = [model async for model in sdk.models.list()]
        model = await sdk.models.retrieve("mock")
    assert [entry.id for entry in models] == ["mock"] and models[0].type == "model"
    assert model.display_name == "mock" and model.created_at.year == 1970 and model.max_input_tokens == 2000
    assert [entry.id async for entry in served.sdk.models.list()] == ["mock"]


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff", b'{"messages": ' + b"[" * 100_000])
async def test_bodies_that_are_no_requests(body: bytes) -> None:
    for path in (PATH, f"{PATH}/count_tokens", "/v1/responses"):
        async with client(Scripted("x")) as http:
            reply = await http.post(path, content=body)
        assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", [PATH, "/v1/responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request(start: Start, path: str, stream: bool) -> None:
    # vllm-project/vllm#54947
    served = await start(step_s=0.005)
    body = {"model": "mock", "max_tokens": 1900, "max_output_tokens": 1900, "stream": stream}
    body |= {"input": "hi"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "hi"}]}
    async with served.http() as http:
        if stream:
            async with http.stream("POST", path, json=body) as reply:
                async for _ in reply.aiter_lines():
                    break
        else:
            with pytest.raises(httpx.TimeoutException):
                await http.post(path, json=body, timeout=0.2)
    for _ in range(200):
        if served.service.closed:
            break
        await asyncio.sleep(0.01)
    assert served.service.closed == [request.request_id for request in served.service.requests]


async def test_tools_that_a_search_has_found(start: Start) -> None:
    """Claude Code keeps most of its tools out of the prompt until the model has searched for them."""
    served = await start(service=Scripted(ANSWER))
    search = {"name": "search", "input_schema": {"type": "object"}}
    later = [{**tool, "defer_loading": True} for tool in MESSAGES_TOOLS]
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "tool_reference", "tool_name": "look"}]}
    messages: list[Any] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "search", "input": {}}]},
        {"role": "user", "content": [result]},
    ]
    made = await claude(served).messages.create(model="mock", max_tokens=100, messages=messages, tools=[search, *later])
    assert [tool["function"]["name"] for tool in served.service.tools()] == ["search"]
    described = json.loads(served.service.messages()[-1]["content"])
    assert (described["name"], described["parameters"]) == ("look", MESSAGES_TOOLS[0]["input_schema"])
    calls = [block for block in made.content if block.type == "tool_use"]
    assert [(call.name, call.input) for call in calls] == EXPECTED, "arguments are read by the schemas of these too"
    result["content"][0]["tool_name"] = "none"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError, match="none of the tools"):
        await claude(served).messages.create(model="mock", max_tokens=100, messages=messages, tools=[search, *later])


@pytest.mark.parametrize("name", ["INVALID_JSON", "__unparsedToolInput"])
async def test_broken_arguments_come_back_as_what_they_were(start: Start, name: str) -> None:
    broken = CALLS[: CALLS.index("main.py")]
    served = await start(service=Scripted(broken, "ok", finish=FinishReason.LENGTH))
    ask = claude(served).messages.create
    made = await ask(model="mock", max_tokens=9, messages=[{"role": "user", "content": "hi"}], tools=MESSAGES_TOOLS)
    (call,) = made.content
    assert call.type == "tool_use" and call.input == {"INVALID_JSON": '{"path":"src/'}
    given = call.input if name == "INVALID_JSON" else {name: {"raw": '{"path":"src/', "len": 13}}
    messages: list[Any] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{**call.to_dict(), "input": given}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "no JSON"}]},
    ]
    await ask(model="mock", max_tokens=9, messages=messages, tools=MESSAGES_TOOLS)
    (sent,) = served.service.messages()[1]["tool_calls"]
    assert sent["function"]["arguments"] == '{"path":"src/'
