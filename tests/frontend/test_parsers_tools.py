"""MiniMax-M3's tool calls: by hand, generated and read back, broken, and cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.frontend.parsers.base import ToolPiece, join_calls, join_pieces, parse_tools
from longturn.frontend.parsers.minimax_m3_tools import MAX_DEPTH, MinimaxM3Tools
from longturn.frontend.records import ToolCall, ToolCallDelta
from tests.frontend.m3 import NS, Written, block, cut, invoke, outputs, tag, tool
from tests.frontend.parsed import calls_of, halves, parsed_anyhow

WEATHER = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "metric": {"type": "boolean"}},
    },
}
TOOLS: list[Any] = [WEATHER, tool("f", {"a": 1, "b": "x", "list": ["x"], "deep": {"n": 1}})]
ROME = invoke("weather", tag("city", "Rome") + tag("days", "3") + tag("metric", "true"))
OPENED = f'{NS}<tool_call>\n{NS}<invoke name="weather">'
ROME_CALL = ("weather", {"city": "Rome", "days": 3, "metric": True})


BY_HAND: list[tuple[str, str, list[tuple[str, Any]]]] = [
    ("no call at all\n", "no call at all\n", []),
    (block(ROME), "", [ROME_CALL]),
    (f"I will look.{block(ROME)}", "I will look.", [ROME_CALL]),
    (f"I will look.\n\n{block(ROME)}\n", "I will look.", [ROME_CALL]),
    (block(ROME, invoke("f", tag("a", "1"))), "", [ROME_CALL, ("f", {"a": 1})]),
    (block(invoke("f", "")), "", [("f", {})]),
    (block(invoke("f", "\n")), "", [("f", {})]),
    (block(invoke("f", tag("list", tag("item", "a") + "\n" + tag("item", "b")))), "", [("f", {"list": ["a", "b"]})]),
    (block(invoke("f", tag("list", "") + tag("deep", ""))), "", [("f", {"list": [], "deep": {}})]),
    (block(invoke("f", tag("deep", "\n" + tag("n", "2") + "\n"))), "", [("f", {"deep": {"n": 2}})]),
    # Values need no escaping: only the namespace marker means something.
    (
        block(invoke("f", tag("b", "<b>x</b> </invoke> ]<] \\n \"'"))),
        "",
        [("f", {"b": "<b>x</b> </invoke> ]<] \\n \"'"})],
    ),
    (block(invoke("f", tag("b", f"the {NS} marker"))), "", [("f", {"b": f"the {NS} marker"})]),
    # Arguments that are named like tags.
    (block(invoke("f", tag("invoke", "x") + tag("tool_call", "y"))), "", [("f", {"invoke": "x", "tool_call": "y"})]),
    # A function that is not among the tools.
    (block(invoke("other", tag("n", "3"))), "", [("other", {"n": "3"})]),
    (block(invoke("f", '{"a": 5}')), "", [("f", {"a": 5})]),
    # Text after a block, and two blocks.
    (f"one {block(ROME)} two", "one two", [ROME_CALL]),
    (f"one\n{block(ROME)}\n\ntwo\n{block(invoke('f', ''))}\n", "one\n\ntwo", [ROME_CALL, ("f", {})]),
]

BROKEN: list[tuple[str, str, list[tuple[str, Any]]]] = [
    # Cut off: the beginning of a JSON text, which is none.
    (f"ok {NS}<tool_call>", f"ok {NS}<tool_call>", []),
    (f"ok {NS}<tool_call>\n", f"ok {NS}<tool_call>\n", []),
    (f"ok {NS}<tool_", f"ok {NS}<tool_", []),
    (f"ok {NS}", f"ok {NS}", []),
    (f"ok {block(ROME)[:-60]}", "ok", [("weather", '{"city":"Rome","days":3,"metric":true')]),
    (OPENED + tag("city", "Rome") + tag("days", "3"), "", [("weather", '{"city":"Rome","days":3')]),
    (f"{OPENED}{NS}<city>Rome{NS[:5]}", "", [("weather", '{"city":"Rome')]),
    (OPENED, "", [("weather", "")]),
    (f"{ROME}{OPENED} and", "", [ROME_CALL, ("weather", '{"$text":" and"')]),
    # An argument that can only be a text is what is written up to its own end, or to that of the call.
    (block(invoke("f", f"{NS}<b>x{tag('a', '1')}{NS}</b>")), "", [("f", {"b": f"x{tag('a', '1')}"})]),
    (block(f'{NS}<invoke name="f">{NS}<b>x{NS}</invoke>'), "", [("f", {"b": "x"})]),
    # One name several times: a list if they follow each other, as far as the schema does not say that it is a text.
    (block(invoke("f", tag("list", "x") + tag("list", "y"))), "", [("f", {"list": ["x", "y"]})]),
    (block(invoke("f", tag("a", "1") + tag("a", "2") + tag("b", "x"))), "", [("f", {"a": [1, 2], "b": "x"})]),
    (block(invoke("f", tag("b", "x") + tag("b", "y"))), "", [("f", {"b": "y"})]),
    (block(invoke("f", tag("a", "1") + tag("b", "x") + tag("a", "2"))), "", [("f", {"a": 2, "b": "x"})]),
    (block(invoke("f", f"{NS}<b/>{NS}<a/>")), "", [("f", {"b": "", "a": ""})]),
    # The end of the block is cut off: no text.
    (f"{NS}<tool_call>\n{ROME}\n{NS}</tool_", "", [ROME_CALL]),
    (f"{NS}<tool_call>\n{ROME}\n{NS[:3]}", "", [ROME_CALL]),
    (f"{NS}<tool_call>\n{ROME} see [1{NS[:1]}", f" see [1{NS[:1]}", [ROME_CALL]),
    (f"{block(ROME)}\n{NS}</tool_", f"\n{NS}</tool_", [ROME_CALL]),
    (f"{NS}<tool_call>\n{ROME}\n", "", [ROME_CALL]),
    # Never closed, but something around it is.
    (block(f'{NS}<invoke name="f">{NS}<a>1{NS}</invoke>'), "", [("f", {"a": 1})]),
    (block(f'{NS}<invoke name="f">{NS}<list>{NS}<item>x{NS}</list>{NS}</invoke>'), "", [("f", {"list": ["x"]})]),
    (f'{NS}<tool_call>{NS}<invoke name="f">{NS}<a>1{NS}</tool_call> end', " end", [("f", {"a": 1})]),
    (block(f'{NS}<invoke name="f">{NS}<a>1{NS}</a>{ROME}'), "", [("f", {"a": 1}), ROME_CALL]),
    # Closed, but never opened.
    (block(invoke("f", f"{tag('a', '1')}{NS}</b>")), "", [("f", {"a": 1, "$text": f"{NS}</b>"})]),
    (block(invoke("f", tag("b", f"x{NS}</y>z"))), "", [("f", {"b": f"x{NS}</y>z"})]),
    (f"a {NS}</tool_call> b {NS}</invoke>", f"a {NS}</tool_call> b {NS}</invoke>", []),
    # No block around the call.
    (f"now: {ROME} done", "now: done", [ROME_CALL]),
    (f"now: {ROME}\n{NS}</tool_call>", "now:", [ROME_CALL]),
    # A block without a call.
    (f"{NS}<tool_call>\nwords {NS}</tool_call>", f"{NS}<tool_call>\nwords {NS}</tool_call>", []),
    (f"{NS}<tool_call>{NS}</tool_call>", f"{NS}<tool_call>{NS}</tool_call>", []),
    (f"{NS}<tool_call>{tag('a', '1')}", f"{NS}<tool_call>{tag('a', '1')}", []),
    (f"{NS}<tool_call> {NS}<tool_call>{ROME}", f"{NS}<tool_call> ", [ROME_CALL]),
    # No name, and tags that are none.
    (f"{NS}<invoke>x", f"{NS}<invoke>x", []),
    (f'{NS}<invoke name="">x', f'{NS}<invoke name="">x', []),
    (f"{NS}<>{NS}</>{NS}<a\nb>", f"{NS}<>{NS}</>{NS}<a\nb>", []),
    (f"{NS}<{'x' * 300}>", f"{NS}<{'x' * 300}>", []),
    # Text where none belongs.
    (f"{NS}<tool_call>words{ROME} end{NS}</tool_call>", f"{NS}<tool_call>words end", [ROME_CALL]),
    (block(invoke("f", "words" + tag("a", "1"))), "", [("f", {"a": 1, "$text": "words"})]),
    (block(invoke("f", "words")), "", [("f", {"$text": "words"})]),
]


@pytest.mark.parametrize(("text", "content", "calls"), BY_HAND + BROKEN)
def test_texts_by_hand(text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    whole = parsed_anyhow(lambda: MinimaxM3Tools(TOOLS), text, *halves(text))
    assert (whole.content, calls_of(whole)) == (content, calls)


@settings(deadline=None)
@given(outputs(), st.lists(st.integers(0, 10_000), max_size=10))
def test_generated_calls_are_read_back_however_they_are_cut(made: Written, at: list[int]) -> None:
    whole = parsed_anyhow(lambda: MinimaxM3Tools(made.tools), made.text, cut(made.text, at))
    assert calls_of(whole) == made.calls
    assert whole.content == made.content
    for call, (_, arguments) in zip(whole.calls, made.calls, strict=True):
        # Equality alone takes 1, 1.0 and True for the same.
        assert json.dumps(json.loads(call.arguments), sort_keys=True) == json.dumps(arguments, sort_keys=True)


@settings(deadline=None)
@given(outputs(), st.integers(0, 10_000))
def test_an_output_that_ends_anywhere_makes_one_unfinished_call_at_most(made: Written, end: int) -> None:
    text = made.text[: end % (len(made.text) + 1)]
    whole = parsed_anyhow(lambda: MinimaxM3Tools(made.tools), text)
    done = text.count(f"{NS}</invoke>")
    calls = calls_of(whole)
    # (Arguments may be named like a call, whence the inequality.)
    count = sum(isinstance(arguments, dict) for _, arguments in calls)
    assert calls[:count] == made.calls[:count] and count <= done
    assert len(calls) - count <= 1 and [name for name, _ in calls] == [name for name, _ in made.calls[: len(calls)]]


FRAGMENTS = st.sampled_from(
    [
        *(NS, f"{NS}<", f"{NS}</", "<", ">", "</", "tool_call>", "]<]", "minimax[>[", " ", "\n", "/", "", "é😀", '"'),
        *(
            f"{NS}<{name}>"
            for name in ("tool_call", "/tool_call", "/invoke", "a", "/a", "item", "/item", "list", "/list")
        ),
        *(f"{NS}<tool_call>{NS}<invoke name='f'>", f'{NS}<invoke name="f">', f"{NS}<b/>", "{", "[1]"),
    ]
)


@settings(max_examples=400, deadline=None)
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
    whole = parsed_anyhow(lambda: MinimaxM3Tools(tools), text, cut(text, at))
    shown = whole.content + "".join(call.name + call.arguments for call in whole.calls)
    assert [word for word in words if word not in shown] == []
    for call in whole.calls[:-1]:
        assert isinstance(json.loads(call.arguments), dict)


def test_nothing_is_held_back_without_need() -> None:
    parser = MinimaxM3Tools(TOOLS)
    assert parser.push("some text").content == "some text"
    assert parser.push(" ]<").content == ""
    assert parser.push("x").content == " ]<x"
    assert parser.push(f"{NS}<b").content == ""
    assert parser.push("\n").content == f"{NS}<b"
    assert parser.push(f'{NS}<tool_call>{NS}<invoke name="weather">').calls[0].name == "weather"
    assert arguments_of(parser.push(f"{NS}<city>Ro")) == '{"city":"Ro'
    assert arguments_of(parser.push("me]<]mini")) == "me"
    assert arguments_of(parser.push(f"max[>[</city>{NS}<days>3")) == '"'
    assert arguments_of(parser.push(f"{NS}</days>")) == "", "another one of that name would make a list of it"
    assert arguments_of(parser.push(f"{NS}<metric>")) == ',"days":3'
    assert arguments_of(parser.push(f"true{NS}</metric>{NS}</invoke>")) == ',"metric":true}'


def arguments_of(piece: ToolPiece) -> str:
    return "".join(call.arguments for call in piece.calls)


def test_calls_are_numbered() -> None:
    parser = MinimaxM3Tools(TOOLS)
    text = block(ROME, ROME) + block(ROME)
    made = [call for char in text for call in parser.push(char).calls]
    assert [call.index for call in made if call.name] == [0, 1, 2] and not parser.finish().calls
    assert all(json.loads(call.arguments) == ROME_CALL[1] for call in join_calls(made))


def test_what_stands_behind_calls_is_told_apart() -> None:
    parser = MinimaxM3Tools(TOOLS)
    piece = parser.push(f"one {block(ROME)} two {block(ROME)}")
    assert (piece.content, piece.behind) == ("one two", 4)


def test_depth_is_bounded_and_nothing_is_lost_below() -> None:
    deep = f"{NS}<a>" * 5000 + "bottom" + f"{NS}</a>" * 5000
    parsed = parse_tools(MinimaxM3Tools([]), block(invoke("f", deep)))
    (call,) = parsed.calls
    value, depth = json.loads(call.arguments), 0
    while isinstance(value, dict):
        value, depth = value["a"] if "a" in value else value["$text"], depth + 1
    assert depth == MAX_DEPTH
    assert "bottom" in parsed.content + call.arguments


def test_a_long_value_is_not_read_again_with_every_piece() -> None:
    """What a push looks at again is what the reader holds; that must not grow with a value."""
    parser = MinimaxM3Tools([])
    parser.push(f'{NS}<tool_call>{NS}<invoke name="f">{NS}<b>')
    held = 0
    for _ in range(2000):
        parser.push("some text with ]<] in it")
        held = max(held, len(parser._tags._held))
    assert held < len(NS)
    assert len(json.loads(arguments_of(parser.push(f"{NS}</b>{NS}</invoke>")))["b"]) == 2000 * 24


def test_pieces_of_a_call_that_came_together_are_one() -> None:
    pieces = [
        ToolCallDelta(1, "b", "list"),
        ToolCallDelta(0, "a", "read", '{"x"'),
        ToolCallDelta(0, arguments=": 1}"),
        ToolCallDelta(1, arguments="{}"),
    ]
    joined = join_pieces(pieces)
    assert joined == {1: ToolCallDelta(1, "b", "list", "{}"), 0: ToolCallDelta(0, "a", "read", '{"x": 1}')}
    assert join_calls(pieces) == (ToolCall("a", "read", '{"x": 1}'), ToolCall("b", "list", "{}"))
