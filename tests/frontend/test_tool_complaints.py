"""Tools whose schemas cannot be kept: the error is one short line that names the tool, in every format."""

from __future__ import annotations

from typing import Any

import pytest

from longturn.errors import RequestError
from longturn.frontend import grammar
from longturn.frontend.grammar_compiler import GrammarCompiler, GrammarLimits
from longturn.frontend.grammar_reasoning import ReasoningMarks
from longturn.frontend.parsers.registry import TOOL_FORMATS
from longturn.frontend.parsers.tool_grammar import tool_grammar
from longturn.frontend.records import ToolChoice
from tests.frontend.test_tool_grammar import FORMATS, VOCABULARY, tool

THINK = ReasoningMarks("<think>", "</think>")
COMPILER = GrammarCompiler(lambda: VOCABULARY, GrammarLimits(timeout_s=30))


def refusal(form: str, *tools: dict[str, Any], choice: str = "auto", marks: ReasoningMarks | None = None) -> str:
    spec = tool_grammar(TOOL_FORMATS[form].grammar, tools, ToolChoice(choice), {})
    assert spec is not None
    with pytest.raises(RequestError) as caught:
        COMPILER.compile_now(spec, marks)
    assert caught.value.param == spec.param
    return str(caught.value)


def of(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"x": schema}, "required": ["x"]}


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("marks", [None, THINK], ids=["plain", "reasons"])
def test_a_strict_tool_that_cannot_be_followed_is_named(form: str, marks: ReasoningMarks | None) -> None:
    good, bad = (
        tool("good", of({"type": "integer"}), strict=True),
        tool("bad", of({"type": "integer", "not": {}}), strict=True),
    )
    message = "'tools': the schema of the tool 'bad' cannot be compiled: Unimplemented keys: [\"not\"]"
    assert refusal(form, good, bad, marks=marks) == message
    # The outcome is remembered by the grammar, and who is to blame by the request.
    assert refusal(
        form, good, tool("worse", of({"type": "integer", "not": {}}), strict=True), bad, marks=marks
    ).startswith("'tools': the schema of the tool 'worse'")


@pytest.mark.parametrize("form", [form for form in FORMATS if form != "minimax_m3"])
def test_a_tool_that_must_be_called_and_has_no_schema_is_named(form: str) -> None:
    """MiniMax-M3 writes what has no known type as a text."""
    message = refusal(form, tool("good"), tool("bad", of({"type": "txet"})), choice="required")
    assert message == "'tool_choice': the schema of the tool 'bad' cannot be compiled: Invalid type: txet"


def test_tools_that_are_too_large_are_said_to_be() -> None:
    spec = tool_grammar(TOOL_FORMATS["hermes"].grammar, [tool("f")], ToolChoice("required"), {})
    assert spec is not None
    small = GrammarCompiler(lambda: VOCABULARY, GrammarLimits(max_bytes=10))
    with pytest.raises(RequestError, match=r"^'tool_choice': the schemas of the tools have more than 10 bytes"):
        small.compile_now(spec)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (grammar.regex("(?=a)b"), "'regex' cannot be compiled: invalid regex"),
        (grammar.ebnf('start: "a" | foo'), "'grammar' cannot be compiled: at 1(8): unknown name: \"foo\""),
    ],
)
def test_a_complaint_shows_no_grammar_that_the_library_has_made(spec: grammar.GrammarSpec, message: str) -> None:
    """Where it lies is said to those alone who have written the grammar, and they have it."""
    with pytest.raises(RequestError) as caught:
        COMPILER.compile_now(spec)
    assert str(caught.value).startswith(message) and " | " not in str(caught.value)
