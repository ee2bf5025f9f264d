"""Reasoning blocks as MiniMax-M3 and as Qwen3 write them, whole and in pieces."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.frontend.parsers.minimax_m3_tags import TOOL_BLOCK
from longturn.frontend.parsers.reasoning import MINIMAX_M3, THINK, MarkedReasoning

OPEN, CLOSE = MINIMAX_M3.open, MINIMAX_M3.close
CALL = f'{TOOL_BLOCK}]<]minimax[>[<invoke name="f">]<]minimax[>[</invoke>]<]minimax[>[</tool_call>'

WHOLE = [
    # prompt's end, output, reasoning, content
    ("ai\n", "an answer", "", "an answer"),
    ("ai\n", f"{OPEN}a thought{CLOSE}an answer", "a thought", "an answer"),
    ("ai\n", f"\n {OPEN}a thought\n{CLOSE}\n\nan answer", "a thought\n", "\n\nan answer"),
    ("ai\n", f"{OPEN}{CLOSE}an answer", "", "an answer"),
    # The model says that it will not think.
    ("ai\n", f"{CLOSE}an answer", "", "an answer"),
    ("ai\n", f"\n{CLOSE}{CLOSE}an answer", "", f"{CLOSE}an answer"),
    (f"ai\n{OPEN}", f"a thought{CLOSE}an answer", "a thought", "an answer"),
    (f"ai\n{OPEN}\n", f"\na thought{CLOSE}an answer", "\na thought", "an answer"),
    (f"ai\n{OPEN}", f"{OPEN}a thought{CLOSE}an answer", "a thought", "an answer"),
    (f"ai\n{OPEN}", f"{CLOSE}an answer", "", "an answer"),
    # Thinking was disabled by the prompt, which also explains the markers.
    (f"use {OPEN} to think\nai\n{OPEN}\n\n{CLOSE}\n\n", "an answer", "", "an answer"),
    # So much space is no beginning of a block any more.
    ("ai\n", " " * 256 + f"{OPEN}a{CLOSE}b", "a", "b"),
    ("ai\n", " " * 257 + f"{OPEN}a{CLOSE}b", "", " " * 257 + f"{OPEN}a{CLOSE}b"),
    # Cut off.
    ("ai\n", f"{OPEN}a thou", "a thou", ""),
    ("ai\n", f"{OPEN}a thought</mm:thi", "a thought</mm:thi", ""),
    (f"ai\n{OPEN}", "a thou", "a thou", ""),
    (f"ai\n{OPEN}", "", "", ""),
    ("ai\n", "<mm:th", "", "<mm:th"),
    ("ai\n", " \n", "", " \n"),
    # Markers in the answer are text.
    ("ai\n", f"the tag {OPEN} opens, {CLOSE} closes", "", f"the tag {OPEN} opens, {CLOSE} closes"),
    ("ai\n", f"{OPEN}a{CLOSE}b{OPEN}c{CLOSE}d", "a", f"b{OPEN}c{CLOSE}d"),
    ("ai\n", f"{OPEN}a{OPEN}b{CLOSE}c", f"a{OPEN}b", "c"),
    # A call in reasoning that is closed was a thought; in reasoning that never is, the answer.
    ("ai\n", f"{OPEN}a plan: {CALL} maybe{CLOSE}no", f"a plan: {CALL} maybe", "no"),
    ("ai\n", f"{OPEN}a plan\n{CALL}", "a plan\n", CALL),
    (f"ai\n{OPEN}", CALL, "", CALL),
    (f"ai\n{OPEN}", f"{CALL}</mm:think", "", f"{CALL}</mm:think"),
]


SPACED = [
    ("ai\n", "<think>\na thought\n</think>\n\nan answer\n", "a thought", "an answer\n"),
    ("ai\n", "<think>\n\none\n\ntwo \n\n</think>an answer", "one\n\ntwo", "an answer"),
    ("ai\n<think>\n", "a thought\n</think>\n\nan answer", "a thought", "an answer"),
    ("ai\n<think>\n\n</think>\n\n", "\nan answer", "", "\nan answer"),
    ("ai\n", "<think>\n\n</think>\n\nan answer", "", "an answer"),
    ("ai\n", "an answer <think>", "", "an answer <think>"),
    ("ai\n", "<think>\na thought \n", "a thought", ""),
    ("ai\n", "<think> a </think> \n", "a", ""),
    ("ai\n", "<think>\nplan\n<tool_call>{}</tool_call>", "plan", "<tool_call>{}</tool_call>"),
    ("ai\n", "<think>\nplan\n<tool_call>{} no\n</think>\nyes", "plan\n<tool_call>{} no", "yes"),
]


def m3(prompt: str, *, calls_end: bool = True) -> MarkedReasoning:
    return MarkedReasoning(prompt, MINIMAX_M3, calls_end=calls_end)


@pytest.mark.parametrize(("prompt", "text", "reasoning", "content"), SPACED)
def test_lines_around_the_markers_belong_to_the_format(prompt: str, text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text), *([text[:cut], text[cut:]] for cut in range(len(text)))):
        assert in_pieces(MarkedReasoning(prompt, THINK), pieces) == (reasoning, content)


def in_pieces(parser: MarkedReasoning, pieces: Sequence[str]) -> tuple[str, str]:
    made = [*(parser.push(piece) for piece in pieces), parser.finish()]
    return "".join(piece.reasoning for piece in made), "".join(piece.content for piece in made)


@pytest.mark.parametrize(("prompt", "text", "reasoning", "content"), WHOLE)
def test_texts_by_hand(prompt: str, text: str, reasoning: str, content: str) -> None:
    assert in_pieces(m3(prompt), [text]) == (reasoning, content)
    assert in_pieces(m3(prompt), list(text)) == (reasoning, content)
    for cut in range(len(text)):
        assert in_pieces(m3(prompt), [text[:cut], text[cut:]]) == (reasoning, content)


@pytest.mark.parametrize(("prompt", "text", "reasoning", "content"), WHOLE)
def test_span_is_where_the_reasoning_stands(prompt: str, text: str, reasoning: str, content: str) -> None:
    parser = m3(prompt)
    in_pieces(parser, list(text))
    first, end = parser.span
    assert text[first:end] == reasoning


def test_without_tools_a_call_in_open_reasoning_stays_there() -> None:
    text = f"{OPEN}a plan\n{CALL}"
    assert in_pieces(m3("", calls_end=False), list(text)) == (f"a plan\n{CALL}", "")


def test_nothing_is_held_back_without_need() -> None:
    parser = m3("")
    assert parser.push(OPEN + "a thought").reasoning == "a thought"
    assert parser.push(" <").reasoning == " "
    assert parser.push("b").reasoning == "<b"
    piece = parser.push(f"c{CLOSE}d</mm:t")
    assert (piece.reasoning, piece.content) == ("c", "d</mm:t")


FRAGMENTS = st.sampled_from(
    [
        OPEN,
        CLOSE,
        TOOL_BLOCK,
        "<mm:",
        "think>",
        "</mm:",
        "]<]minimax[>[",
        "<tool_call>",
        "]<]",
        " ",
        "\n",
        "a",
        "é😀",
        "<",
        ">",
    ]
)


@settings(deadline=None)
@given(st.lists(FRAGMENTS, max_size=12), st.lists(st.integers(0, 200), max_size=8), st.booleans(), st.booleans())
def test_any_text_cut_anywhere(fragments: list[str], cuts: list[int], opened: bool, calls_end: bool) -> None:
    text, prompt = "".join(fragments), OPEN if opened else "ai\n"
    reasoning, content = in_pieces(m3(prompt, calls_end=calls_end), [text])
    at = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in itertools.pairwise(at)]
    for cut in (pieces, list(text)):
        parser = m3(prompt, calls_end=calls_end)
        assert in_pieces(parser, cut) == (reasoning, content)
        first, end = parser.span
        assert text[first:end] == reasoning
    think = text.replace("mm:think", "think").replace("mm:", "")
    spaced, by_character = (
        in_pieces(MarkedReasoning("<think>" if opened else "", THINK, calls_end=calls_end), pieces)
        for pieces in ([think], list(think))
    )
    assert by_character == spaced
    assert spaced[0] == spaced[0].strip()
    # Nothing but a marker on each side and white space before the first goes.
    before, after = text[:first], text[end:]
    assert before.strip() in ("", OPEN) and after.endswith(content)
    assert after.removesuffix(content).strip() in ("", CLOSE)
