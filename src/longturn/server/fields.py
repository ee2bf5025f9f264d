"""What the requests of all APIs say of a field that cannot be served."""

from __future__ import annotations

from collections.abc import Mapping
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
