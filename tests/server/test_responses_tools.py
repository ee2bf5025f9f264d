"""Custom tools and namespaces in the Responses API, and tools that nobody here can run."""

from __future__ import annotations

from typing import Any

import pytest

from longturn.config import EngineConfig, ServerConfig
from longturn.errors import RequestError
from longturn.frontend.conversation_keys import canonical_message
from longturn.server.responses_tools import choice_of, client_tools, custom_arguments, custom_input
from tests.frontend.m3 import block, invoke, tag
from tests.server.dialects import MESSAGES_TOOLS, Scripted, client, events_of
from tests.server.served import Start

PATCH = "*** Begin Patch\n*** Add File: é.py\n+x = 1\n*** End Patch"
TOOLS: list[Any] = [
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "***"'},
    },
    {
        "type": "namespace",
        "name": "mcp__docs",
        "description": "Documents",
        "tools": [
            {"type": "function", "name": "find", "parameters": {"type": "object"}, "strict": False},
            {"type": "custom", "name": "ask"},
        ],
    },
    {"type": "function", "name": "find", "parameters": {"type": "object"}, "strict": True},
]
HOSTED: list[Any] = [{"type": "web_search"}, {"type": "image_generation"}, {"type": "tool_search"}]
CALLS = block(
    invoke("apply_patch", tag("input", PATCH)),
    invoke("mcp__docs__find", tag("q", "x")),
    invoke("mcp__docs__ask", tag("input", "why?")),
    invoke("find", ""),
)
BODY: dict[str, Any] = {"input": "go", "tools": TOOLS}


async def test_custom_tools_and_namespaces_come_back_as_the_client_knows_them() -> None:
    service = Scripted(CALLS, "done")
    async with client(service) as http:
        plain = (await http.post("/v1/responses", json=BODY)).json()
        names = [tool["function"]["name"] for tool in service.tools()]
        assert names == ["apply_patch", "mcp__docs__find", "mcp__docs__ask", "find"]
        assert 'start: "***"' in service.tools()[0]["function"]["description"]
        output = plain["output"]
        said = [(item["type"], item["name"], item.get("namespace")) for item in output]
        assert said == [
            ("custom_tool_call", "apply_patch", None),
            ("function_call", "find", "mcp__docs"),
            ("custom_tool_call", "ask", "mcp__docs"),
            ("function_call", "find", None),
        ]
        assert [item.get("input", item.get("arguments")) for item in output] == [PATCH, '{"q":"x"}', "why?", "{}"]
        results = [
            {"type": item["type"] + "_output", "call_id": item["call_id"], "output": item["name"]} for item in output
        ]
        await http.post("/v1/responses", json={**BODY, "input": results, "previous_response_id": plain["id"]})
        by_id = service.messages()
        everything = [{"role": "user", "content": "go"}, *output, *results]
        await http.post("/v1/responses", json={**BODY, "input": everything})
    assert list(map(canonical_message, service.messages())) == list(map(canonical_message, by_id))
    assert [message["role"] for message in by_id] == ["user", "assistant", *["tool"] * 4]
    functions = [call["function"] for call in by_id[1]["tool_calls"]]
    assert [function["name"] for function in functions] == names
    assert custom_input(functions[0]["arguments"]) == PATCH


async def test_streamed_custom_calls(start: Start) -> None:
    served = await start(service=Scripted(CALLS, piece=3))
    async with served.http() as http:
        events = events_of((await http.post("/v1/responses", json={**BODY, "stream": True})).text)
        final = events[-1][1]["response"]["output"]
    assert [event["item"] for name, event in events if name == "response.output_item.done"] == final
    joined: dict[str, str] = {}
    for name, event in events:
        if name.endswith((".custom_tool_call_input.delta", ".function_call_arguments.delta")):
            joined[event["item_id"]] = joined.get(event["item_id"], "") + event["delta"]
    assert joined == {item["id"]: item.get("input", item.get("arguments")) for item in final}
    done = [event["input"] for name, event in events if name == "response.custom_tool_call_input.done"]
    assert done == [PATCH, "why?"]
    # The SDK reads the same.
    async with served.sdk.responses.stream(model="mock", input="go", tools=[TOOLS[0]]) as stream:
        async for _ in stream:
            pass
        response = await stream.get_final_response()
    assert response.output[0].type == "custom_tool_call" and response.output[0].input == PATCH


