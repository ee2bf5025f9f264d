"""Every pair of a reasoning and a tool format: pieces add up to the whole, and nothing a model writes is an error."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.config import ModelConfig
from longturn.engine.records import SamplingParams
from longturn.frontend.parsers.base import ToolPiece, join_calls
from longturn.frontend.parsers.output import OutputParser
from longturn.frontend.parsers.registry import AUTO, NONE, REASONING_FORMATS, TOOL_FORMATS, OutputFormat
from longturn.frontend.records import ChatPrompt, TextRequest
from tests.frontend import m3, qwen3_coder
from tests.frontend.json_calls import TOOLS, bare_outputs, hermes_outputs
from tests.frontend.m3 import cut

REQUEST = TextRequest(
    "r1",
    ChatPrompt(({"role": "user", "content": "hello"},), tuple(TOOLS)),
    SamplingParams(max_tokens=0),
    split_reasoning=True,
    parse_tools=True,
)
MAY_BREAK = ("hermes", "json", "llama_json")
"""Formats whose arguments are the model's own JSON, or what it took for that."""
WRITTEN: dict[str, Any] = {
    "hermes": hermes_outputs(),
    "json": bare_outputs(),
    "llama_json": bare_outputs(),
    "minimax_m3": m3.outputs(),
    "qwen3_coder": qwen3_coder.outputs(),
}


def read(form: OutputFormat, prompt: str, pieces: list[str]) -> tuple[str, str, list[tuple[str, str, str]], int]:
    """Content, reasoning, calls, and how many ids there are; every call's first piece has its name and id."""
    parser = OutputParser.of(form, REQUEST, prompt)
    assert parser is not None
    made = [*(parser.push(piece) for piece in pieces), parser.finish()]
    deltas = [delta for piece in made for delta in piece.calls]
    begun: set[int] = set()
    for delta in deltas:
        assert bool(delta.id) == bool(delta.name) == (delta.index not in begun)
        begun.add(delta.index)
    calls = join_calls(deltas)
    assert sorted(begun) == list(range(len(calls)))
    message = parser.message()
    assert [call["id"] for call in message.get("tool_calls", ())] == [call.id for call in calls]
    return (
        "".join(piece.content for piece in made),
        "".join(piece.reasoning for piece in made),
        [(call.id, call.name, call.arguments) for call in calls],
        len({call.id for call in calls}),
    )


def test_names_in_the_configuration() -> None:
    hints = get_type_hints(ModelConfig)
    assert set(get_args(hints["tool_parser"])) == {AUTO, NONE, *TOOL_FORMATS}
    assert set(get_args(hints["reasoning_parser"])) == {AUTO, NONE, *REASONING_FORMATS}


@pytest.mark.parametrize("tools", sorted(TOOL_FORMATS))
@pytest.mark.parametrize("reasoning", sorted(REASONING_FORMATS))
@settings(max_examples=40, deadline=None)
@given(data=st.data(), at=st.lists(st.integers(0, 10_000), max_size=10))
def test_reasoning_then_calls_at_every_chunking(reasoning: str, tools: str, data: Any, at: list[int]) -> None:
    form = OutputFormat(REASONING_FORMATS[reasoning], TOOL_FORMATS[tools])
    begin, end = REASONING_FORMATS[reasoning].markers
    made = data.draw(WRITTEN[tools])
    thought = data.draw(st.sampled_from(["a thought", "é😀\n\nso", "is < or {", "x"]))
    opened = data.draw(st.booleans())
    text = f"{'' if opened else begin}{thought}{end}{made.text}"
    prompt = f"ai\n{begin}" if opened else "ai\n"
    content, reasoned, calls, ids = whole = read(form, prompt, [text])
    assert read(form, prompt, list(text)) == read(form, prompt, cut(text, at)) == whole
    assert reasoned == thought and ids == len(calls)
    if tools not in ("minimax_m3", "qwen3_coder"):  # whose twins have tools of their own
        expected = made.content.lstrip() if reasoning == "think" and not made.text[:1].strip() else made.content
        assert content.strip() == expected.strip()
        assert [(name, json.loads(arguments)) for _, name, arguments in calls] == made.calls


@pytest.mark.parametrize("at", range(4))
def test_a_parser_that_fails_gives_the_text_back(at: int, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        """Holds everything back, and breaks."""

        def __init__(self) -> None:
            self.count = 0

        def push(self, text: str) -> ToolPiece:
            self.count += 1
            if self.count == at + 1:
                raise IndexError("a bug")
            return ToolPiece("a" if self.count == 1 else "")

        def finish(self) -> ToolPiece:
            raise KeyError("another")

    parser = OutputParser("r", None, Broken())
    made = [*(parser.push(piece) for piece in ("a", "b<tool", "_call>")), parser.finish()]
    assert "".join(piece.content for piece in made) == "ab<tool_call>"
    assert parser.message()["content"] == "ab<tool_call>"
    assert caplog.text.count("could not be parsed") == 1


PIECES = st.sampled_from(
    [
        *(
            "<think>",
            "</think>",
            "<mm:think>",
            "</mm:think>",
            "<tool_call>",
            "</tool_call>",
            "<|python_tag|>",
            "```json",
        ),
        *(m3.NS, f"{m3.NS}<tool_call>", f'{m3.NS}<invoke name="f">', f"{m3.NS}</invoke>", "{", "}", "[", '"', "\\"),
        *('{"name": "look"}', '{"name": "look", "arguments": {"a": 1}}', " ", "\n", "x", "é😀", "\ud800", "\x00"),
    ]
)


@pytest.mark.parametrize("tools", sorted(TOOL_FORMATS))
@pytest.mark.parametrize("reasoning", sorted(REASONING_FORMATS))
@settings(max_examples=80, deadline=None)
@given(st.lists(PIECES, max_size=14), st.lists(st.integers(0, 10_000), max_size=8), st.booleans())
def test_any_text_at_every_chunking(reasoning: str, tools: str, pieces: list[str], at: list[int], opened: bool) -> None:
    form = OutputFormat(REASONING_FORMATS[reasoning], TOOL_FORMATS[tools])
    prompt = REASONING_FORMATS[reasoning].markers[0] if opened else "ai\n"
    text = "".join(pieces)
    whole = read(form, prompt, [text])
    assert read(form, prompt, list(text)) == read(form, prompt, cut(text, at)) == whole
    assert all(name for _, name, _ in whole[2])
    for _, _, arguments in whole[2][:-1]:  # the last one may be cut off
        assert tools in MAY_BREAK or isinstance(json.loads(arguments), dict)
