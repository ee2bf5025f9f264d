"""An agent loop through the official Anthropic SDK: ten turns, three tools, every call forced by the tools' grammar."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx
import pytest

from longturn.config import PAGE_TOKENS

from .conftest import Server
from .test_openai_agent import MODEL, TOOLS, TURNS, run

MESSAGES_TOOLS: list[Any] = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"]["description"],
        "input_schema": tool["function"]["parameters"],
    }
    for tool in TOOLS
]
MARK: Any = {"cache_control": {"type": "ephemeral"}}


@pytest.fixture
def sdk(server: Server) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def ask(sdk: anthropic.Anthropic, messages: list[Any], *, stream: bool, **options: Any) -> anthropic.types.Message:
    values: dict[str, Any] = {
        "model": MODEL,
        "max_tokens": 400,
        "system": [{"type": "text", "text": f"You tidy up a folder with tools, in messages. Run {stream}.", **MARK}],
        "messages": messages,
        "tools": MESSAGES_TOOLS,
        **options,
    }
    if not stream:
        return sdk.messages.create(**values)
    with sdk.messages.stream(**values) as events:
        return events.get_final_message()


def whole_pages(tokens: int) -> int:
    return tokens // PAGE_TOKENS * PAGE_TOKENS


@pytest.mark.parametrize("stream", [False, True])
def test_ten_turns_reuse_all_that_was_computed(sdk: anthropic.Anthropic, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "Look at every file, and keep a note of what you find."}]
    computed = 0
    ids: list[str] = []
    for turn in range(TURNS):
        choice: Any = {"type": "any", "disable_parallel_tool_use": turn != 4}
        if turn % 3 == 2:
            choice = {"type": "tool", "name": "write_note"}
        counted = sdk.messages.count_tokens(
            model=MODEL,
            system=[{"type": "text", "text": f"You tidy up a folder with tools, in messages. Run {stream}.", **MARK}],
            messages=messages,
            tools=MESSAGES_TOOLS,
        )
        message = ask(sdk, messages, stream=stream, tool_choice=choice, extra_body={"temperature": 1, "seed": turn})
        assert message.stop_reason == "tool_use", (turn, message)
        usage = message.usage
        assert usage.cache_read_input_tokens is not None and usage.cache_creation_input_tokens is not None
        prompt = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
        # All whole pages of the turn before, and nothing else can be there: the rest of the prompt is new.
        if turn:
            assert usage.cache_read_input_tokens == whole_pages(computed)
        else:
            assert prompt == counted.input_tokens
        assert usage.cache_read_input_tokens + usage.cache_creation_input_tokens == whole_pages(prompt)
        # The last sampled token was never computed.
        computed = prompt + usage.output_tokens - 1
        calls = [block for block in message.content if block.type == "tool_use"]
        if turn % 3 == 2:
            assert [call.name for call in calls] == ["write_note"]
        elif turn != 4:
            assert len(calls) == 1
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": call.id, "content": run(call.name, dict(call.input))}
            for call in calls
        ]
        results[-1].update(MARK)
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
        ids += [call.id for call in calls]
    assert len(set(ids)) == len(ids) >= TURNS
    assert computed > 3 * PAGE_TOKENS
    # The loop ends in words.
    message = ask(sdk, messages, stream=False, tool_choice={"type": "none"}, max_tokens=12)
    assert [block.type for block in message.content] == ["text"]
    assert message.usage.cache_read_input_tokens == whole_pages(computed)


def test_streamed_and_plain_messages_are_the_same(sdk: anthropic.Anthropic) -> None:
    options: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Keep a note of what you like."}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "extra_body": {"temperature": 1, "seed": 5},
        "system": "You help.",
    }
    plain, streamed = (ask(sdk, stream=stream, **options) for stream in (False, True))
    content = [
        [block.model_dump(exclude={"id", "parsed_output"}) for block in message.content]
        for message in (plain, streamed)
    ]
    assert content[0] == content[1] and plain.stop_reason == streamed.stop_reason == "tool_use"
    assert plain.usage.output_tokens == streamed.usage.output_tokens


def test_structured_output_and_stop_sequences(sdk: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    user: Any = [{"role": "user", "content": "Who are you?"}]
    message = sdk.messages.create(
        model=MODEL,
        max_tokens=100,
        messages=user,
        extra_body={"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    )
    (block,) = message.content
    assert block.type == "text" and set(json.loads(block.text)) == {"name", "age"}
    stopped = sdk.messages.create(model=MODEL, max_tokens=60, messages=user, stop_sequences=[" "])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " ")
    text = "".join(block.text for block in stopped.content if block.type == "text")
    assert " " not in text


def test_too_long_a_prompt_is_refused_in_anthropics_form(server: Server, sdk: anthropic.Anthropic) -> None:
    body = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "a b " * 40_000}]}
    reply = httpx.post(f"{server.url}/v1/messages", json=body, timeout=60, trust_env=False)
    assert reply.status_code == 400 and reply.json()["error"]["type"] == "invalid_request_error"
    assert "tokens" in reply.json()["error"]["message"]
