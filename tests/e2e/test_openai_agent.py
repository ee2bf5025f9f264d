"""An agent loop through the official OpenAI SDK: ten turns, three tools, every call forced by the tools' grammar."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from longturn.config import PAGE_TOKENS

from .conftest import Server

MODEL = "SmolLM2-135M-Instruct"
TURNS = 10


def tool(name: str, description: str, properties: dict[str, Any]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


FILES = {"main.py": 'print("hello")\n' * 12, "notes.txt": "buy milk\nécrire à Zoë\n", "todo.md": "- [ ] test\n"}
TOOLS = [
    tool("list_files", "Names of the files in a folder", {"folder": {"enum": [".", "src"]}}),
    tool("read_file", "Text of a file", {"path": {"enum": list(FILES)}, "lines": {"type": "integer", "maximum": 99}}),
    tool("write_note", "Keep a note", {"text": {"type": "string", "maxLength": 30}, "done": {"type": "boolean"}}),
]
PARAMETERS = {entry["function"]["name"]: entry["function"]["parameters"] for entry in TOOLS}


def run(name: str, arguments: dict[str, Any]) -> str:
    """What the agent does for the model."""
    assert set(arguments) == set(PARAMETERS[name]["properties"])
    if name == "list_files":
        return "\n".join(FILES)
    if name == "read_file":
        return FILES[arguments["path"]]
    assert len(arguments["text"]) <= 30 and isinstance(arguments["done"], bool)
    return "kept"


def ask(server: Server, messages: list[Any], *, stream: bool, **options: Any) -> tuple[Any, Any, str]:
    """The message, the usage and the finish reason of one turn."""
    client = server.client()
    values = {"model": MODEL, "messages": messages, "tools": TOOLS, "max_tokens": 400, **options}
    if not stream:
        reply = client.chat.completions.create(**values)
        return reply.choices[0].message, reply.usage, reply.choices[0].finish_reason
    with client.chat.completions.stream(**values, stream_options={"include_usage": True}) as events:
        for _ in events:
            pass
        reply = events.current_completion_snapshot
    return reply.choices[0].message, reply.usage, reply.choices[0].finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_ten_turns_reuse_all_that_was_computed(server: Server, stream: bool) -> None:
    messages: list[Any] = [
        {"role": "system", "content": f"You tidy up a folder with tools. Run {stream}."},
        {"role": "user", "content": "Look at every file, and keep a note of what you find."},
    ]
    computed = 0
    called: list[str] = []
    ids: set[str] = set()
    for turn in range(TURNS):
        choice: Any = "required"
        if turn % 3 == 2:
            choice = {"type": "function", "function": {"name": "write_note"}}
        message, usage, finish = ask(
            server, messages, stream=stream, tool_choice=choice, parallel_tool_calls=False, temperature=1, seed=turn
        )
        assert finish == "tool_calls" and message.tool_calls, (turn, message)
        assert usage.prompt_tokens_details.cached_tokens >= computed // PAGE_TOKENS * PAGE_TOKENS
        if turn:
            # All whole pages of the turn before, and nothing else can be there: the rest of the prompt is new.
            assert usage.prompt_tokens_details.cached_tokens == computed // PAGE_TOKENS * PAGE_TOKENS
        # The last sampled token was never computed.
        computed = usage.total_tokens - 1
        calls = [call.model_dump(include={"id", "type", "function"}) for call in message.tool_calls]
        for call in calls:
            call["function"] = {key: call["function"][key] for key in ("name", "arguments")}
        if turn % 3 == 2:
            assert [call["function"]["name"] for call in calls] == ["write_note"]
        assert len(calls) == 1
        messages.append({"role": "assistant", "content": message.content, "tool_calls": calls})
        for call in calls:
            arguments = json.loads(call["function"]["arguments"])
            result = run(call["function"]["name"], arguments)
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
            called.append(call["function"]["name"])
            ids.add(call["id"])
    assert len(ids) == len(called) >= TURNS
    assert computed > 3 * PAGE_TOKENS
    # The loop ends in words.
    message, usage, _ = ask(server, messages, stream=False, tool_choice="none", max_tokens=12, temperature=0)
    assert message.content and not message.tool_calls
    assert usage.prompt_tokens_details.cached_tokens == computed // PAGE_TOKENS * PAGE_TOKENS


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "read_file"}}])
def test_streamed_and_plain_calls_are_the_same(server: Server, choice: Any) -> None:
    messages = [{"role": "user", "content": "Look into the file."}]
    for seed in range(2):
        options = {"tool_choice": choice, "temperature": 1, "seed": seed, "max_tokens": 100}
        (plain, _, finish), (streamed, _, finish_streamed) = (
            ask(server, messages, stream=stream, **options) for stream in (False, True)
        )
        # Where several calls are allowed the model may not come to an end of them; the whole ones count all the same.
        assert finish == finish_streamed
        assert finish == "tool_calls" or (finish == "length" and choice == "required")
        calls = [[(c.function.name, c.function.arguments) for c in m.tool_calls or ()] for m in (plain, streamed)]
        assert calls[0] == calls[1]
        for name, arguments in calls[0]:
            jsonschema.validate(json.loads(arguments), PARAMETERS[name])


def test_a_strict_function_binds_what_the_model_decides(server: Server) -> None:
    tools = [{**entry, "function": {**entry["function"], "strict": True}} for entry in TOOLS]
    for seed in range(2):
        message, _, finish = ask(
            server,
            [{"role": "user", "content": "Read main.py with read_file."}],
            stream=False,
            tools=tools,
            temperature=1,
            seed=seed,
            max_tokens=60,
        )
        for call in message.tool_calls or ():
            jsonschema.validate(json.loads(call.function.arguments), PARAMETERS[call.function.name])
        assert message.tool_calls or message.content
        assert finish in ("tool_calls", "stop", "length")


def test_a_schema_that_cannot_be_followed_is_that_requests_error(server: Server) -> None:
    impossible = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)y"}}, "required": ["a"]}
    function = {"name": "f", "parameters": impossible, "strict": True}
    with pytest.raises(openai.BadRequestError, match="tool") as refused:
        ask(
            server,
            [{"role": "user", "content": "hi"}],
            stream=False,
            tools=[{"type": "function", "function": function}],
        )
    assert refused.value.param == "tools" and "\n" not in str(refused.value.body)
