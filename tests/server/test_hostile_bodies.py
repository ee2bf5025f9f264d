"""Bodies of the Responses and the Messages API with anything anywhere: an answer or a refusal, never a 5xx."""

from __future__ import annotations

import copy
import functools
import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longturn.engine.records import EngineRequest, RequestOutput
from longturn.frontend.frontend import Frontend
from tests.frontend.fakes import outputs_of
from tests.frontend.test_parsers_output import EOS, TOKENIZER, m3_frontend
from tests.server.dialects import MESSAGES_TOOLS, RESPONSES_TOOLS, client, events_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
RESPONSES: dict[str, Any] = {
    "model": "mock",
    "instructions": "You help.",
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "one"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"path": "x"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "text"},
    ],
    "tools": RESPONSES_TOOLS,
    "tool_choice": "auto",
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": "low"},
    "metadata": {"a": "b"},
    "max_output_tokens": 20,
    "temperature": 1,
    "previous_response_id": None,
    "prompt_cache_key": "k",
}
MESSAGES: dict[str, Any] = {
    "model": "mock",
    "max_tokens": 20,
    "system": [{"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "one"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"path": "x"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "text"}]},
    ],
    "tools": MESSAGES_TOOLS,
    "tool_choice": {"type": "auto"},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "stop_sequences": ["x"],
    "metadata": {"user_id": "u"},
    "output_config": {"effort": "low"},
}

numbers = st.sampled_from([0, -1, 1, 2**31, 2**63, 2**64, 10**30, 1e308, -0.0, 0.5])
texts = st.sampled_from(["", "x", "\x00", "\u202e", "é😀", "text", "user", "assistant", "function", "]~b]", "[e~["])
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of every value inside."""
    found = [path] if path else []
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        found += places(child, (*path, key))
    return found


@st.composite
def bodies(draw: st.DrawFn, valid: dict[str, Any]) -> dict[str, Any]:
    """A valid body with a few values exchanged, taken away or moved."""
    body = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from(places(body)))
        inside: Any = body
        for key in way:
            inside = inside[key]
        kind = draw(st.integers(0, 3))
        if kind == 0:
            del inside[last]
        elif kind == 1:
            inside[last] = {draw(texts): inside[last]}
        else:
            inside[last] = draw(values)
        if not places(body):
            break
    return body


def script(request: EngineRequest) -> list[RequestOutput]:
    return outputs_of(request, TOKENIZER.encode("<mm:think>hm</mm:think>An answer."), stop_token_id=EOS)


@functools.cache
def frontend() -> Frontend:
    return m3_frontend(script)


async def answer(path: str, body: dict[str, Any], stream: bool) -> None:
    async with client(frontend()) as http:
        reply = await http.post(path, content=json.dumps({**body, "stream": stream}))
    assert reply.status_code in (200, 400, 404), (reply.status_code, reply.text)
    if reply.status_code != 200:
        error = reply.json()["error"]
        assert error["type"] in ("invalid_request_error", "not_found_error") and "\n" not in error["message"]
    elif stream:
        assert events_of(reply.text)[-1][0] in ("response.completed", "response.incomplete", "message_stop")


fuzz = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@fuzz
@given(bodies(RESPONSES), st.booleans())
async def test_responses(body: dict[str, Any], stream: bool) -> None:
    await answer("/v1/responses", body, stream)


@fuzz
@given(bodies(MESSAGES), st.booleans())
async def test_messages(body: dict[str, Any], stream: bool) -> None:
    await answer("/v1/messages", body, stream)


@settings(fuzz, max_examples=50)
@given(bodies(MESSAGES))
async def test_count_tokens(body: dict[str, Any]) -> None:
    async with client(frontend()) as http:
        reply = await http.post("/v1/messages/count_tokens", content=json.dumps(body))
    assert reply.status_code in (200, 400, 404), (reply.status_code, reply.text)


async def test_text_that_is_no_unicode() -> None:
    for path, body in (
        ("/v1/responses", '{"input": "\\ud800"}'),
        ("/v1/messages", '{"max_tokens": 5, "messages": [{"role": "user", "content": "\\ud800"}]}'),
    ):
        async with client(frontend()) as http:
            reply = await http.post(path, content=body)
        assert reply.status_code == 400, reply.text
