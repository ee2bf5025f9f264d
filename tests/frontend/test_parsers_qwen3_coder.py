"""Qwen3-Coder's tool calls: by hand, generated and read back, broken, and cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.frontend.parsers.base import ToolPiece
from longturn.frontend.parsers.qwen3_coder import Qwen3CoderTools
from longturn.frontend.parsers.registry import TOOL_FORMATS, output_format
from tests.frontend.m3 import Written, cut, tool
from tests.frontend.parsed import calls_of, halves, parsed_anyhow
from tests.frontend.qwen3_coder import block, call, outputs, parameter

TOOLS: list[Any] = [
    tool("weather", {"city": "Rome", "days": 3, "metric": True}),
    tool("f", {"a": 1, "b": "x", "list": ["x"], "deep": {"n": 1}}),
    {"type": "function", "function": {"name": "free"}},
]
ROME = call("weather", {"city": "Rome", "days": 3, "metric": True})
ROME_CALL = ("weather", {"city": "Rome", "days": 3, "metric": True})


BY_HAND: list[tuple[str, str, list[tuple[str, Any]]]] = [
    ("no call at all\n", "no call at all\n", []),
    (block(ROME), "", [ROME_CALL]),
    (f"I will look.\n\n{block(ROME)}\n", "I will look.", [ROME_CALL]),
    (f"{block(ROME)}\n{block(call('f', {'a': 1}))}", "", [ROME_CALL, ("f", {"a": 1})]),
    (block(ROME, call("f", {"a": 1})), "", [ROME_CALL, ("f", {"a": 1})]),
    (f"one {block(ROME)} two", "one two", [ROME_CALL]),
    (block(call("f", {})), "", [("f", {})]),
    (block("<function=f></function>"), "", [("f", {})]),
    (block(call("f", {"b": ""})), "", [("f", {"b": ""})]),
    (block(call("f", {"b": "\n"})), "", [("f", {"b": "\n"})]),
    (block(call("f", {"b": "  two\n\nlines  \n"})), "", [("f", {"b": "  two\n\nlines  \n"})]),
    (block("<function=f>\n<parameter=b>x</parameter>\n</function>"), "", [("f", {"b": "x"})]),
    (block(call("f", {"list": ["a", 1], "deep": {"n": {}}})), "", [("f", {"list": ["a", 1], "deep": {"n": {}}})]),
    # By schema: numbers, truth values as Python writes them, and what has no schema is a text.
    (block(f"<function=weather>\n{parameter('metric', 'True')}\n</function>"), "", [("weather", {"metric": True})]),
    (block(call("free", {"x": 3})), "", [("free", {"x": "3"})]),
    (block(call("unknown", {"x": 3})), "", [("unknown", {"x": "3"})]),
    # Values are not escaped.
    (block(call("f", {"b": 'a "q" \\n </b> </function>'})), "", [("f", {"b": 'a "q" \\n </b> </function>'})]),
    (block(call("f", {"b": "ends </parameter> not"})), "", [("f", {"b": "ends </parameter> not"})]),
    # Without a block only what is a tool.
    (f"now {ROME} done", "now done", [ROME_CALL]),
    (f"now {ROME}\n</tool_call>", "now", [ROME_CALL]),
    ("see <function=g>", "see <function=g>", []),
    ("<function=f x", "<function=f x", []),
]

BROKEN: list[tuple[str, str, list[tuple[str, Any]]]] = [
    # Tags that are missing.
    (block("<function=f>\n<parameter=b>\nx\n</function>"), "", [("f", {"b": "x"})]),
    (f"<tool_call>\n{call('f', {'b': 'x'})}", "", [("f", {"b": "x"})]),
    (f"<tool_call>\n{call('f', {'b': 'x'})} and", " and", [("f", {"b": "x"})]),
    (block("<function=f>\n<parameter=b>\nx\n</parameter>"), "", [("f", {"b": "x"})]),
    (block(f"<function=f>\n{parameter('b', 'x')}\n{ROME}"), "", [("f", {"b": "x"}), ROME_CALL]),
    ("<tool_call>\n<function=f>\n<parameter=b>\nx\n</function>", "", [("f", {"b": "x"})]),
    # The end of the block is cut off: no text.
    (f"<tool_call>\n{ROME}\n</tool_", "", [ROME_CALL]),
    (f"<tool_call>\n{ROME}\n</tools", "\n</tools", [ROME_CALL]),
    # No function behind the marker.
    ("<tool_call>\nwords", "<tool_call>\nwords", []),
    ("<tool_call></tool_call>", "<tool_call></tool_call>", []),
    ("<tool_call>\n<function=>", "<tool_call>\n<function=>", []),
    (f"<tool_call> {block(ROME)}", "<tool_call>", [ROME_CALL]),
    (f"<tool_call><function={'x' * 300}>", f"<tool_call><function={'x' * 300}>", []),
    # Text beside parameters, and arguments as JSON.
    (block(f"<function=f>\n<x> {parameter('a', 1)}\n</function>"), "", [("f", {"a": 1, "$text": "\n<x> \n"})]),
    (block('<function=f>\n{"a": 5}\n</function>'), "", [("f", {"a": 5})]),
    # A name twice: the last one counts.
    (block(f"<function=f>\n{parameter('b', 'x')}\n{parameter('b', 'y')}\n</function>"), "", [("f", {"b": "y"})]),
    # Cut off.
    ("ok <tool_", "ok <tool_", []),
    ("ok <tool_call>\n<func", "ok <tool_call>\n<func", []),
    ("ok <tool_call>\n<function=f>\n", "ok", [("f", "")]),
    ("<tool_call>\n<function=f>\n<parameter=b>\nsome\ntex", "", [("f", '{"b":"some\\ntex')]),
    ("<tool_call>\n<function=f>\n<parameter=b>\nx\n</para", "", [("f", '{"b":"x\\n</para')]),
    ("<tool_call>\n<function=f>\n<parameter=b>\nx\n</parameter>\n", "", [("f", '{"b":"x"')]),
    ("<tool_call>\n<function=f>\n<parameter=b>\nx\n</parameter>\n</func", "", [("f", '{"b":"x"')]),
    ("<tool_call>\n<function=f>\n<parameter=a>\n12", "", [("f", '{"a":12')]),
    (f"{block(ROME)}\n<tool_call>\n<function=f>", "", [ROME_CALL, ("f", "")]),
]


@pytest.mark.parametrize(("text", "content", "calls"), BY_HAND + BROKEN)
def test_texts_by_hand(text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    whole = parsed_anyhow(lambda: Qwen3CoderTools(TOOLS), text, *halves(text))
    assert (whole.content, calls_of(whole)) == (content, calls)


@settings(deadline=None)
@given(outputs(), st.lists(st.integers(0, 10_000), max_size=10))
def test_generated_calls_are_read_back_however_they_are_cut(made: Written, at: list[int]) -> None:
    whole = parsed_anyhow(lambda: Qwen3CoderTools(made.tools), made.text, cut(made.text, at))
    assert calls_of(whole) == made.calls
    assert whole.content == made.content
    for one, (_, arguments) in zip(whole.calls, made.calls, strict=True):
        # Equality alone takes 1, 1.0 and True for the same.
        assert json.dumps(json.loads(one.arguments), sort_keys=True) == json.dumps(arguments, sort_keys=True)


@settings(deadline=None)
@given(outputs(), st.integers(0, 10_000))
def test_an_output_that_ends_anywhere_makes_one_unfinished_call_at_most(made: Written, end: int) -> None:
    text = made.text[: end % (len(made.text) + 1)]
    whole = parsed_anyhow(lambda: Qwen3CoderTools(made.tools), text)
    calls = calls_of(whole)
    assert [name for name, _ in calls] == [name for name, _ in made.calls[: len(calls)]]
    assert calls[:-1] == made.calls[: max(0, len(calls) - 1)]


FRAGMENTS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<function=f>",
            "<function=g>",
            "</function>",
            "<parameter=a>",
            "</parameter>",
        ),
        *(
            "<parameter=b>",
            "<parameter=list>",
            "<",
            "</",
            ">",
            "=",
            "<param",
            "eter>",
            "\n",
            " ",
            "",
            "[1]",
            "{",
            "é😀",
        ),
        *("<function=", "<parameter=", "f", "</func", "tion>", "\n</parameter>\n", "\ud800"),
    ]
)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.tuples(FRAGMENTS, st.booleans()), max_size=16),
    st.lists(st.integers(0, 10_000), max_size=8),
    st.booleans(),
)
def test_any_text_cut_anywhere(fragments: list[tuple[str, bool]], at: list[int], known: bool) -> None:
    # A word behind some fragments: wherever it ends up, it must be somewhere.
    words = [f"w{number}w" if has_word else "" for number, (_, has_word) in enumerate(fragments)]
    text = "".join(fragment + word for (fragment, _), word in zip(fragments, words, strict=True))
    tools = TOOLS if known else []
    whole = parsed_anyhow(lambda: Qwen3CoderTools(tools), text, cut(text, at))
    shown = whole.content + "".join(call.name + call.arguments for call in whole.calls)
    assert [word for word in words if word not in shown] == []
    for one in whole.calls[:-1]:
        assert isinstance(json.loads(one.arguments), dict)
    if not whole.calls:
        assert whole.content == text


def arguments_of(piece: ToolPiece) -> str:
    return "".join(call.arguments for call in piece.calls)


def test_nothing_is_held_back_without_need() -> None:
    parser = Qwen3CoderTools(TOOLS)
    assert parser.push("some text").content == "some text"
    assert parser.push("<tool_call>\n<function=weather>").calls[0].name == "weather"
    assert arguments_of(parser.push("\n<parameter=city>\nRo")) == '{"city":"Ro'
    assert arguments_of(parser.push("me\n")) == "me"
    assert arguments_of(parser.push("x <b")) == "\\nx <b"
    assert arguments_of(parser.push("\n</parameter>\n")) == ""
    assert arguments_of(parser.push("<parameter=days>")) == '"'
    assert arguments_of(parser.push("\n3\n</parameter>\n")) == ""
    assert arguments_of(parser.push("</function>")) == ',"days":3}'


def test_a_long_value_is_not_read_again_with_every_piece() -> None:
    parser = Qwen3CoderTools([])
    parser.push("<tool_call>\n<function=f>\n<parameter=b>\n")
    for _ in range(2000):
        parser.push("some text with < and </b> in it\n")
        assert len(parser._pending) <= 1
    made = arguments_of(parser.push("</parameter></function>"))
    assert made.endswith('"}')


def test_chosen_by_the_template() -> None:
    template = "{% for t in tools %}{% endfor %}<tool_call>\n<function=example>\n<parameter=x>"
    assert output_format("Qwen3ForCausalLM", template, True).tools is TOOL_FORMATS["qwen3_coder"]
    assert output_format("Qwen3ForCausalLM", "<tool_call>", True).tools is TOOL_FORMATS["hermes"]
