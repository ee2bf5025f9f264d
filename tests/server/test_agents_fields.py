"""docs/agents.md says what becomes of the fields of Responses and Messages; here it is compared and tried."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import message_create_params as messages_params
from anthropic.types.beta import message_create_params as beta_params
from openai.types.responses import response_create_params as responses_params

from longturn.server.messages_types import MessagesRequest
from longturn.server.openai_types import SamplingFields
from longturn.server.responses_types import ResponsesRequest
from tests.server.dialects import Scripted, client

try:  # newer than the oldest SDK that is supported
    from openai.types.beta import response_create_params as beta_responses
except ImportError:
    beta_responses = None  # type: ignore[assignment]

DOCS = Path(__file__).parents[2] / "docs" / "agents.md"
ROW = re.compile(r"^\| `(\w+)` \| (\w*) ?\| (\w*) ?\|", re.M)
TABLE = {name: {"responses": first, "messages": second} for name, first, second in ROW.findall(DOCS.read_text())}
BODIES: dict[str, dict[str, Any]] = {
    "responses": {"input": "x"},
    "messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5},
}
STRUCTS: dict[str, type[Any]] = {"responses": ResponsesRequest, "messages": MessagesRequest}
ASKING: dict[str, Any] = {
    "truncation": "auto", "context_management": [{"type": "x"}], "top_logprobs": 1, "n": 2, "mcp_servers": [{}],
    "metadata": {}, "stream_options": {"include_usage": True}, "include": ["reasoning.encrypted_content"], "user": "u",
    "safety_identifier": "s", "multi_agent": {"enabled": True},
}  # fmt: skip
"""Values that ask for something, where true does not."""


def fields(kind: str, verdict: str) -> list[str]:
    return [name for name, verdicts in TABLE.items() if verdicts[kind] == verdict]


@pytest.mark.parametrize(
    ("kind", "base"),
    [
        ("responses", responses_params.ResponseCreateParamsBase),
        *((("responses", beta_responses.ResponseCreateParamsBase),) if beta_responses is not None else ()),
        ("messages", messages_params.MessageCreateParamsBase),
        ("messages", beta_params.MessageCreateParamsBase),
    ],
)
def test_the_table_is_whole(kind: str, base: Any) -> None:
    told = {name for name, verdicts in TABLE.items() if verdicts[kind]}
    assert {verdicts[kind] for verdicts in TABLE.values()} == {"honoured", "ignored", "refused", ""}
    hints = set(typing.get_type_hints(base)) - {"betas"}  # which is a header
    assert hints <= told, "a field of the SDK's is not told of"
    own = set(STRUCTS[kind].__struct_fields__)
    assert own - set(SamplingFields.__struct_fields__) <= told, "a field that is decoded is not told of"
    assert set(fields(kind, "honoured")) | set(fields(kind, "refused")) <= own, "msgspec drops others"


@pytest.mark.parametrize("kind", list(BODIES))
async def test_refused_fields_are_named_and_pass_when_they_ask_for_nothing(kind: str) -> None:
    async with client(Scripted("x")) as http:
        for name in fields(kind, "refused"):
            reply = await http.post(f"/v1/{kind}", json={**BODIES[kind], name: ASKING.get(name, True)})
            assert reply.status_code == 400 and reply.json()["error"]["param"] == name, reply.text
            assert (await http.post(f"/v1/{kind}", json={**BODIES[kind], name: None})).status_code == 200, name


@pytest.mark.parametrize("kind", list(BODIES))
async def test_ignored_fields_change_nothing(kind: str) -> None:
    service = Scripted("x")
    async with client(service) as http:
        await http.post(f"/v1/{kind}", json={**BODIES[kind], "seed": 1})
        for name in fields(kind, "ignored"):
            body = {**BODIES[kind], "seed": 1, name: ASKING.get(name, True)}
            reply = await http.post(f"/v1/{kind}", json=body)
            assert reply.status_code == 200, (name, reply.text)
            first, last = service.requests[0], service.requests[-1]
            assert (last.prompt, last.sampling, last.tool_choice) == (first.prompt, first.sampling, first.tool_choice)
