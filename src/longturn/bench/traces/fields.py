"""Decoding with errors that name the value at fault, which msgspec's do not."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from longturn.bench.traces.errors import TraceError

T = TypeVar("T")
_PLACE = re.compile(r"^(?P<what>.*) - at `(?:\$)(?P<path>[^`]*)`$")
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
_SHOWN = 60
"""Longest value that a message quotes."""


def decode(data: bytes, kind: type[T], source: str) -> T:
    """Read `kind` from JSON.

    Raises:
        TraceError: names `source`, the field and its value.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise TraceError(f"{source}: {_explain(data, str(error))}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{source}: not JSON: {error}") from error
    except RecursionError as error:
        raise TraceError(f"{source}: not a trace: nested too deeply") from error


def _explain(data: bytes, message: str) -> str:
    match = _PLACE.match(message)
    if match is None:
        return message[:1].lower() + message[1:]
    value: Any = msgspec.json.decode(data)
    steps = _STEP.findall(match["path"])
    for name, index in steps:
        value = value[name] if name else value[int(index)]
    what = match["what"][:1].lower() + match["what"][1:]
    path = match["path"].lstrip(".")
    if "missing" in what:
        return f"{path}: {what}"
    text = repr(value)
    return f"{path}: {what}: {text if len(text) <= _SHOWN else text[:_SHOWN] + '...'}"
