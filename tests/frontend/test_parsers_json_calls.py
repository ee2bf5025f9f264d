"""Tool calls as JSON: by hand, generated and read back, broken, and cut into pieces."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.frontend.parsers.base import join_calls, parse_tools
from longturn.frontend.parsers.json_calls import hermes, llama_json, plain_json
from longturn.frontend.parsers.json_scan import MAX_JSON_DEPTH, JsonEnd
from longturn.frontend.parsers.registry import TOOL_FORMATS
from tests.frontend.json_calls import TOOLS, Written, bare_outputs, hermes_outputs
from tests.frontend.m3 import cut
from tests.frontend.parsed import calls_of, halves, parsed_anyhow

LOOK = '{"name": "look", "arguments": {"path": "a.py"}}'
LOOKED = ("look", {"path": "a.py"})
NESTED = '{"name": "run", "arguments": {"argv": ["}", "]", "</tool_call>", "\\"{"], "deep": {"a": {"b": []}}}}'
NESTED_CALL = ("run", {"argv": ["}", "]", "</tool_call>", '"{'], "deep": {"a": {"b": []}}})


def block(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


HERMES: list[tuple[str, str, list[Any]]] = [
    ("no call at all\n", "no call at all\n", []),
    (block(LOOK), "", [LOOKED]),
    (f"One moment.\n\n{block(LOOK)}\n", "One moment.", [LOOKED]),
    (f"{block(LOOK)}\n{block(NESTED)}", "", [LOOKED, NESTED_CALL]),
    (f"one {block(LOOK)} two", "one two", [LOOKED]),
    # Several in one block, and a list.
    (block(f"{LOOK}\n{NESTED}"), "", [LOOKED, NESTED_CALL]),
    (block(f"[{LOOK}, {NESTED}]"), "", [LOOKED, NESTED_CALL]),
    # Other spellings of the same.
    (block('{"name": "look", "parameters": {"path": "a.py"}}'), "", [LOOKED]),
    (block('{"name": "look", "arguments": "{\\"path\\": \\"a.py\\"}"}'), "", [LOOKED]),
    (block('{"type": "function", "function": {"name": "look", "arguments": {"path": "a.py"}}}'), "", [LOOKED]),
    (block('{"name": "look"}'), "", [("look", {})]),
    (block('{"name": "look", "arguments": null}'), "", [("look", {})]),
    (block('{"name": "look", "arguments": ""}'), "", [("look", {})]),
    # Names that are no tools are calls too: the marker says what it is.
    (block('{"name": "none of them", "arguments": {}, "why": 1}'), "", [("none of them", {})]),
    # A line end inside a string.
    (block('{"name": "look", "arguments": {"path": "a\nb"}}'), "", [("look", {"path": "a\nb"})]),
    # Never closed.
    (f"<tool_call>{LOOK}", "", [LOOKED]),
    (f"<tool_call>{LOOK}\n<tool_call>{NESTED}", "", [LOOKED, NESTED_CALL]),
    (f"<tool_call>{LOOK} and then", " and then", [LOOKED]),
    # Cut off in the closing marker, which is no text.
    (f"<tool_call>{LOOK}\n</tool_", "", [LOOKED]),
    (f"<tool_call>{LOOK}\n<", "", [LOOKED]),
    (f"<tool_call>{LOOK}\n</tools", "\n</tools", [LOOKED]),
    # No call: the text as it was.
    (block('{"arguments": {"path": }, "name": "look"}'), block('{"arguments": {"path": }, "name": "look"}'), []),
    (block("{'name': 'look'}"), block("{'name': 'look'}"), []),
    (block('{"arguments": {}}'), block('{"arguments": {}}'), []),
    (block('{"name": "look", "arguments": [1]}'), block('{"name": "look", "arguments": [1]}'), []),
    # Its arguments were being given out when they turned out to be no JSON.
    (block('{"name": "look", "arguments": {"path": }}'), "", [("look", '{"path": }')]),
    (block('{"name": "look", "arguments": {"x": NaN}}'), "", [("look", '{"x": NaN}')]),
    (block('{"name": "look", "arguments": {"a": [1}}') + " x", " x", [("look", '{"a": [1}}')]),
    (block('{"name": "look", "arguments": {"a": 1') + " x", " x", [("look", '{"a": 1\n')]),
    (f'<tool_call>{{"name": "f", "arguments": {"{" * 300}', "{" * 99, [("f", "{" * (MAX_JSON_DEPTH + 1))]),
    # Their end is there, and that of the call is not.
    (block('{"name": "look", "arguments": {"a": 1}') + " x", " x", [("look", {"a": 1})]),
    # Members before and behind, which say nothing.
    (block('{"id": "1", "name": "look", "type": "x", "arguments": {}}'), "", [("look", {})]),
    (block('{"name": "look", "arguments": {"a": 1}, "id": "}", "b": {}}'), "", [("look", {"a": 1})]),
    (block('{"name": "look", "arguments": {"a": 1}, oops\'s'), ", oops's\n</tool_call>", [("look", {"a": 1})]),
    (block("look(a.py)"), block("look(a.py)"), []),
    (block("[]"), block("[]"), []),
    (block(f"[{LOOK}, 1]"), block(f"[{LOOK}, 1]"), []),
    ("the tag <tool_call> opens a call", "the tag <tool_call> opens a call", []),
    ("a </tool_call> b", "a </tool_call> b", []),
    # A marker behind one that opened nothing.
    (f"<tool_call> see: {block(LOOK)}", "<tool_call> see:", [LOOKED]),
    (f"<tool_call>{{{block(LOOK)}", "<tool_call>{", [LOOKED]),
    # Cut off.
    (f"ok <tool_call>\n{LOOK[:29]}", f"ok <tool_call>\n{LOOK[:29]}", []),
    (f"ok <tool_call>\n{LOOK[:31]}", "ok", [("look", "{")]),
    (f"ok <tool_call>\n{LOOK[:40]}", "ok", [("look", '{"path": "')]),
    (f"{block(LOOK)}\n<tool_call>{NESTED[:-1]}", "", [LOOKED, NESTED_CALL]),
    (f"{block(LOOK)}\n<tool_call>{NESTED[:-2]}", "", [LOOKED, ("run", NESTED[29:-2])]),
    ("ok <tool_call>", "ok <tool_call>", []),
    ("ok <tool_", "ok <tool_", []),
    (f"<tool_call>{'[' * 300}", f"<tool_call>{'[' * 300}", []),
]

BARE: list[tuple[str, str, list[Any]]] = [
    (LOOK, "", [LOOKED]),
    (f"\n {LOOK}\n", "", [LOOKED]),
    (f"{LOOK}\n{NESTED}", "", [LOOKED, NESTED_CALL]),
    (f"{LOOK}; {NESTED}", "", [LOOKED, NESTED_CALL]),
    (f"[{LOOK},{NESTED}]", "", [LOOKED, NESTED_CALL]),
    (f"{LOOK} done", " done", [LOOKED]),
    (f"{LOOK}; done", "; done", [LOOKED]),
    (f"{LOOK};", ";", [LOOKED]),
    # Data: a name that is no tool, or a member that calls have not.
    ('{"name": "Rome", "arguments": {}}', '{"name": "Rome", "arguments": {}}', []),
    ('{"name": "look", "age": 3}', '{"name": "look", "age": 3}', []),
    ('{"city": "Rome"}\n', '{"city": "Rome"}\n', []),
    ("[1, 2]", "[1, 2]", []),
    ("{} x", "{} x", []),
    ("[look at this]", "[look at this]", []),
    (f"Here: {LOOK}", f"Here: {LOOK}", []),
    (LOOK[:-1], "", [LOOKED]),
    (f"{LOOK[:-1]} x", " x", [LOOKED]),
    (f"{LOOK}\n{LOOK[:-2]}", "", [LOOKED, ("look", LOOK[30:-2])]),
    (LOOK[:20], LOOK[:20], []),
    (" \n", " \n", []),
    (" " * 257 + LOOK, " " * 257 + LOOK, []),
]

LLAMA: list[tuple[str, str, list[Any]]] = [
    (f"<|python_tag|>{LOOK}", "", [LOOKED]),
    (f"I will look. <|python_tag|>{LOOK}", "I will look.", [LOOKED]),
    ('<|python_tag|>look.call(path="a")', '<|python_tag|>look.call(path="a")', []),
]

PLAIN: list[tuple[str, str, list[Any]]] = [
    (f"```json\n{LOOK}\n```", "", [LOOKED]),
    (f"So:\n```json\n{LOOK}\n```\nWait.", "So:\nWait.", [LOOKED]),
    (f"```json\n{LOOK}\n``", "", [LOOKED]),
    (f"<tool_call>{LOOK}</tool_call>", "", [LOOKED]),
    ('```json\n{"city": 1}\n```', '```json\n{"city": 1}\n```', []),
    (f"```python\n{LOOK}\n```", f"```python\n{LOOK}\n```", []),
]

BY_HAND = [
    *((hermes, *case) for case in HERMES),
    *((make, *case) for make in (llama_json, plain_json) for case in BARE),
    *((llama_json, *case) for case in LLAMA),
    *((plain_json, *case) for case in PLAIN),
]


@pytest.mark.parametrize(("make", "text", "content", "calls"), BY_HAND)
def test_texts_by_hand(make: Any, text: str, content: str, calls: list[Any]) -> None:
    whole = parsed_anyhow(lambda: make(TOOLS), text, *halves(text))
    assert (whole.content, calls_of(whole)) == (content, calls)


@settings(deadline=None)
@given(hermes_outputs(), st.lists(st.integers(0, 10_000), max_size=10))
def test_generated_blocks_are_read_back_however_they_are_cut(made: Written, at: list[int]) -> None:
    whole = parsed_anyhow(lambda: hermes(TOOLS), made.text, cut(made.text, at))
    assert (whole.content, calls_of(whole)) == (made.content, made.calls)


@settings(deadline=None)
@given(bare_outputs(), st.lists(st.integers(0, 10_000), max_size=10), st.sampled_from([llama_json, plain_json]))
def test_generated_calls_without_markers_are_read_back(made: Written, at: list[int], make: Any) -> None:
    whole = parsed_anyhow(lambda: make(TOOLS), made.text, cut(made.text, at))
    assert (whole.content, calls_of(whole)) == (made.content, made.calls)


@settings(deadline=None)
@given(hermes_outputs() | bare_outputs(), st.integers(0, 10_000), st.sampled_from([hermes, llama_json, plain_json]))
def test_an_output_that_ends_anywhere_makes_one_unfinished_call_at_most(made: Written, end: int, make: Any) -> None:
    text = made.text[: end % (len(made.text) + 1)]
    whole = parsed_anyhow(lambda: make(TOOLS), text)
    calls = calls_of(whole)
    if calls and isinstance(calls[-1][1], str):
        name, begun = calls.pop()
        assert any(name == other for other, _ in made.calls) and begun in text
    # In order, and none that was not made (a format may leave out those that are none of the tools).
    rest = iter(made.calls)
    assert all(any(call == other for other in rest) for call in calls)


FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<|python_tag|>", "```json", "```", "<tool_", "call>", "<", "`", " ", "\n"),
        *('{"name": "look", "arguments": {', '"a": 1', "}}", "}", "{", "[", "]", '"', "\\", ",", ";", ":", "é😀"),
        *('{"name": "f"}', '{"name": "g"}', '"name"', "NaN", "1e999", "'", '{"x": 1}', '\\"', "[[", "\x1f", "\ufeff"),
    ]
)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.tuples(FRAGMENTS, st.booleans()), max_size=16),
    st.lists(st.integers(0, 10_000), max_size=8),
    st.sampled_from(sorted(TOOL_FORMATS)),
    st.booleans(),
)
def test_any_text_cut_anywhere(fragments: list[tuple[str, bool]], at: list[int], name: str, known: bool) -> None:
    words = [f"w{number}w" if has_word else "" for number, (_, has_word) in enumerate(fragments)]
    text = "".join(fragment + word for (fragment, _), word in zip(fragments, words, strict=True))
    make = TOOL_FORMATS[name].make
    tools = TOOLS if known else []
    whole = parsed_anyhow(lambda: make(tools), text, cut(text, at))
    assert all(call.name for call in whole.calls)
    # Nothing is lost but what belongs to calls and the white space around them.
    if not whole.calls:
        assert whole.content == text


@given(
    st.recursive(st.text() | st.integers() | st.none(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)),
    st.text(),
)
def test_the_end_of_a_value_is_found(value: Any, after: str) -> None:
    text = json.dumps([value], ensure_ascii=False)
    assert JsonEnd().push(text + after) == len(text)
    scanner = JsonEnd()
    ends = [scanner.push(char) for char in text]
    assert ends == [None] * (len(text) - 1) + [1]


def test_arguments_keep_the_models_spelling() -> None:
    arguments = '{"b": 1.50, "a" : "caf\\u00e9", "n": 1e3}'
    (call,) = parse_tools(hermes([]), block(f'{{"name": "f", "arguments": {arguments}}}')).calls
    assert call.arguments == arguments


def test_nothing_is_held_back_without_need() -> None:
    parser = hermes([])
    assert parser.push("some text").content == "some text"
    assert parser.push(" <").content == ""
    assert parser.push("b").content == " <b"
    assert parser.push("<tool_call>x").content == "<tool_call>x"
    assert parser.push(f"<tool_call>{LOOK[:29]}").calls == ()
    (begun,) = parser.push("{").calls[:1]
    assert (begun.name, begun.arguments) == ("look", ""), "a call is given out when its arguments begin"
    assert "".join(call.arguments for call in parser.push('"a": "b').calls) == '"a": "b'
    bare = plain_json(TOOLS)
    assert bare.push('{"city": ').content == '{"city":', "data is not held back once it cannot be a call"


def test_a_long_call_is_not_read_again_with_every_piece() -> None:
    parser = hermes([])
    made = list(parser.push('<tool_call>{"name": "f", "arguments": {"b": "').calls)
    for _ in range(2000):
        made += parser.push("some text with < and { in it").calls
        assert len(parser._pending) == 0
    made += parser.push('"}}').calls
    (call,) = join_calls(made)
    assert len(json.loads(call.arguments)["b"]) == 2000 * 28
