"""Tools for models whose chat template knows none: everything about them is written into the messages.

The tools and how to call them go behind the system message, calls behind the text of the answer that made them, and
results into user messages, since few such templates take another role. What is written depends on nothing that comes
later in a conversation, so a longer one begins with the same text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RESULT_OPEN, RESULT_CLOSE = "<tool_response>", "</tool_response>"


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """How calls are written where a template does not say it: JSON objects between two texts."""

    open: str = ""
    close: str = ""
    arguments_key: str = "arguments"

    def call(self, name: str, arguments: str) -> str:
        """One call; `arguments` is JSON text."""
        return f'{self.open}{{"name": {json.dumps(name)}, "{self.arguments_key}": {arguments}}}{self.close}'


def with_system_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], syntax: CallSyntax
) -> list[dict[str, Any]]:
    """Messages whose system message ends with the tools; one is made if there is none."""
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    text = (
        "You can use these tools, each described by a JSON object:\n"
        f"{lines}\n"
        "To use a tool, write its name and arguments as a JSON object, and nothing after it:\n"
        f"{syntax.call('tool_name', '{...}')}"
    )
    first, *rest = messages or ({},)
    if first.get("role") == "system" and isinstance(content := first.get("content"), str):
        return [{**first, "content": f"{content}\n\n{text}"}, *map(dict, rest)]
    return [{"role": "system", "content": text}, *map(dict, messages)]


def with_written_calls(
    messages: Sequence[Mapping[str, Any]], syntax: CallSyntax, to_json: Callable[[Any], str]
) -> list[dict[str, Any]]:
    """Messages without `tool_calls` and without the role `tool`; their content says the same.

    Args:
        messages: as the template would get them.
        syntax: how the model writes calls.
        to_json: writes arguments as JSON.
    """
    made: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        if message.get("role") == "tool":
            text = f"{RESULT_OPEN}\n{_text(message.get('content'))}\n{RESULT_CLOSE}"
            if after_result:
                made[-1]["content"] += f"\n{text}"
            else:
                made.append({"role": "user", "content": text})
            after_result = True
            continue
        after_result = False
        plain = dict(message)
        calls = plain.pop("tool_calls", None)
        written = [_call(call, syntax, to_json) for call in calls] if isinstance(calls, list) else []
        if written:
            content = _text(plain.get("content"))
            plain["content"] = "\n".join([content, *written] if content.strip() else written)
        made.append(plain)
    return made


def _call(call: Any, syntax: CallSyntax, to_json: Callable[[Any], str]) -> str:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return to_json(call)
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else to_json({} if arguments is None else arguments)
    return syntax.call(str(function.get("name", "")), text)


def _text(content: Any) -> str:
    if content is None:
        return ""
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
