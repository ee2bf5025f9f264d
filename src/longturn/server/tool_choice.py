"""OpenAI's `tools`, `tool_choice` and `parallel_tool_calls` as the frontend takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longturn.frontend.records import ToolChoice
from longturn.server.fields import invalid, new_tool_name, not_supported

_MODES = ("none", "auto", "required")


def tool_choice(
    choice: str | Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]] | None, parallel: bool | None
) -> ToolChoice:
    """What a request's answer may call.

    Args:
        choice: `none`, `auto`, `required`, an object that names one function, or one with `allowed_tools`; by default
            `auto`.
        tools: the request's tools, as the chat API has them.
        parallel: `parallel_tool_calls`; true by default.

    Raises:
        RequestError: the choice is malformed, or names a function that is none of the tools.
    """
    many = parallel is not False
    known = check_tools(tools or ())
    if choice is None:
        return ToolChoice("auto" if tools else "none", parallel=many)
    if isinstance(choice, str):
        if choice not in _MODES:
            raise invalid("tool_choice", f"must be one of {', '.join(_MODES)}, or an object, not '{choice}'")
        if choice == "required" and not tools:
            raise invalid("tool_choice", "is 'required', but there are no tools")
        return ToolChoice(choice, parallel=many)  # type: ignore[arg-type]
    kind = choice.get("type")
    if kind == "function":
        # Chat nests the function, the Responses API does not. One function named is one call of it.
        name = _name(choice.get("function", choice), "tool_choice.function.name")
        return ToolChoice("required", (_known(name, known),), parallel=False)
    if kind == "allowed_tools":
        allowed = choice.get("allowed_tools", choice)
        mode = allowed.get("mode", "auto") if isinstance(allowed, Mapping) else None
        listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
        if mode not in ("auto", "required") or not isinstance(listed, list) or not listed:
            raise invalid("tool_choice.allowed_tools", "must have a 'mode' of auto or required, and a list 'tools'")
        where = "tool_choice.allowed_tools.tools"
        names = [
            _name(tool.get("function", tool) if isinstance(tool, Mapping) else tool, f"{where}[{number}]")
            for number, tool in enumerate(listed)
        ]
        return ToolChoice(mode, tuple(_known(name, known) for name in names), many)
    raise invalid("tool_choice.type", f"must be 'function' or 'allowed_tools', not {kind!r}")


def check_tools(tools: Sequence[Mapping[str, Any]]) -> set[str]:
    """Names of the tools.

    Raises:
        RequestError: a tool is no function, or has no name that it may have, or that of another one.
    """
    names: set[str] = set()
    for number, tool in enumerate(tools):
        if tool.get("type", "function") != "function":
            raise not_supported(f"tools[{number}].type", f"only 'function' is supported, not {tool['type']!r}")
        function = tool.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        names.add(new_tool_name(name, f"tools[{number}].function.name", names))
        assert isinstance(function, Mapping)
        if not isinstance(function.get("parameters", {}), Mapping | None):
            raise invalid(f"tools[{number}].function.parameters", "must be a JSON schema: an object")
    return names


def _name(function: Any, where: str) -> str:
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise invalid(where, "must be a text")
    return name


def _known(name: str, known: set[str]) -> str:
    if name not in known:
        raise invalid("tool_choice", f"names '{name}', which is none of the tools")
    return name
