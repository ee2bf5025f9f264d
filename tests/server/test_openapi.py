"""The served OpenAPI document says what is served, and schemathesis, which reads it, finds no 5xx."""

from __future__ import annotations

from typing import Any

import httpx
import jsonschema
import pytest
from hypothesis import HealthCheck, settings
from starlette.routing import Route

from longturn.config import EngineConfig, ServerConfig
from longturn.engine.records import FinishReason
from longturn.errors import RequestError
from longturn.frontend.records import TextChunk, TextRequest, Usage
from longturn.server.app import create_app
from longturn.server.openapi import openapi_document, operations
from longturn.server.ports import ServedModel
from tests.server.byte_service import render
from tests.server.test_http import Healthy

schemathesis = pytest.importorskip("schemathesis")


class ShortAnswers:
    """Two letters to everything, at once."""

    async def generate(self, request: TextRequest) -> Any:
        usage = Usage(1, 2, 0)
        yield TextChunk("ab", (1, 2), prompt_token_ids=(5,), finish=FinishReason.STOP, usage=usage)

    async def tokenize(self, prompt: Any, *, add_special_tokens: bool, **scope: Any) -> list[int]:
        return render(prompt)

    def detokenize(self, token_ids: Any) -> str:
        if any(not 0 <= token < 256 for token in token_ids):
            raise RequestError("a token id is out of range", param="tokens")
        return bytes(token_ids).decode("latin-1")


class Resettable(Healthy):
    async def reset_prefix_cache(self) -> int:
        return 0


def make_app() -> Any:
    engine: Any = Resettable()
    service: Any = ShortAnswers()
    config = EngineConfig(server=ServerConfig(model_aliases=("*",)))
    return create_app(service, config, engine=engine, model=ServedModel("mock", 2000))


APP = make_app()
schema = schemathesis.openapi.from_asgi("/openapi.json", APP)


@schema.parametrize()
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_request_is_answered_with_5xx(case: Any) -> None:
    response = case.call()
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert "error" in response.json()


async def test_the_document_names_every_route() -> None:
    served = {
        (method.lower(), route.path.replace(":path", ""))
        for route in _routes(APP)
        for method in route.methods or ()
        if method != "HEAD"
    }
    described = {(operation.method, operation.path) for operation in operations()}
    assert described == served - {("get", "/openapi.json")}


def _routes(app: Any) -> list[Route]:
    while not hasattr(app, "routes"):
        app = app._app
    return [route for route in app.routes if isinstance(route, Route)]


async def test_bodies_that_are_served_fit_their_schema() -> None:
    document = openapi_document()
    body = {"messages": [{"role": "user", "content": "x"}], "n": 2, "stop": ["a"], "logit_bias": {"5": 1}}
    path = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator({**path, "components": document["components"]})
    validator.validate(body)
    for wrong in ({}, {"messages": "x"}, {**body, "n": "two"}, {**body, "stop": 5}):
        assert not validator.is_valid(wrong)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(APP), base_url="http://test") as http:
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