@pytest.mark.parametrize("text", ["", "x", 'a "quoted"\n\\ \u2028 é😀', '{"input": 1}'])
def test_an_input_survives_its_arguments(text: str) -> None:
    assert custom_input(custom_arguments(text)) == text


@pytest.mark.parametrize("arguments", ["", "[1]", '{"input": 5}', '{"patch": "x"}', "{" * 100_000])
def test_arguments_that_have_no_input_are_the_input(arguments: str) -> None:
    assert custom_input(arguments) == arguments


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "custom", "name": "apply_patch"}, ("apply_patch",)),
        ({"type": "function", "name": "find"}, ("find",)),
        ({"type": "function", "name": "find", "namespace": "mcp__docs"}, ("mcp__docs__find",)),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [
                    {"type": "custom", "name": "ask", "namespace": "mcp__docs"},
                    {"type": "function", "name": "find"},
                ],
            },
            ("mcp__docs__ask", "find"),
        ),
    ],
)
def test_tool_choice(choice: dict[str, Any], names: tuple[str, ...]) -> None:
    made = choice_of(choice, client_tools(TOOLS, "refuse"), None)
    assert (made.mode, made.names) == ("required", names)


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "namespace", "tools": []}], "tools[0].name"),
        ([{"type": "namespace", "name": "n"}], "tools[0].tools"),
        ([{"type": "namespace", "name": "n", "tools": [5]}], "tools[0].tools"),
        ([{"type": "namespace", "name": "n", "tools": [{"type": "mcp"}]}], "tools[0].tools[0].type"),
        ([{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}], "tools[0].tools[0].name"),
        ([TOOLS[1], {"type": "function", "name": "mcp__docs__find"}], "tools[1].name"),
        ([{"name": "x"}], "tools[0].type"),
        ([{"type": "function", "name": "a<b"}], "tools[0].name"),
        ([{"type": "function", "name": "f"}, {"type": "function", "name": "f", "strict": True}], "tools[1].name"),
    ],
)
def test_malformed_tools_are_named(tools: list[Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        client_tools(tools, "refuse")
    assert caught.value.param == param and f"'{param}" in str(caught.value)


def test_a_tool_that_an_input_repeats_is_one() -> None:
    made = client_tools([*TOOLS, *TOOLS], "refuse")
    assert made == client_tools(TOOLS, "refuse")


async def test_tools_that_run_on_the_server_are_refused_or_left_out() -> None:
    messages = {"max_tokens": 9, "messages": [{"role": "user", "content": "go"}]}
    search = {"type": "web_search_20250305", "name": "web_search"}
    asked = (
        ("/v1/responses", {"input": "go", "tools": [*HOSTED, TOOLS[2]]}, "find"),
        ("/v1/messages", {**messages, "tools": [search, MESSAGES_TOOLS[0]]}, "look"),
        ("/v1/messages/count_tokens", {**messages, "tools": [search, MESSAGES_TOOLS[0]]}, None),
    )
    service = Scripted("x")
    async with client(service) as http:
        for path, body, _ in asked:
            reply = await http.post(path, json=body)
            assert reply.status_code == 400 and reply.json()["error"]["param"] == "tools[0].type"
            assert "web_search" in reply.text and "--server-unsupported-tools drop" in reply.text
    async with client(service, EngineConfig(server=ServerConfig(unsupported_tools="drop"))) as http:
        for path, body, left in asked:
            reply = await http.post(path, json=body)
            assert reply.status_code == 200, reply.text
            if left is not None:
                assert [tool["function"]["name"] for tool in service.tools()] == [left]
