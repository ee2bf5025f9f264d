"""Tool calls compare as the values that they are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from longturn.frontend.conversation_calls import argument_forms, canonical_call

KINDS: dict[str, Any] = {
    "text": {"type": "string"},
    "either": {"type": ["number", "string"]},
    "number": {"type": "number", "default": 1.0},
    "whole": {"$ref": "#/$defs/whole"},
    "flag": {"type": "boolean"},
    "list": {"type": "array"},
    "any": {},
}
TOOLS = [
    {"function": {"name": "f", "parameters": {"properties": KINDS, "$defs": {"whole": {"type": ["integer", "null"]}}}}},
    {"function": {"name": "bare"}},
]


@pytest.mark.parametrize(
    ("written", "sent", "same"),
    [
        ({"number": "5000"}, {"number": 5000}, True),
        ({"number": "5000.0"}, {"number": 5000}, True),
        ({"number": " 2.5"}, {"number": 2.5}, True),
        ({"number": "5000"}, {"number": 5001}, False),
        ({"number": "1"}, {}, True),  # its default
        ({}, {"number": 1}, True),
        ({"number": "x"}, {"number": 0}, False),
        ({"number": True}, {}, False),
        ({"whole": "7", "flag": "true"}, {"flag": True, "whole": 7}, True),
        ({"whole": "null"}, {"whole": None}, True),
        ({"flag": "1"}, {"flag": True}, False),
        ({"flag": "false"}, {"flag": 0}, False),
        ({"list": "[1.0]"}, {"list": [1]}, True),
        ({"list": ""}, {"list": []}, False),
        # What may be a text is the text that was written.
        ({"text": "5000"}, {"text": 5000}, False),
        ({"either": "5000"}, {"either": 5000}, False),
        ({"any": "5000"}, {"any": 5000}, False),
        ({"unknown": "5000"}, {"unknown": 5000}, False),
        ({"unknown": {"deep": [2.0, 1e21]}}, {"unknown": {"deep": [2, 10**21]}}, True),
        ({"unknown": 9007199254740993}, {"unknown": 9007199254740992}, False),
    ],
)
def test_calls_are_the_same_after_an_agent_has_read_them_by_the_tools_schema(
    written: dict[str, Any], sent: dict[str, Any], same: bool
) -> None:
    def form(arguments: Any) -> str:
        # As it is hashed.
        return json.dumps(canonical_call({"function": {"name": "f", "arguments": arguments}}, argument_forms(TOOLS)))

    assert (form(json.dumps(written)) == form(sent)) is same
    assert (form(written) == form(json.dumps(sent))) is same
    assert form(written) == form(json.dumps(written))


def test_calls_that_nobody_can_read_are_compared_as_they_are() -> None:
    forms = argument_forms([*TOOLS, {"function": "no function"}, {"function": {"name": "g", "parameters": "none"}}])
    deep = "[" * 100_000
    for call, same in (
        ("text", "text"),
        ({"function": "text"}, {"function": "text"}),
        ({"function": {"name": "f", "arguments": deep}}, {"name": "f", "arguments": deep}),
        ({"function": {"name": ["f"], "arguments": "[1]"}}, {"name": ["f"], "arguments": [1]}),
        ({"function": {"name": "bare"}}, {"name": "bare", "arguments": None}),
    ):
        assert canonical_call(call, forms) == canonical_call(call, {}) == same
    nested = '{"a": ' * 600 + "1" + "}" * 600
    assert canonical_call({"function": {"name": "f", "arguments": nested}}, forms)["name"] == "f"
