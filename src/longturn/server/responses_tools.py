"""Tools of the Responses API as functions of the chat API, which is all that models know, and back.

The client runs three kinds itself: functions, custom tools (whose input is a text: a function with one argument), and
namespaces of both (the name of a function in one begins with the namespace's). Others would run on the server.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from longturn.errors import RequestError
from longturn.frontend.records import ToolChoice
from longturn.server.fields import invalid, new_tool_name
from longturn.server.tool_choice import tool_choice

Unsupported = Literal["refuse", "drop"]
CUSTOM_INPUT = "input"
"""The one argument of a custom tool."""
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_CUSTOM_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class ClientTool:
    """How the client calls what the model knows as a function."""

    name: str
    custom: bool = False
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class ClientTools:
    """The tools of one request."""

    chat: tuple[Mapping[str, Any], ...] = ()
    """As the chat API has them."""
    by_name: Mapping[str, ClientTool] = field(default_factory=dict)
    """By the names that the model knows."""


def function_name(name: str, namespace: str | None) -> str:
    """What the model knows a tool by."""
    return f"{namespace}__{name}" if namespace else name


def custom_arguments(text: str) -> str:
    """The arguments of a call of a custom tool."""
    return json.dumps({CUSTOM_INPUT: text}, ensure_ascii=False)


def custom_input(arguments: str) -> str:
    """The input of a custom tool; the arguments themselves where the model has written others."""
    try:
        values = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    text = values.get(CUSTOM_INPUT) if isinstance(values, dict) else None
    return text if isinstance(text, str) else arguments


def client_tools(tools: Sequence[Mapping[str, Any]] | None, unsupported: Unsupported) -> ClientTools:
    """What the model may be offered.

    Args:
        tools: of the request.
        unsupported: what to do with tools that the client does not run itself.

    Raises:
        RequestError: a tool is malformed, not supported, or has a name that no tool may have, or that of another one.
    """
    chat: list[Mapping[str, Any]] = []
    by_name: dict[str, ClientTool] = {}
    for where, tool, namespace in _flat(tools or (), unsupported):
        function, known = _function(tool, where, namespace)
        made = {"type": "function", "function": function}
        if by_name.get(function["name"]) == known and made in chat:
            continue  # one tool twice, as in an input that repeats an item of tools
        new_tool_name(function["name"], f"{where}.name", by_name)
        by_name[function["name"]] = known
        chat.append(made)
    return ClientTools(tuple(chat), by_name)


def choice_of(choice: str | Mapping[str, Any] | None, tools: ClientTools, parallel: bool | None) -> ToolChoice:
    """What the answer may call, with custom tools and namespaces by their functions' names."""
    if isinstance(choice, Mapping):
        choice = _named(choice)
        if isinstance(allowed := choice.get("tools"), list):
            choice = {**choice, "tools": [_named(tool) if isinstance(tool, Mapping) else tool for tool in allowed]}
    return tool_choice(choice, tools.chat, parallel)


def _named(choice: Mapping[str, Any]) -> Mapping[str, Any]:
    name, namespace = choice.get("name"), choice.get("namespace")
    if choice.get("type") not in ("function", "custom") or not isinstance(name, str):
        return choice
    return {"type": "function", "name": function_name(name, namespace if isinstance(namespace, str) else None)}


def _flat(
    tools: Sequence[Mapping[str, Any]], unsupported: Unsupported
) -> list[tuple[str, Mapping[str, Any], str | None]]:
    """Place, tool and namespace of every tool that the client runs."""
    flat: list[tuple[str, Mapping[str, Any], str | None]] = []
    for number, tool in enumerate(tools):
        where = f"tools[{number}]"
        if tool.get("type") != "namespace":
            if _runs(tool, where, unsupported):
                flat.append((where, tool, None))
            continue
        namespace, inner = _name(tool, where), tool.get("tools")
        if not isinstance(inner, list) or not all(isinstance(entry, Mapping) for entry in inner):
            raise invalid(f"{where}.tools", "must be a list of tools")
        for at, entry in enumerate(inner):
            if _runs(entry, f"{where}.tools[{at}]", unsupported):
                flat.append((f"{where}.tools[{at}]", entry, namespace))
    return flat


def _runs(tool: Mapping[str, Any], where: str, unsupported: Unsupported) -> bool:
    kind = tool.get("type")
    if kind in ("function", "custom"):
        return True
    if unsupported == "drop":
        return False
    raise RequestError(
        f"'{where}.type': tools of type {kind!r} are not supported, only 'function', 'custom' and 'namespace' "
        "(--server-unsupported-tools drop leaves such tools out)",
        param=f"{where}.type",
        code="unsupported_value",
    )


def _function(tool: Mapping[str, Any], where: str, namespace: str | None) -> tuple[dict[str, Any], ClientTool]:
    name = _name(tool, where)
    known = ClientTool(name, tool["type"] == "custom", namespace)
    function = {key: tool[key] for key in _FUNCTION_FIELDS if tool.get(key) is not None}
    function["name"] = function_name(name, namespace)
    if known.custom:
        function.pop("strict", None)
        function["description"] = _described(tool)
        function["parameters"] = _CUSTOM_SCHEMA
    return function, known


def _described(tool: Mapping[str, Any]) -> str:
    """A custom tool's description, with the grammar that its input should follow."""
    lines = [tool["description"]] if isinstance(tool.get("description"), str) else []
    form = tool.get("format")
    if isinstance(form, Mapping) and isinstance(form.get("definition"), str):
        lines.append(f"The input must match this grammar ({form.get('syntax')}):\n{form['definition']}")
    return "\n".join(lines)


def _name(tool: Mapping[str, Any], where: str) -> str:
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise invalid(f"{where}.name", "must be a text")
    return name
