"""Text to JSON values by schema; expected values are written out by hand."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.frontend.parsers.arguments import ArgumentsWriter
from longturn.frontend.parsers.schema import Element, tool_schemas

RECURSIVE = {"$ref": "#/$defs/node"}
DEFS = {
    "node": {"type": "object", "properties": {"value": {"type": "integer"}, "next": RECURSIVE}},
    "size": {"enum": [1, 2, 3]},
    "a/b": {"type": "boolean"},
    "circle": {"$ref": "#/$defs/circle"},
}


def element(name: str, *content: Any) -> Element:
    """An element of texts and (name, content...) tuples."""
    made = Element(name)
    for part in content:
        if isinstance(part, str):
            made.parts.append(part)
        else:
            made.children.append(element(*part))
    return made


def arguments_json(call: Element, root: dict[str, Any] | None) -> str:
    """The arguments of a call that was written as elements, in one piece."""
    writer = ArgumentsWriter(root)
    for _, group in itertools.groupby(call.children, lambda child: child.name):
        writer.elements(list(group))
    writer.loose_text(call.text)
    writer.close()
    return writer.take()


def value_of(schema: Any, *content: Any) -> Any:
    """What an argument with this content becomes."""
    root = {"type": "object", "properties": {"x": schema}, "$defs": DEFS}
    return json.loads(arguments_json(element("f", ("x", *content)), root))["x"]


INTEGER, NUMBER, STRING, BOOLEAN = ({"type": name} for name in ("integer", "number", "string", "boolean"))
ARRAY, OBJECT, NULL = {"type": "array"}, {"type": "object"}, {"type": "null"}

SCALARS: list[tuple[Any, str, Any]] = [
    (INTEGER, "3", 3),
    (INTEGER, " -17\n", -17),
    (INTEGER, "3.0", 3),
    (INTEGER, "1e3", 1000),
    (INTEGER, "3.5", "3.5"),
    (INTEGER, "three", "three"),
    (INTEGER, "12345678901234567890123", 12345678901234567890123),
    (INTEGER, "9" * 5000, "9" * 5000),
    (INTEGER, "1_000", "1_000"),
    (INTEGER, "٣", "٣"),
    (INTEGER, "", ""),
    (NUMBER, "3", 3),
    (NUMBER, "2.5", 2.5),
    (NUMBER, "-1.5e-3", -0.0015),
    (NUMBER, "NaN", "NaN"),
    (NUMBER, "Infinity", "Infinity"),
    (NUMBER, "1e999", "1e999"),
    (BOOLEAN, "true", True),
    (BOOLEAN, " False ", False),
    (BOOLEAN, "yes", "yes"),
    (BOOLEAN, "1", "1"),
    (NULL, "null", None),
    (STRING, "3", "3"),
    (STRING, "true", "true"),
    (STRING, "null", "null"),
    (STRING, '{"a": 1}', '{"a": 1}'),
    (STRING, "  two\nlines ", "  two\nlines "),
    (STRING, "", ""),
    (OBJECT, '{"a": [1, 2.5, null]}', {"a": [1, 2.5, None]}),
    (OBJECT, "[1]", "[1]"),
    (OBJECT, "{broken", "{broken"),
    (OBJECT, '{"a": NaN}', '{"a": NaN}'),
    (OBJECT, '{"a": 1e999}', '{"a": 1e999}'),
    (OBJECT, "", {}),
    (OBJECT, " \n", {}),
    (ARRAY, '["a", 1]', ["a", 1]),
    (ARRAY, "", []),
    (ARRAY, "a", "a"),
    (ARRAY, "[" * 100_000, "[" * 100_000),
    (ARRAY, "[" * 900 + "]" * 900, "[" * 900 + "]" * 900),
    # Several types: the narrowest that fits.
    ({"type": ["integer", "null"]}, "null", None),
    ({"type": ["integer", "null"]}, "4", 4),
    ({"type": ["integer", "null"]}, "", None),
    ({"type": ["string", "integer"]}, "4", 4),
    ({"type": ["string", "integer"]}, "four", "four"),
    ({"type": ["string", "null"]}, "", ""),
    ({"anyOf": [STRING, NULL]}, "null", None),
    ({"anyOf": [ARRAY, NULL]}, "", []),
    ({"oneOf": [NUMBER, BOOLEAN]}, "true", True),
    ({"allOf": [{"description": "how many"}, INTEGER]}, "4", 4),
    ({"type": "integer", "nullable": True}, "null", None),
    ({"enum": [1, 2]}, "2", 2),
    ({"enum": ["1", 2]}, "1", "1"),
    ({"enum": ["1", 2]}, "2", 2),
    ({"const": True}, "true", True),
    ({"properties": {}}, "", {}),
    ({"items": {}}, "", []),
    ({"$ref": "#/$defs/size"}, "2", 2),
    ({"$ref": "#/$defs/a~1b"}, "true", True),
    ({"$ref": "#/$defs/circle"}, "2", "2"),
    ({"$ref": "#/nowhere"}, "2", "2"),
    ({"$ref": "https://example.org/schema"}, "2", "2"),
    # No schema, or none that says anything: the text as it is.
    (None, "3", "3"),
    ({}, "true", "true"),
    (True, "3", "3"),
    ("nonsense", "3", "3"),
    ({"type": 7, "anyOf": 3, "enum": 4, "properties": [], "items": "x"}, "3", "3"),
    ({"type": "quaternion"}, "3", "3"),
]


@pytest.mark.parametrize(("schema", "text", "expected"), SCALARS)
def test_a_text(schema: Any, text: str, expected: Any) -> None:
    value = value_of(schema, text)
    assert value == expected and type(value) is type(expected)


TREES: list[tuple[Any, tuple[Any, ...], Any]] = [
    ({"type": "array", "items": INTEGER}, (("item", "1"), "\n", ("item", "2")), [1, 2]),
    ({"type": "array", "items": INTEGER}, (("item", "1"), ("item", "x")), [1, "x"]),
    ({"type": "array"}, (("entry", "1"), ("item", "2")), ["1", "2"]),
    ({"type": "array", "prefixItems": [STRING], "items": INTEGER}, (("item", "1"), ("item", "2")), ["1", 2]),
    ({"type": "array", "items": ARRAY}, (("item", ("item", "a")), ("item", "")), [["a"], []]),
    ({"type": "array", "items": OBJECT}, (("item", ("a", "1")), ("item", "")), [{"a": "1"}, {}]),
    ({"type": "array"}, (("item", "1"), "odd"), ["1", "odd"]),
    ({"type": "object", "properties": {"n": INTEGER}}, (("n", "1"), ("m", "2")), {"n": 1, "m": "2"}),
    ({"type": "object", "additionalProperties": NUMBER}, (("n", "1.5"),), {"n": 1.5}),
    ({"type": "object", "properties": {"item": INTEGER}}, (("item", "1"),), {"item": 1}),
    ({"type": "object"}, (("n", "1"), ("n", "2"), ("n", "3")), {"n": ["1", "2", "3"]}),
    ({"properties": {"n": INTEGER}}, (("n", "1"), ("n", "2")), {"n": [1, 2]}),
    (
        {"properties": {"n": {"type": "array", "items": INTEGER}}},
        (("n", "1"), ("n", ("item", "2"), ("item", "3")), ("n", "4")),
        {"n": [1, 2, 3, 4]},
    ),
    ({"type": "object"}, ("before", ("n", "1"), " after"), {"n": "1", "$text": "before after"}),
    ({"type": "object"}, (("$text", "1"), "odd"), {"$text": "1", "$$text": "odd"}),
    ({"anyOf": [OBJECT, {"type": "array", "items": INTEGER}]}, (("item", "1"),), [1]),
    ({"anyOf": [OBJECT, {"type": "array", "items": INTEGER}]}, (("item", "1"), ("b", "1")), {"item": "1", "b": "1"}),
    (RECURSIVE, (("value", "1"), ("next", ("value", "2"))), {"value": 1, "next": {"value": 2}}),
    (None, (("item", "1"), ("item", "2")), ["1", "2"]),
    (None, (("a", "1"), ("item", "2")), {"a": "1", "item": "2"}),
    (STRING, (("a", "1"),), {"a": "1"}),
]


@pytest.mark.parametrize(("schema", "content", "expected"), TREES)
def test_a_tree(schema: Any, content: tuple[Any, ...], expected: Any) -> None:
    assert value_of(schema, *content) == expected


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ((), {}),
        (("\n ",), {}),
        (('{"a": 1}',), {"a": 1}),
        (("[1]",), {"$text": "[1]"}),
        (("words",), {"$text": "words"}),
        (("\n", ("a", "1"), "\n"), {"a": "1"}),
        (("words", ("a", "1")), {"a": "1", "$text": "words"}),
    ],
)
def test_a_calls_body(content: tuple[Any, ...], expected: Any) -> None:
    assert json.loads(arguments_json(element("f", *content), None)) == expected


def test_arguments_are_text_that_can_be_sent() -> None:
    assert arguments_json(element("f", ("x", "é😀")), None) == '{"x":"é😀"}'
    half = arguments_json(element("f", ("x", '["\\ud800", "é"]')), {"properties": {"x": ARRAY}})
    assert json.loads(half) == {"x": ["\ud800", "é"]} and half.encode()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "items", "properties", "anyOf", "enum", "$ref", "additionalProperties", "x", "const"]
            ),
            inner | st.sampled_from(["object", "array", "integer", "#", "#/properties/x"]),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(JSON, st.sampled_from(["", "1", "null", "[1]", "text", '{"x": {}}']), st.booleans())
def test_no_schema_breaks_it(schema: Any, text: str, nested: bool) -> None:
    content = ("item", text) if nested else text
    root = schema if isinstance(schema, dict) else {"properties": {"x": schema}}
    made = arguments_json(element("f", ("x", content), ("y", content)), root)
    assert isinstance(json.loads(made, parse_constant=lambda name: pytest.fail(name)), dict)


def test_tools_of_either_api() -> None:
    tools: list[Any] = [
        {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}},
        {"name": "b", "input_schema": {"properties": {}}},
        {"name": "c", "parameters": {}},
        {"type": "web_search"},
        {"function": "nonsense"},
        {"function": {"name": 3, "parameters": {}}},
        {"function": {"name": "d", "parameters": None}},
    ]
    assert tool_schemas(tools) == {"a": {"type": "object"}, "b": {"properties": {}}, "c": {}}
