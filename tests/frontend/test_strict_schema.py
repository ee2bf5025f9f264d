"""Strict functions in formats that write texts as they are: what is said of a text is kept, or refused."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from longturn.errors import RequestError
from longturn.frontend.grammar import json_schema
from longturn.frontend.parsers.base import parse_tools
from longturn.frontend.parsers.registry import TOOL_FORMATS
from longturn.frontend.parsers.text_formats import TEXT_FORMATS
from tests.frontend.test_tool_grammar import accepts, answer, call, grammar, tool, walk

FORMS = ["minimax_m3", "qwen3_coder"]
STRING: dict[str, Any] = {"type": "string"}


def of(schema: Any) -> dict[str, Any]:
    """Parameters with one that is required."""
    deeper = {"short": {**STRING, "maxLength": 3}, "odd": {**STRING, "format": "iri"}}
    return {"type": "object", "properties": {"x": schema}, "required": ["x"], "$defs": deeper}


LEFT_OUT: list[tuple[Any, str]] = [
    ({**STRING, "format": "iri"}, "format"),
    ({**STRING, "not": {"const": "x"}}, "not"),
    ({**STRING, "if": {"minLength": 2}, "then": {"pattern": "a"}}, "if"),
    ({**STRING, "maxLength": 2, "enum": ["long", "b"]}, "maxLength"),
    ({**STRING, "allOf": [{"maxLength": 3}, {"pattern": "a"}]}, "maxLength"),
    ({"anyOf": [{**STRING, "maxLength": 3}, {"type": "null"}, {"type": "integer"}]}, "maxLength"),
    ({"anyOf": [{**STRING, "maxLength": 3}, {"type": "null"}], "pattern": "a"}, "pattern"),
    ({"anyOf": [{**STRING, "format": "iri"}, {"type": "null"}]}, "format"),
    ({"anyOf": [STRING, {"type": "integer", "minimum": 5}]}, "minimum"),
    ({"anyOf": [STRING, {"type": "array", "items": {"type": "integer"}}]}, "items"),
    ({"anyOf": [STRING, {"enum": [5]}]}, "enum"),
    ({"anyOf": [STRING, {"$ref": "#/$defs/short"}]}, "maxLength"),
    ({"type": ["string", "null", "integer"], "pattern": "a"}, "pattern"),
    ({"$ref": "#/$defs/odd"}, "format"),
    ({"$ref": "#/$defs/none"}, "$ref"),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("schema", "keyword"), LEFT_OUT)
def test_what_is_not_kept_is_refused(form: str, schema: Any, keyword: str) -> None:
    tools = [tool("good", of(STRING), strict=True), tool("bad", of(schema), strict=True)]
    with pytest.raises(RequestError) as refused:
        grammar(form, tools)
    error = refused.value
    assert (error.param, error.code, error.http_status) == ("tools", "invalid_grammar", 400)
    assert str(error) == (
        f"'tools': the schema of the tool 'bad' is strict, and its '{keyword}' cannot be kept in the form in which this"
        " model writes calls"
    )
    # What need not be kept is passed over.
    grammar(form, [tool("bad", of(schema))])


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "array", "items": STRING, "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "items": STRING, "contains": {"const": "a"}}, "contains"),
        ({"type": "array", "prefixItems": [STRING]}, "prefixItems"),
        ({"type": "object", "properties": {"a": STRING}, "minProperties": 1}, "minProperties"),
        ({"type": "object", "properties": {"a": STRING}, "not": {}}, "not"),
        ({"type": "object", "properties": {"a": STRING}, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "object", "properties": {"a": STRING}, "required": ["b"]}, "required"),
        ({"type": "object", "properties": {"a": STRING}, "anyOf": [{"required": ["a"]}]}, "properties"),
    ],
)
def test_lists_and_objects_of_elements(schema: Any, keyword: str) -> None:
    with pytest.raises(RequestError, match=rf"its '{keyword}' cannot be kept"):
        grammar("minimax_m3", [tool("f", of(schema), strict=True)])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("more", [{"required": ["y"]}, {"anyOf": [{"required": ["x"]}]}, {"patternProperties": {}}])
def test_the_object_of_all_arguments(form: str, more: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=rf"its '{next(iter(more))}' cannot be kept"):
        grammar(form, [tool("f", {**of(STRING), **more}, strict=True)])


KEPT: list[Any] = [
    {**STRING, "pattern": "^[a-c]*$", "minLength": 2, "maxLength": 4},
    {**STRING, "format": "date", "pattern": "^2"},
    {**STRING, "format": "date-time"},
    {**STRING, "format": "uuid"},
    {"$ref": "#/$defs/short"},
    {"allOf": [{"$ref": "#/$defs/short"}], "description": "a short one", "default": "x"},
    {"anyOf": [{"enum": ["a", "b"], "type": "string"}, {"type": "null"}]},
]
OPTIONAL: list[Any] = [{"anyOf": [STRING, {"type": "null"}], "title": "X"}, {"type": ["string", "null"]}]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("schema", KEPT)
def test_what_is_kept_is_kept(form: str, schema: Any) -> None:
    tools = [tool("f", of(schema), strict=True)]
    spec = grammar(form, tools)
    ended = 0
    for seed in range(12):
        if (text := walk(spec, seed)) is None:
            continue
        ended += 1
        for one in parse_tools(TOOL_FORMATS[form].make(tools), text).calls:
            checker = jsonschema.FormatChecker(["date", "uuid"])
            jsonschema.validate(json.loads(one.arguments), of(schema), format_checker=checker)
    assert ended >= 3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("schema", OPTIONAL)
def test_texts_that_may_be_null_are_strict_enough(form: str, schema: Any) -> None:
    spec = grammar(form, [tool("f", of(schema), strict=True)])
    for text in ("null", "a text"):
        assert accepts(spec, answer(form, call(form, "f", {"x": text})))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{**STRING, "maxLength": 3, "pattern": "^b"}, {"type": "null", "title": "none"}], "default": None},
        {"oneOf": [{"type": "null"}, {**STRING, "maxLength": 3, "pattern": "^b"}]},
        {"type": ["string", "null"], "maxLength": 3, "pattern": "^b"},
        {**STRING, "nullable": True, "maxLength": 3, "pattern": "^b"},
    ],
)
def test_what_is_said_of_a_text_beside_null_is_kept(form: str, schema: Any) -> None:
    tools = [tool("f", of(schema), strict=True)]
    spec = grammar(form, tools)
    for text, kept in (("null", True), ("bcd", True), ("bcde", False), ("abc", False), ("nullb", False), ("", False)):
        assert accepts(spec, answer(form, call(form, "f", {"x": text}))) == kept, text
    for text, value in (("null", None), ("bcd", "bcd")):
        (one,) = parse_tools(TOOL_FORMATS[form].make(tools), answer(form, call(form, "f", {"x": text}))).calls
        assert json.loads(one.arguments) == {"x": value}


SAMPLES = """2024-02-29 2023-02-29 1900-02-29 2000-02-29 2026-04-30 2026-04-31 2024-13-01 2024-1-01
12:30:45Z 12:30:45.5+02:00 24:00:00Z 12:30:45 2024-02-29T12:30:45Z
2024-02-29t12:30:45.123-07:30 2024-02-29T12:30Z a@b.de a.b+c@x.example a@b a..b@c.de @b.de localhost www.example-1.org
-a.b a-.b a..b 1.2.3.4 255.255.255.255 256.1.1.1 1.2.3 01.2.3.4 123e4567-e89b-12d3-a456-426614174000
123e4567e89b12d3a456426614174000 123E4567-E89B-12D3-A456-426614174000 x""".split()


@pytest.mark.parametrize("name", TEXT_FORMATS)
@pytest.mark.parametrize("form", FORMS)
def test_formats_are_no_wider_than_the_librarys(form: str, name: str) -> None:
    schema = {**STRING, "format": name}
    ours, librarys = grammar(form, [tool("f", of(schema), strict=True)]), json_schema(schema)
    kept = [text for text in SAMPLES if accepts(ours, answer(form, call(form, "f", {"x": text})))]
    assert len(kept) >= 2
    assert set(kept) <= {text for text in SAMPLES if accepts(librarys, json.dumps(text))}
