"""Qwen3-Coder's way of writing, from the side of the model: an independent twin of the parser, for its tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from hypothesis import strategies as st

from tests.frontend.m3 import KEY, SPACE, Written, tool


def parameter(name: str, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"<parameter={name}>\n{text}\n</parameter>"


def call(name: str, arguments: Mapping[str, Any]) -> str:
    """As the template writes it."""
    lines = [f"<function={name}>", *(parameter(key, value) for key, value in arguments.items()), "</function>"]
    return "\n".join(lines)


def block(*calls: str) -> str:
    return "\n".join(["<tool_call>", *calls, "</tool_call>"])


# Full of what could be taken for a tag.
TEXT = (
    st.text(max_size=12)
    | st.text(alphabet="</>=parmetfuncio \n\u00e9\U0001f600\"'\\", max_size=24)
    | st.sampled_from(
        ["</parameter>", "</parameter>x", "\n</parameter>\n.", "</function>", "<parameter=a>", "\n", "\n\n"]
    )
)
VALUE = st.recursive(
    TEXT | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEY, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def outputs(draw: Callable[..., Any]) -> Written:
    """Outputs with content, and one or two blocks of calls, spaced as models do."""
    plain = TEXT.filter(lambda text: "<" not in text)
    text = content = draw(plain)
    calls: list[tuple[str, dict[str, Any]]] = []
    tools = []
    for _ in range(draw(st.integers(1, 2))):
        content = content.rstrip()
        written = []
        for _ in range(draw(st.integers(1, 2))):
            name, arguments = f"f{len(calls)}", draw(st.dictionaries(KEY, VALUE, max_size=4))
            calls.append((name, arguments))
            tools.append(tool(name, arguments))
            written.append(call(name, arguments))
        inside = draw(SPACE).join(written)
        close = "</tool_call>" if draw(st.integers(0, 4)) else ""
        text += f"{draw(SPACE)}<tool_call>{draw(SPACE)}{inside}{draw(SPACE)}{close}"
        after = draw(SPACE | plain) if close else draw(st.sampled_from(["", "and then"]))
        text += after
        if not close and after:
            # The white space before it is its own then.
            text, content = text[: -len(after)].rstrip() + after, content
        content += after if after.strip() else ""
    return Written(text, content, calls, tools)
