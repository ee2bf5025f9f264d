"""docs/api.md says what becomes of every request field; here it is compared with the SDK and tried."""

from __future__ import annotations

import re
import typing
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params

from longturn.config import EngineConfig
from longturn.server.app import create_app
from longturn.server.openai_types import ChatRequest, CompletionRequest
from longturn.server.ports import ServedModel
from longturn.server.refused import REFUSED
from tests.server.test_http import Healthy
from tests.server.test_openapi import ShortAnswers

DOCS = Path(__file__).parents[2] / "docs" / "api.md"
ROW = re.compile(r"^\| `(\w+)` \| (\w*) ?\| (\w*) ?\|", re.M)
TABLE = {name: {"chat": chat, "completions": text} for name, chat, text in ROW.findall(DOCS.read_text())}
VERDICTS = {"honoured", "ignored", "refused", ""}
STRUCTS: dict[str, type[Any]] = {"chat": ChatRequest, "completions": CompletionRequest}
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [{"role": "user", "content": "x"}]},
    "completions": {"prompt": "x"},
}
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
ASKING: dict[str, Any] = {"include_reasoning": False, "modalities": ["audio"], "functions": []}
"""Values with which a refused field asks for something, where true does not."""


def fields(kind: str, verdict: str) -> list[str]:
    return [name for name, verdicts in TABLE.items() if verdicts[kind] == verdict]


def of_the_sdk(module: Any) -> set[str]:
    parts = ("CompletionCreateParamsBase", "CompletionCreateParamsNonStreaming", "CompletionCreateParamsStreaming")
    return set().union(*(typing.get_type_hints(getattr(module, part)) for part in parts))


def test_the_table_is_whole() -> None:
    assert len(TABLE) > 70 and all(set(verdicts.values()) <= VERDICTS for verdicts in TABLE.values())
    for kind, module in (("chat", chat_params), ("completions", text_params)):
        told = {name for name, verdicts in TABLE.items() if verdicts[kind]}
        assert of_the_sdk(module) <= told, "a field of OpenAI's is not told of"
        declared = set(STRUCTS[kind].__struct_fields__)
        assert declared <= told, "a field that is decoded is not told of"
        assert set(fields(kind, "honoured")) | set(fields(kind, "refused")) <= declared, "msgspec drops others"


def test_every_refusal_has_its_reason() -> None:
    named = {*fields("chat", "refused"), *fields("completions", "refused")}
    by_hand = {"audio", "modalities", "functions", "function_call", "include_reasoning", "echo"}
    assert named == set(REFUSED) | by_hand


@pytest.fixture
def app() -> Any:
    engine: Any = Healthy()
    service: Any = ShortAnswers()
    return create_app(service, EngineConfig(), engine=engine, model=ServedModel("mock", 2000))


async def post(app: Any, kind: str, **more: Any) -> httpx.Response:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        return await http.post(PATHS[kind], json={**BODIES[kind], **more})


@pytest.mark.parametrize("kind", list(PATHS))
async def test_refused_fields_are_named_and_pass_when_they_ask_for_nothing(app: Any, kind: str) -> None:
    for name in fields(kind, "refused"):
        reply = await post(app, kind, **{name: ASKING.get(name, True if name != "audio" else {})})
        assert reply.status_code == 400, name
        assert reply.json()["error"]["param"] == name
        assert (await post(app, kind, **{name: None})).status_code == 200, name


@pytest.mark.parametrize("kind", list(PATHS))
async def test_ignored_and_unknown_fields_change_nothing(app: Any, kind: str) -> None:
    plain = (await post(app, kind)).json()["choices"]
    for name in [*fields(kind, "ignored"), "a_field_that_nobody_knows"]:
        value = "x" if name == "user" else {"a": [1]}
        reply = await post(app, kind, **{name: value})
        assert reply.status_code == 200 and reply.json()["choices"] == plain, name
