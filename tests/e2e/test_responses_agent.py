"""An agent loop through the Responses API: ten turns, three tools, with the whole input or by previous_response_id."""

from __future__ import annotations

import json
from typing import Any

import pytest

from longturn.config import PAGE_TOKENS

from .conftest import Server
from .test_openai_agent import MODEL, TOOLS, TURNS, run

RESPONSES_TOOLS: list[Any] = [{"type": "function", **tool["function"], "strict": True} for tool in TOOLS]


def whole_pages(tokens: int) -> int:
    return tokens // PAGE_TOKENS * PAGE_TOKENS


@pytest.mark.parametrize(("stored", "stream"), [(False, True), (True, False)])
def test_ten_turns_reuse_all_that_was_computed(server: Server, stored: bool, stream: bool) -> None:
    client = server.client()
    common: dict[str, Any] = {
        "model": MODEL,
        "instructions": f"You tidy up a folder with tools. Run {stored} {stream}.",
        "tools": RESPONSES_TOOLS,
        "max_output_tokens": 400,
        "store": stored,
    }
    new: list[Any] = [{"role": "user", "content": "Look at every file, and keep a note of what you find."}]
    items: list[Any] = []
    previous: str | None = None
    computed = 0
    for turn in range(TURNS):
        options: dict[str, Any] = {
            **common,
            "tool_choice": {"type": "function", "name": "write_note"} if turn % 3 == 2 else "required",
            "parallel_tool_calls": turn == 4,
            "extra_body": {"temperature": 1, "seed": turn},
        }
        if stored:
            options |= {"input": new, "previous_response_id": previous}
        else:
            items += new
            options["input"] = items
        if stream:
            with client.responses.stream(**options) as events:
                response = events.get_final_response()
        else:
            response = client.responses.create(**options)
        assert response.status == "completed" and response.usage is not None
        cached = response.usage.input_tokens_details.cached_tokens
        if turn:
            # All whole pages of the turn before, and nothing else can be there: the rest of the prompt is new.
            assert cached == whole_pages(computed)
        # The last sampled token was never computed.
        computed = response.usage.total_tokens - 1
        calls = [item for item in response.output if item.type == "function_call"]
        assert len(calls) == len(response.output) and (len(calls) == 1 or turn == 4)
        items += [item.to_dict() for item in response.output]
        new = [
            {
                "type": "function_call_output",
                "call_id": call.call_id,
                "output": run(call.name, json.loads(call.arguments)),
            }
            for call in calls
        ]
        previous = response.id
    assert computed > 3 * PAGE_TOKENS


def test_structured_output(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    response = server.client().responses.create(
        model=MODEL,
        input="Who are you?",
        text={"format": {"type": "json_schema", "name": "person", "schema": schema, "strict": True}},
        max_output_tokens=100,
    )
    assert set(json.loads(response.output_text)) == {"name", "age"}
