"""`tools`, `tool_choice` and `parallel_tool_calls`: what becomes of them, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from longturn.errors import RequestError
from longturn.frontend.records import ToolChoice
from longturn.server.tool_choice import check_tools, tool_choice

F = {"type": "function", "function": {"name": "f", "parameters": {}}}
G = {"type": "function", "function": {"name": "g"}}
NAMED = {"type": "function", "function": {"name": "g"}}


def allowed(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


@pytest.mark.parametrize(
    ("choice", "tools", "parallel", "made"),
    [
        (None, None, None, ToolChoice("none")),
        (None, [], True, ToolChoice("none")),
        (None, [F], None, ToolChoice("auto")),
        ("none", [F], None, ToolChoice("none")),
        ("auto", [F], False, ToolChoice("auto", parallel=False)),
        ("required", [F, G], None, ToolChoice("required")),
        (NAMED, [F, G], None, ToolChoice("required", ("g",), parallel=False)),
        # As the Responses API writes them.
        ({"type": "function", "name": "g"}, [F, G], None, ToolChoice("required", ("g",), parallel=False)),
        (allowed("auto", F), [F, G], None, ToolChoice("auto", ("f",))),
        (allowed("required", F, G), [F, G], False, ToolChoice("required", ("f", "g"), parallel=False)),
        ({"type": "allowed_tools", "mode": "auto", "tools": [F]}, [F, G], None, ToolChoice("auto", ("f",))),
    ],
)
def test_choices(choice: Any, tools: Any, parallel: bool | None, made: ToolChoice) -> None:
    assert tool_choice(choice, tools, parallel) == made


@pytest.mark.parametrize(
    ("choice", "tools", "param", "names"),
    [
        ("always", [F], "tool_choice", "'always'"),
        ("required", [], "tool_choice", "no tools"),
        (NAMED, [F], "tool_choice", "'g'"),
        (NAMED, None, "tool_choice", "'g'"),
        ({"type": "function", "function": 3}, [F], "tool_choice.function.name", "text"),
        ({"type": "custom"}, [F], "tool_choice.type", "'custom'"),
        ({}, [F], "tool_choice.type", "None"),
        (allowed("any", F), [F], "tool_choice.allowed_tools", "mode"),
        (allowed("auto"), [F], "tool_choice.allowed_tools", "tools"),
        (allowed("auto", G), [F], "tool_choice", "'g'"),
        (allowed("auto", 3), [F], "tool_choice.allowed_tools.tools[0]", "text"),
        ({"type": "allowed_tools", "allowed_tools": 3}, [F], "tool_choice.allowed_tools", "mode"),
        (None, [F, {"type": "web_search"}], "tools[1].type", "web_search"),
        (None, [{"type": "function"}], "tools[0].function.name", "text"),
        (None, [{"function": {"name": "f", "parameters": [1]}}], "tools[0].function.parameters", "schema"),
    ],
)  # fmt: skip
def test_what_is_refused(choice: Any, tools: Any, param: str, names: str) -> None:
    with pytest.raises(RequestError, match=names) as refused:
        tool_choice(choice, tools, None)
    assert refused.value.param == param and param in str(refused.value)


@pytest.mark.parametrize("name", ["mcp__server__tool", "fs.read-file", "A" * 128, "_"])
def test_names_that_agents_give_their_tools(name: str) -> None:
    assert check_tools([F, {"type": "function", "function": {"name": name}}]) == {"f", name}


@pytest.mark.parametrize("name", ["f g!", 'a">', "f\n", "ü", "A" * 129, "x/y", "f"])
def test_names_that_no_parser_could_carry_or_tell_apart(name: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_tools([F, {"type": "function", "function": {"name": name}}])
    assert caught.value.param == "tools[1].function.name"
    assert "\n" not in str(caught.value)
