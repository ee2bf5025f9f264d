"""The JSON formats of tool calls from the side of the model: an independent twin of the parsers, for their tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

NAMES = ("look", "run", "f", "look_up")
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in NAMES]

# Full of what could be taken for a marker, or for the end of a value.
TEXT = st.text(max_size=12) | st.text(alphabet="<>/{}[]\"'\\`|_ntolcaj, \n\u00e9\U0001f600", max_size=24)
VALUE = st.recursive(
    TEXT | st.sampled_from(["</tool_call>", "<tool_call>", "```", "}}", "\\"]) | st.integers() | st.booleans()
    | st.none() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
ARGUMENTS = st.dictionaries(TEXT, VALUE, max_size=4)
SPACE = st.sampled_from(["", "\n", "\n\n", " "])


def dumped(draw: Callable[..., Any], value: Any) -> str:
    """JSON in one of the spellings that models use."""
    return json.dumps(
        value,
        ensure_ascii=draw(st.booleans()),
        separators=draw(st.sampled_from([(", ", ": "), (",", ":"), (" ,", " : ")])),
        indent=draw(st.sampled_from([None, None, None, 2])),
    )


@dataclass(frozen=True)
class Written:
    """An output and what it means."""

    text: str
    content: str
    calls: list[tuple[str, dict[str, Any]]]


def call_text(draw: Callable[..., Any], name: str, arguments: dict[str, Any]) -> str:
    """One call as an object."""
    key = draw(st.sampled_from(["arguments", "parameters"]))
    value: Any = dumped(draw, arguments) if draw(st.integers(0, 5)) == 0 else arguments
    members = [("name", name), (key, value)]
    if draw(st.booleans()):
        members.reverse()
    if draw(st.integers(0, 5)) == 0:
        return dumped(draw, {"type": "function", "function": dict(members)})
    return dumped(draw, dict(members))


@st.composite
def hermes_outputs(draw: Callable[..., Any]) -> Written:
    """Text, then one to three blocks with text around them."""
    plain = TEXT.filter(lambda text: "<" not in text)
    text = content = draw(plain)
    calls: list[tuple[str, dict[str, Any]]] = []
    for _ in range(draw(st.integers(1, 3))):
        content = content.rstrip()
        inside = []
        for _ in range(draw(st.integers(1, 2))):
            name, arguments = draw(st.sampled_from([*NAMES, "unknown"])), draw(ARGUMENTS)
            calls.append((name, arguments))
            inside.append(call_text(draw, name, arguments))
        body = f"[{', '.join(inside)}]" if draw(st.booleans()) else draw(SPACE).join(inside)
        close = "</tool_call>" if draw(st.integers(0, 4)) else ""
        text += f"{draw(SPACE)}<tool_call>{draw(SPACE)}{body}{draw(SPACE) if close else ''}{close}"
        # What follows a block that was not closed must not look like more of it.
        after = draw(SPACE | plain) if close else draw(SPACE) + draw(st.sampled_from(["", "and then"]))
        text += after
        content += after if after.strip() else ""
    return Written(text, content, calls)


@st.composite
def bare_outputs(draw: Callable[..., Any], separators: tuple[str, ...] = ("\n", "; ", "")) -> Written:
    """Calls without markers, and perhaps text behind them."""
    calls = [(draw(st.sampled_from(NAMES)), draw(ARGUMENTS)) for _ in range(draw(st.integers(1, 3)))]
    written = [call_text(draw, *call) for call in calls]
    listed = draw(st.booleans())
    text = f"[{', '.join(written)}]" if listed else draw(st.sampled_from(separators)).join(written)
    after = draw(st.sampled_from(["", "\n", " done", "\n\nnow we wait"]))
    return Written(draw(SPACE) + text + after, after if after.strip() else "", calls)
