"""What each API dialect says of constrained output, and what the frontend is given for it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import openai
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longturn.errors import RequestError
from longturn.frontend.grammar import GrammarSpec, json_object
from longturn.server.openai_types import ChatRequest
from longturn.server.structured import grammar_of, response_format_grammar
from tests.server.served import Start

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}
TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"type":"string"}}}'


def chat(**fields: Any) -> ChatRequest:
    return msgspec.json.decode(msgspec.json.encode({"messages": [], **fields}), type=ChatRequest)


def of_json(**inner: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", **inner}}


GOOD: list[tuple[dict[str, Any], GrammarSpec | None]] = [
    ({}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {}}, None),
    ({"response_format": {"type": "json_object"}}, json_object()),
    (
        {"response_format": of_json(schema=SCHEMA, strict=True)},
        GrammarSpec("json_schema", TEXT, param="response_format.json_schema.schema"),
    ),
    (
        {"response_format": of_json(schema=SCHEMA)},
        GrammarSpec("json_schema", TEXT, strict=False, param="response_format.json_schema.schema"),
    ),
    (
        {"response_format": of_json(strict=None)},
        GrammarSpec("json_schema", '{"type":"object"}', strict=False, param="response_format.json_schema.schema"),
    ),
    ({"guided_json": SCHEMA}, GrammarSpec("json_schema", TEXT, param="guided_json")),
    ({"guided_json": json.dumps(SCHEMA)}, GrammarSpec("json_schema", TEXT, param="guided_json")),
    ({"guided_regex": "a+"}, GrammarSpec("regex", "a+", param="guided_regex")),
    ({"guided_choice": ["a", "b", "a"]}, GrammarSpec("choice", '["a","b"]', param="guided_choice")),
    ({"guided_grammar": "root ::= x"}, GrammarSpec("ebnf", "root ::= x", param="guided_grammar")),
    ({"structured_outputs": {"json": SCHEMA}}, GrammarSpec("json_schema", TEXT, param="structured_outputs.json")),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True, "regex": None, "json_object": False}},
        GrammarSpec("json_schema", TEXT, compact=True, param="structured_outputs.json"),
    ),
    ({"structured_outputs": {"choice": ["é"]}}, GrammarSpec("choice", '["é"]', param="structured_outputs.choice")),
    ({"structured_outputs": {"json_object": True}}, json_object(param="structured_outputs.json_object")),
]


@pytest.mark.parametrize(("fields", "spec"), GOOD)
def test_every_way_of_asking(fields: dict[str, Any], spec: GrammarSpec | None) -> None:
    assert grammar_of(chat(**fields)) == spec


BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "grammar"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": 5}}, "response_format.json_schema"),
    ({"response_format": of_json(schema=5)}, "response_format.json_schema.schema"),
    ({"response_format": of_json(schema=SCHEMA, strict="yes")}, "response_format.json_schema.strict"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_regex": 5}, "guided_regex"),
    ({"guided_choice": "ab"}, "guided_choice"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": {}}, "guided_grammar"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
    ({"structured_outputs": {"whitespace_pattern": "x", "json": {}}}, "structured_outputs.whitespace_pattern"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_what_is_malformed_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        grammar_of(chat(**fields))
    assert caught.value.param == param and param in str(caught.value) and caught.value.http_status == 400


def test_the_responses_apis_format_has_its_schema_inside() -> None:
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}
    assert response_format_grammar(form, "text.format") == GrammarSpec("json_schema", TEXT, param="text.format.schema")
    assert response_format_grammar({"type": "text"}, "text.format") is None
    with pytest.raises(RequestError, match=r"'text\.format' must be an object"):
        response_format_grammar([], "text.format")


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    ["type", "json_schema", "schema", "strict", "json", "regex", "choice", "grammar", "json_object"]
)


@given(st.dictionaries(NAMES, ANYTHING | st.sampled_from(["json_schema", "json_object", "text"]), max_size=5))
def test_nothing_but_a_named_refusal_comes_of_nonsense(form: dict[str, Any]) -> None:
    for fields in ({"response_format": form}, {"structured_outputs": form}):
        try:
            grammar_of(chat(**fields))
        except RequestError as error:
            assert error.param is not None and error.param in str(error)


async def test_the_sdks_schema_reaches_the_frontend(start: Start) -> None:
    class Person(pydantic.BaseModel):
        name: str
        age: int

    served = await start()
    # The mock knows nothing of grammars: what counts is what the frontend was given.
    with pytest.raises(openai.LengthFinishReasonError):
        await served.sdk.chat.completions.parse(
            model="mock", messages=[{"role": "user", "content": "x"}], response_format=Person
        )
    (request,) = served.service.requests
    spec = request.grammar
    assert spec is not None and spec.kind == "json_schema" and spec.strict
    assert list(json.loads(spec.text)["properties"]) == ["name", "age"]
