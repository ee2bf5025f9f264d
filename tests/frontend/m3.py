"""MiniMax-M3's way of writing, from the side of the model: an independent twin of the parsers, for their tests."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

NS = "]<]minimax[>["


def tag(name: str, inside: str) -> str:
    return f"{NS}<{name}>{inside}{NS}</{name}>"


def invoke(name: str, inside: str) -> str:
    return f'{NS}<invoke name="{name}">{inside}{NS}</invoke>'


def block(*invokes: str) -> str:
    return f"{NS}<tool_call>\n" + "".join(call + "\n" for call in invokes) + f"{NS}</tool_call>"


def written(value: Any) -> str:
    """A value as M3's template writes it."""
    if isinstance(value, Mapping):
        return "".join(tag(key, written(item)) for key, item in value.items())
    if isinstance(value, list):
        return "".join(tag("item", written(item)) for item in value)
    return value if isinstance(value, str) else json.dumps(value)


def schema_of(value: Any) -> dict[str, Any]:
    """A schema under which a value can be read back."""
    if isinstance(value, bool):
        return {"type": "boolean"}
    if isinstance(value, int):
        return {"type": "integer"}
    if isinstance(value, float):
        return {"type": "number"}
    if isinstance(value, str):
        return {"type": "string"}
    if isinstance(value, list):
        # Entries of several types: by position.
        return {"type": "array", "prefixItems": [schema_of(item) for item in value]}
    return {"type": "object", "properties": {key: schema_of(item) for key, item in value.items()}}


def tool(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema_of(arguments)}}


def cut(text: str, at: Sequence[int]) -> list[str]:
    """A text in pieces that begin at these places."""
    ends = sorted({0, len(text), *(place % (len(text) + 1) for place in at)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


# --- strategies ------------------------------------------------------------------------------------------------------

# Full of what could be taken for a tag.
TEXT = (st.text(max_size=12) | st.text(alphabet="]<[>minax/ \n\"'&e\u00e9\U0001f600", max_size=20)).filter(
    lambda text: NS not in text
)
KEY = st.from_regex(r"[A-Za-z_$][A-Za-z0-9_.:$-]{0,6}", fullmatch=True) | st.sampled_from(
    ["item", "invoke", "tool_call", "name", "caf\u00e9"]
)
VALUE = st.recursive(
    TEXT | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEY, inner, max_size=3),
    max_leaves=8,
)
SPACE = st.sampled_from(["", "\n", "\n\n", " "])


@dataclass(frozen=True)
class Written:
    """An output and what it means."""

    text: str
    content: str
    calls: list[tuple[str, dict[str, Any]]]
    tools: list[dict[str, Any]]


@st.composite
def outputs(draw: Callable[..., Any]) -> Written:
    """Outputs with content, and one or two blocks of calls, spaced as models do."""

    def space() -> str:
        return str(draw(SPACE))

    text = content = draw(TEXT)
    calls: list[tuple[str, dict[str, Any]]] = []
    tools = []
    for _ in range(draw(st.integers(1, 2))):
        content = content.rstrip()
        text += space()
        inside = space()
        for _ in range(draw(st.integers(1, 3))):
            name, arguments = f"f{len(calls)}", draw(st.dictionaries(KEY, VALUE, max_size=4))
            calls.append((name, arguments))
            tools.append(tool(name, arguments))
            params = "".join(tag(key, written(item)) + space() for key, item in arguments.items())
            quoted = draw(st.sampled_from([f'"{name}"', f"'{name}'", name]))
            inside += f"{NS}<invoke name={quoted}>{space()}{params}{NS}</invoke>{space()}"
        text += f"{NS}<tool_call>{inside}{NS}</tool_call>"
        after = draw(SPACE | TEXT)
        text += after
        content += after if after.strip() else ""
    return Written(text, content, calls, tools)
