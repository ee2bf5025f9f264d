"""What the requests of all APIs say of a field that cannot be served."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from typing import Any

from longturn.errors import RequestError


def invalid(param: str, what: str) -> RequestError:
    """The error for a field that has a value it cannot have.

    Args:
        param: path of the field, as `messages[0].content`.
        what: what follows the field's name in the message, as `must be a text`.
    """
    return RequestError(f"'{param}' {what}", param=param, code="invalid_value")


def not_supported(param: str, what: str) -> RequestError:
    """The error for a field that asks for what this server does not do; `what` is a clause of its own."""
    return RequestError(f"'{param}': {what}", param=param, code="unsupported_value")


_TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
"""The Model Context Protocol's rule (specification 2025-11-25). OpenAI (64 characters) and Anthropic (128) take no dot.
Some models write names into tags or attributes, where quotes, spaces and brackets cannot be told from the syntax."""


def new_tool_name(value: Any, where: str, taken: Container[str]) -> str:
    """The name of a tool.

    Args:
        value: what the request has.
        where: its path.
        taken: names of the request's other tools; two of one name could not be told apart in a call.

    Raises:
        RequestError: it is no such name, or another tool has it.
    """
    if not isinstance(value, str) or not value:
        raise invalid(where, "must be a text")
    if _TOOL_NAME.fullmatch(value) is None:
        shown = value if len(value) <= 140 else f"{value[:140]}…"
        raise invalid(where, f"must be 1 to 128 letters, digits, '_', '-' or '.', not {shown!r}")
    if value in taken:
        raise invalid(where, f"is '{value}', the name of another tool too")
    return value


def text_in(item: Mapping[str, Any], key: str, where: str) -> str:
    """The text that a member of an object must be.

    Args:
        item: the object.
        key: name of the member.
        where: path of the object.

    Raises:
        RequestError: it is missing or no text.
    """
    value = item.get(key)
    if not isinstance(value, str):
        raise invalid(f"{where}.{key}", "must be a text")
    return value
