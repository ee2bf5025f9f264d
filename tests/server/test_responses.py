"""OpenAI's Responses API through the official SDK: plain and streamed responses are the same objects."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longturn.config import EngineConfig, ServerConfig
from longturn.engine.records import FinishReason
from tests.frontend.m3 import Written, outputs
from tests.server.dialects import ANSWER, CALLS, EXPECTED, RESPONSES_TOOLS, Scripted, client, events_of
from tests.server.served import Start

PATH = "/v1/responses"


def calls_of(response: Any) -> list[tuple[str, Any]]:
    return [(item.name, json.loads(item.arguments)) for item in response.output if item.type == "function_call"]


def written(output: Any) -> Any:
    """The output without what differs between two responses, and without what the SDK adds."""
    if isinstance(output, list):
        return [written(item) for item in output]
    if not isinstance(output, dict):
        return written(output.to_dict()) if hasattr(output, "to_dict") else output
    beside = ("id", "call_id", "parsed_arguments", "parsed")
    return {key: written(value) for key, value in output.items() if key not in beside}


async def streamed(served: Any, **options: Any) -> tuple[Any, list[Any]]:
    events = []
    async with served.sdk.responses.stream(model="mock", **options) as stream:
        async for event in stream:
            events.append(event)
        return await stream.get_final_response(), events


# --- answers ---------------------------------------------------------------------------------------------------------


async def test_a_plain_response(start: Start) -> None:
    served = await start(service=Scripted("Hello.", cached=128))
    response = await served.sdk.responses.create(model="mock", input="hi", metadata={"a": "b"}, temperature=0.5)
    assert response.output_text == "Hello." and response.status == "completed" and response.error is None
    assert [item.type for item in response.output] == ["message"]
    assert response.metadata == {"a": "b"} and response.temperature == 0.5 and response.model == "mock"
    usage = response.usage
    assert (usage.input_tokens, usage.output_tokens, usage.total_tokens) == (300, 1, 301)
    assert usage.input_tokens_details.cached_tokens == 128
    assert usage.input_tokens_details.cache_write_tokens == 128, "the second of two whole pages"
    assert usage.output_tokens_details.reasoning_tokens == 2


@pytest.mark.parametrize("piece", [1, 7, 10_000])
async def test_streamed_and_plain_responses_are_the_same(start: Start, piece: int) -> None:
    served = await start(service=Scripted(ANSWER, piece=piece))
    plain = await served.sdk.responses.create(model="mock", input="hi", tools=RESPONSES_TOOLS)
    assert [item.type for item in plain.output] == ["reasoning", "message", "function_call", "function_call"]
    assert plain.output[0].content[0].text == "I must look." and plain.output_text == "One moment."
    assert calls_of(plain) == EXPECTED
    assert len({item.call_id for item in plain.output[2:]}) == 2
    strict = [{**tool, "strict": True} for tool in RESPONSES_TOOLS]
    whole, events = await streamed(served, input="hi", tools=strict)
    assert written(whole.output) == written(plain.output)
    assert whole.usage == plain.usage
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    thought = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert (text, thought) == ("One moment.", "I must look.")


async def test_streamed_item_ids_equal_the_final_ids(start: Start) -> None:
    # vllm-project/vllm#56285
    served = await start(service=Scripted(ANSWER))
    async with served.http() as http:
        reply = await http.post(PATH, json={"input": "hi", "tools": RESPONSES_TOOLS, "stream": True})
        events = events_of(reply.text)
        final = events[-1][1]["response"]
        stored = (await http.get(f"{PATH}/{final['id']}")).json()
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert stored == final
    ids = [item["id"] for item in final["output"]]
    assert len(set(ids)) == 4
    assert {event["response"]["id"] for _, event in events if "response" in event} == {final["id"]}
    for name, event in events:
        assert name == event["type"]
        if "item_id" in event:
            assert event["item_id"] == ids[event["output_index"]]
        if "item" in event:
            assert event["item"]["id"] == ids[event["output_index"]]
    done = [event["item"] for name, event in events if name == "response.output_item.done"]
    assert done == final["output"]


async def test_the_order_of_events(start: Start) -> None:
    served = await start(service=Scripted(ANSWER, piece=10_000))
    async with served.http() as http:
        reply = await http.post(PATH, json={"input": "hi", "tools": RESPONSES_TOOLS, "stream": True})
    call = [
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
    ]  # fmt: skip
    assert [name.removeprefix("response.") for name, _ in events_of(reply.text)] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        *call, *call, "completed",
    ]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_that_is_cut_off_is_incomplete(start: Start, stream: bool) -> None:
    served = await start(service=Scripted("An answer that", finish=FinishReason.LENGTH))
    options: dict[str, Any] = {"input": "hi", "max_output_tokens": 3}
    if stream:
        events = [e async for e in await served.sdk.responses.create(model="mock", stream=True, **options)]
        assert events[-1].type == "response.incomplete"
        response = events[-1].response
    else:
        response = await served.sdk.responses.create(model="mock", **options)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output[0].status == "incomplete" and response.output_text == "An answer that"
    assert served.service.requests[0].sampling.max_tokens == 3


async def test_calls_before_the_limit_are_whole(start: Start) -> None:
    served = await start(service=Scripted(f"a{CALLS} b", finish=FinishReason.LENGTH))
    response = await served.sdk.responses.create(model="mock", input="hi", tools=RESPONSES_TOOLS)
    assert calls_of(response) == EXPECTED and response.status == "incomplete"
    assert [item.status for item in response.output] == ["completed"] * 3 + ["incomplete"]
    assert [item.type for item in response.output] == ["message", "function_call", "function_call", "message"]


async def test_a_call_that_is_cut_off_is_incomplete(start: Start) -> None:
    cut = CALLS[: CALLS.index("main.py")]
    served = await start(service=Scripted(cut, finish=FinishReason.LENGTH))
    (call,) = (await served.sdk.responses.create(model="mock", input="hi", tools=RESPONSES_TOOLS)).output
    assert (call.type, call.status, call.arguments) == ("function_call", "incomplete", '{"path":"src/')


async def test_arguments_come_while_they_are_written(start: Start) -> None:
    served = await start(service=Scripted(ANSWER, piece=3))
    async with served.http() as http:
        reply = await http.post(PATH, json={"input": "hi", "tools": RESPONSES_TOOLS, "stream": True})
    deltas = [e["delta"] for name, e in events_of(reply.text) if name == "response.function_call_arguments.delta"]
    assert deltas[:4] == ['{"path":"s', "rc/", "mai", "n.p"]


async def test_text_behind_calls_comes_back_as_one_answer(start: Start) -> None:
    served = await start(service=Scripted(f"a{CALLS} b", "ok"))
    first = await served.sdk.responses.create(model="mock", input="hi", tools=RESPONSES_TOOLS)
    given: list[Any] = [{"role": "user", "content": "hi"}, *(item.model_dump() for item in first.output)]
    given += [
        {"type": "function_call_output", "call_id": item.call_id, "output": ""}
        for item in first.output
        if item.type == "function_call"
    ]
    await served.sdk.responses.create(model="mock", input=given, tools=RESPONSES_TOOLS)
    answer = served.service.messages()[1]
    assert (answer["role"], answer["content"], len(answer["tool_calls"])) == ("assistant", "a b", 2)


async def test_a_failure_in_mid_stream_is_an_event(start: Start) -> None:
    service = Scripted("Some text that is not finished")
    service.fail_at = 2
    served = await start(service=service)
    events = [e async for e in await served.sdk.responses.create(model="mock", input="hi", stream=True)]
    assert events[-1].type == "response.failed"
    response = events[-1].response
    assert response.status == "failed" and response.error.code == "internal_error"
    assert "secret" not in response.error.message and response.output_text == "Some text that"
    assert [event.sequence_number for event in events] == list(range(len(events)))


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(outputs(), st.integers(1, 40))
async def test_any_output_cut_anywhere(made: Written, piece: int) -> None:
    tools = [{"type": "function", **tool["function"]} for tool in made.tools]
    async with client(Scripted(made.text, piece=piece)) as http:
        body = {"input": "hi", "tools": tools}
        plain = (await http.post(PATH, json=body)).json()
        events = events_of((await http.post(PATH, json={**body, "stream": True})).text)
    assert written(plain["output"]) == written(events[-1][1]["response"]["output"])
    calls = [(i["name"], json.loads(i["arguments"])) for i in plain["output"] if i["type"] == "function_call"]
    assert calls == made.calls
    texts = [item["content"][0]["text"] for item in plain["output"] if item["type"] == "message"]
    assert "".join(texts) == made.content
    deltas: dict[str, str] = {}
    for name, event in events:
        if name.endswith(".delta"):
            deltas[event["item_id"]] = deltas.get(event["item_id"], "") + event["delta"]
    final = events[-1][1]["response"]["output"]
    assert list(deltas.values()) == [
        item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"] for item in final
    ]


# --- input -----------------------------------------------------------------------------------------------------------


async def test_items_become_the_messages_that_the_model_wrote(start: Start) -> None:
    served = await start(service=Scripted("ok"))
    items: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message", "id": "msg_1", "role": "assistant", "status": "completed",
            "content": [{"type": "output_text", "text": "I look.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"path": "x"}'},
        {"type": "function_call", "call_id": "c2", "name": "run", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "text"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "more"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "x"},
        {"type": "function_call", "call_id": "c3", "name": "run", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c3", "output": ""},
        {"type": "message", "role": "assistant", "content": "Done."},
        {"type": "message", "role": "user", "content": "thanks"},
    ]  # fmt: skip
    await served.sdk.responses.create(model="mock", instructions="You help.", input=items, tools=RESPONSES_TOOLS)

    def call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert served.service.messages() == [
        {"role": "system", "content": "You help.\n\nBe brief."},
        {"role": "user", "content": "one\ntwo"},
        {
            "role": "assistant", "reasoning_content": "hm", "content": "I look.",
            "tool_calls": [call("c1", "look", '{"path": "x"}'), call("c2", "run", "{}")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "text"},
        {"role": "tool", "tool_call_id": "c2", "content": "more"},
        # No reasoning is said where the client sends none of it back: the frontend may know it.
        {"role": "assistant", "content": "", "tool_calls": [call("c3", "run", "{}")]},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "thanks"},
    ]  # fmt: skip
    assert served.service.tools() == [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in RESPONSES_TOOLS
    ]


async def test_what_is_asked_for_reaches_the_model(start: Start) -> None:
    served = await start(service=Scripted("ok"))
    await served.sdk.responses.create(
        model="mock",
        input="hi",
        tools=RESPONSES_TOOLS,
        tool_choice={"type": "function", "name": "look"},
        parallel_tool_calls=False,
        top_p=0.5,
        reasoning={"effort": "high"},
        prompt_cache_key="a session",
        text={"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}},
        include=["reasoning.encrypted_content"],
        extra_body={"seed": 7, "top_k": 3, "cache_salt": "s", "something_new": [1]},
    )
    (request,) = served.service.requests
    assert (request.sampling.top_p, request.sampling.seed, request.sampling.top_k) == (0.5, 7, 3)
    assert (request.session_id, request.cache_salt) == ("a session", "s")
    assert (request.tool_choice.mode, request.tool_choice.names) == ("required", ("look",))
    assert request.prompt.template_kwargs == {"reasoning_effort": "high"}
    assert request.grammar.kind == "json_schema" and json.loads(request.grammar.text) == {"type": "object"}
    assert request.split_reasoning and request.parse_tools


async def test_requests_without_a_seed_sample_differently(start: Start) -> None:
    served = await start(service=Scripted("ok"))
    for _ in range(2):
        await served.sdk.responses.create(model="mock", input="hi")
    await served.chat("hi")
    assert len({request.sampling.seed for request in served.service.requests}) == 3


BAD: list[tuple[dict[str, Any], str | None, str]] = [
    ({}, "input", "missing"),
    ({"input": []}, "input", "at least one"),
    ({"input": 5}, "input", "expected"),
    ({"input": [{"content": "x"}]}, "input[0].type", "missing"),
    ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role", "'robot'"),
    ({"input": [{"role": "user", "content": 5}]}, "input[0].content", "must be a text or"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
        "'input_image' is not supported",
    ),
    ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type", "'web_search_call' are not supported"),
    ({"input": [{"type": "item_reference", "id": 5}]}, "input[0].id", "text"),
    ({"input": [{"type": "function_call", "call_id": "x", "name": "f"}]}, "input[0].arguments", "must be a text"),
    ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input[0].output", "must be a text or"),
    ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content", "must be a list"),
    ({"input": "x", "background": True, "stream": True}, "background", "not streamed"),
    ({"input": "x", "conversation": "c"}, "conversation", "previous_response_id"),
    ({"input": "x", "prompt": {"id": "p"}}, "prompt", "not supported"),
    ({"input": "x", "truncation": "auto"}, "truncation", "'disabled'"),
    ({"input": "x", "context_management": [{"type": "compaction"}]}, "context_management", "not supported"),
    ({"input": "x", "top_logprobs": 2}, "top_logprobs", "not supported here"),
    ({"input": "x", "include": ["message.output_text.logprobs"]}, "include", "not supported here"),
    ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search' are not supported"),
    ({"input": "x", "tools": [{"type": "function"}]}, "tools[0].name", "must be a text"),
    ({"input": "x", "tool_choice": "required"}, "tool_choice", "there are no tools"),
    ({"input": "x", "tools": RESPONSES_TOOLS, "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "'f'"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens", "at least 1"),
    ({"input": "x", "n": 2}, "n", "one answer"),
    ({"input": "x", "moderation": {"model": "m"}}, "moderation", "no moderation"),
    ({"input": "x", "use_beam_search": True}, "use_beam_search", "not supported"),
    ({"input": "x", "metadata": {str(i): "" for i in range(17)}}, "metadata", "at most 16"),
    ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type", "must be"),
    ({"input": "x", "model": "gpt-9"}, "model", "--model-alias"),
    ({"input": "x", "previous_response_id": "resp_0"}, "previous_response_id", "no stored response 'resp_0'"),
]


@pytest.mark.parametrize(("body", "param", "says"), BAD)
async def test_bad_bodies_name_what_is_wrong(body: dict[str, Any], param: str, says: str) -> None:
    service = Scripted("x")
    async with client(service) as http:
        reply = await http.post(PATH, json=body)
    error = reply.json()["error"]
    assert reply.status_code == (404 if param == "model" else 400)
    assert error["param"] == param and says in error["message"] and "\n" not in error["message"]
    assert not service.requests


# --- stored responses ------------------------------------------------------------------------------------------------


async def test_a_conversation_by_previous_response_id(start: Start) -> None:
    served = await start(service=Scripted(ANSWER, "Two files.", "Bye."))
    create = served.sdk.responses.create
    options: dict[str, Any] = {"model": "mock", "instructions": "You help.", "tools": RESPONSES_TOOLS}
    first = await create(input="what is here?", **options)
    results: list[Any] = [
        {"type": "function_call_output", "call_id": item.call_id, "output": f"result of {item.name}"}
        for item in first.output
        if item.type == "function_call"
    ]
    second = await create(input=results, previous_response_id=first.id, **options)
    assert second.output_text == "Two files." and second.previous_response_id == first.id
    by_id = served.service.messages()
    # The same conversation, with everything sent again.
    echo: list[Any] = [item.to_dict() for item in first.output]
    served.service.requests.pop()
    await create(input=[{"role": "user", "content": "what is here?"}, *echo, *results], **options)
    assert served.service.messages() == by_id
    assert [message["role"] for message in by_id] == ["system", "user", "assistant", "tool", "tool"]
    # Another turn; instructions are not carried over.
    served.service.requests.append(served.service.requests[-1])
    await create(input="thanks", model="mock", previous_response_id=second.id)
    messages = served.service.messages()
    assert messages[:-2] == by_id[1:]
    assert messages[-2:] == [
        {"role": "assistant", "content": "Two files."},
        {"role": "user", "content": "thanks"},
    ]


async def test_streamed_responses_are_stored_before_they_end(start: Start) -> None:
    served = await start(service=Scripted("Hello."))
    stream = await served.sdk.responses.create(model="mock", input="hi", stream=True)
    async for event in stream:
        if event.type == "response.completed":
            again = await served.sdk.responses.retrieve(event.response.id)
            assert again.to_dict() == event.response.to_dict()
            break
    else:
        raise AssertionError("the response did not complete")


async def test_responses_can_be_deleted(start: Start) -> None:
    served = await start(service=Scripted("Hello."))
    response = await served.sdk.responses.create(model="mock", input="hi")
    assert (await served.sdk.responses.retrieve(response.id)).output_text == "Hello."
    await served.sdk.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError) as caught:
        await served.sdk.responses.retrieve(response.id)
    assert response.id in str(caught.value)
    with pytest.raises(openai.NotFoundError):
        await served.sdk.responses.delete(response.id)
    with pytest.raises(openai.BadRequestError) as bad:
        await served.sdk.responses.create(model="mock", input="hi", previous_response_id=response.id)
    assert bad.value.code == "previous_response_not_found"


@pytest.mark.parametrize("config", [ServerConfig(response_store_bytes=0), ServerConfig()])
async def test_responses_that_are_not_stored_are_not_there(start: Start, config: ServerConfig) -> None:
    served = await start(service=Scripted("Hello."), config=EngineConfig(server=config))
    options: dict[str, Any] = {} if config.response_store_bytes == 0 else {"store": False}
    response = await served.sdk.responses.create(model="mock", input="hi", **options)
    assert response.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        await served.sdk.responses.retrieve(response.id)


async def test_nobody_sees_the_responses_of_another_key(start: Start) -> None:
    config = EngineConfig(server=ServerConfig(api_keys=("one", "two")))
    served = await start(service=Scripted("A secret."), config=config)
    one, two = (served.client(api_key=key) for key in ("one", "two"))
    response = await one.responses.create(model="mock", input="hi")
    unknown = response.id[:-1] + ("0" if response.id[-1] != "0" else "1")
    for attempt in (
        lambda name: two.responses.retrieve(name),
        lambda name: two.responses.delete(name),
        lambda name: two.responses.create(model="mock", input="hi", previous_response_id=name),
    ):
        answers = []
        for name in (response.id, unknown):
            with pytest.raises(openai.APIStatusError) as caught:
                await attempt(name)
            answers.append((caught.value.status_code, str(caught.value).replace(name, "ID")))
        assert answers[0] == answers[1], "another's response must look like one that never was"
    assert (await one.responses.retrieve(response.id)).output_text == "A secret."
    for sdk in (one, two):
        await sdk.close()


async def test_a_stored_response_cannot_be_streamed() -> None:
    async with client(Scripted("x")) as http:
        made = (await http.post(PATH, json={"input": "hi"})).json()
        reply = await http.get(f"{PATH}/{made['id']}?stream=true")
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "stream"


# --- names of the model ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aliases", "model", "status"),
    [
        ((), "mock", 200),
        ((), "gpt-9", 404),
        (("gpt-9",), "gpt-9", 200),
        (("gpt-9",), "gpt-91", 404),
        (("gpt-*", "o*"), "gpt-91", 200),
        (("gpt-*", "o*"), "claude", 404),
        (("*",), "anything", 200),
    ],
)
@pytest.mark.parametrize("path", [PATH, "/v1/messages", "/v1/chat/completions"])
async def test_aliases(aliases: tuple[str, ...], model: str, status: int, path: str) -> None:
    config = EngineConfig(server=ServerConfig(model_aliases=aliases))
    user = [{"role": "user", "content": "hi"}]
    body = {"model": model, "max_tokens": 5} | ({"input": "hi"} if path == PATH else {"messages": user})
    async with client(Scripted("x"), config) as http:
        reply = await http.post(path, json=body)
    assert reply.status_code == status, reply.text
    if status == 200:
        assert reply.json()["model"] == "mock", "the answer says which model it is from"


async def test_tools_that_stand_in_the_input(start: Start) -> None:
    """As Codex sends them for some names of models."""
    served = await start(service=Scripted(ANSWER))
    item = {"type": "additional_tools", "role": "developer", "tools": RESPONSES_TOOLS[1:]}
    given: Any = [item, {"role": "user", "content": "hi"}]
    response = await served.sdk.responses.create(model="mock", input=given, tools=RESPONSES_TOOLS[:1])
    assert calls_of(response) == EXPECTED
    assert [tool["function"]["name"] for tool in served.service.tools()] == ["look", "run"]
    assert [message["role"] for message in served.service.messages()] == ["user"]
    with pytest.raises(openai.BadRequestError) as caught:
        await served.sdk.responses.create(model="mock", input=[{**item, "tools": 1}, *given[1:]])
    assert caught.value.param == "input[0].tools"
