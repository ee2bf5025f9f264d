"""Grammars of tool calls: what a format's own template writes is accepted, and whatever the grammar lets through is
read back as calls whose arguments fit their schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from longturn.errors import RequestError
from longturn.frontend.grammar import GrammarSpec, json_schema, library_text, regex
from longturn.frontend.grammar_reasoning import ReasoningMarks, behind_reasoning
from longturn.frontend.grammar_vocabulary import vocabulary_of
from longturn.frontend.parsers.base import parse_tools
from longturn.frontend.parsers.registry import TOOL_FORMATS
from longturn.frontend.parsers.tool_grammar import MAX_CALLS, tool_grammar
from longturn.frontend.records import ToolCall, ToolChoice
from longturn.frontend.tokenizer import Tokenizer, TokenizerSettings
from longturn.grammar_library import error_of, library_tokenizer, new_matcher
from longturn.models.small_tokenizer import small_tokenizer, special_ids
from tests.frontend import qwen3_coder
from tests.frontend.m3 import NS, block, invoke, schema_of, tag, written

VOCAB = 2048
EOS = special_ids(VOCAB)["eos_token_id"]
TOKENIZER = Tokenizer(small_tokenizer(VOCAB), TokenizerSettings({"eos_token": "[e~["}, {}))
VOCABULARY = vocabulary_of(TOKENIZER, VOCAB, (EOS,))
LIBRARY = library_tokenizer(VOCABULARY)
REQUIRED = ToolChoice("required")
FORMATS = sorted(TOOL_FORMATS)


def tool(name: str, schema: Any = None, *, strict: bool = False) -> dict[str, Any]:
    parameters = {} if schema is None else {"parameters": schema}
    return {"type": "function", "function": {"name": name, **parameters, **({"strict": True} if strict else {})}}


def call(form: str, name: str, arguments: Mapping[str, Any]) -> str:
    """A call as the format's template writes it."""
    if form == "minimax_m3":
        return invoke(name, "".join(tag(key, written(value)) for key, value in arguments.items()))
    if form == "qwen3_coder":
        return qwen3_coder.call(name, arguments)
    key = "parameters" if form == "llama_json" else "arguments"
    return f'{{"name": "{name}", "{key}": {json.dumps(arguments, ensure_ascii=False)}}}'


def answer(form: str, *calls: str) -> str:
    if form == "minimax_m3":
        return block(*calls)
    if form == "hermes":
        return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in calls)
    if form == "qwen3_coder":
        return "\n".join(map(qwen3_coder.block, calls))
    return "\n".join(calls)


def grammar(form: str, tools: list[Any], choice: ToolChoice = REQUIRED, **options: Any) -> GrammarSpec:
    made = tool_grammar(TOOL_FORMATS[form].grammar, tools, choice, {}, **options)
    assert made is not None
    return made


def accepts(spec: GrammarSpec, text: str) -> bool:
    """The whole of the text is an answer."""
    matcher = new_matcher(LIBRARY, library_text(spec))
    assert error_of(matcher) is None, error_of(matcher)
    return all(matcher.consume_token(token) for token in VOCABULARY.encode(text)) and matcher.is_accepting()


KEY = st.from_regex(r"[a-z][a-z0-9_]{0,5}", fullmatch=True)
TEXT = st.text(
    alphabet=st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=12
) | st.text(alphabet="]<[>minax/ '\u00e9\U0001f600", max_size=20)  # fmt: skip
VALUE = st.recursive(
    TEXT.filter(lambda text: NS not in text) | st.integers(-(10**12), 10**12) | st.booleans(),
    # Lists of one type: grammars know the schema of all entries, not of each.
    lambda inner: (
        st.dictionaries(KEY, inner, min_size=1, max_size=3)
        | st.lists(st.integers(), min_size=1, max_size=3)
        | st.lists(TEXT.filter(lambda text: NS not in text), min_size=1, max_size=3)
    ),
    max_leaves=6,
)


def schema(value: Any) -> dict[str, Any]:
    """As `schema_of`, with one schema for all entries of a list."""
    if isinstance(value, dict):
        return {"type": "object", "properties": {key: schema(item) for key, item in value.items()}}
    return {"type": "array", "items": schema_of(value[0])} if isinstance(value, list) else schema_of(value)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(KEY, VALUE, max_size=3), min_size=1, max_size=3), st.sampled_from(FORMATS))
def test_what_templates_write_is_accepted_and_nothing_else(values: list[dict[str, Any]], form: str) -> None:
    if form == "llama_json":
        del values[1:]
    tools = [tool(f"f{number}", schema(value), strict=True) for number, value in enumerate(values)]
    spec = grammar(form, tools)
    text = answer(form, *(call(form, f"f{number}", value) for number, value in enumerate(values)))
    assert accepts(spec, text)
    assert not accepts(spec, text[:-1])
    assert not accepts(spec, f"{text} and")
    assert not accepts(spec, f"Well: {text}")
    assert not accepts(spec, text.replace("f0", "g0"))
    parsed = parse_tools(TOOL_FORMATS[form].make(tools), text)
    assert [json.loads(one.arguments) for one in parsed.calls] == values and parsed.content == ""


SCHEMAS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 40}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"enum": ["x", "yes", 3, True]}, "b": {"const": "k"}}, "required": ["b"]},
    {"type": "object", "properties": {"a": {"type": "string", "minLength": 2, "maxLength": 6}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-c]{1,5}(-[0-9])?$"}}, "required": ["a"]},
    {
        "type": "object",
        "properties": {
            "l": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
            "m": {"type": "array", "items": {"type": "object", "properties": {"n": {"type": "number"}}}, "maxItems": 2},
        },
        "required": ["l"],
    },
    {
        "type": "object",
        "properties": {"t": {"$ref": "#/$defs/tree"}},
        "required": ["t"],
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "v": {"type": "integer", "minimum": 0, "maximum": 9},
                    "kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
                },
                "required": ["v"],
            }
        },
    },
    {"type": "object", "properties": {"a": {"anyOf": [{"type": "integer"}, {"type": "boolean"}, {"type": "null"}]}}},
    {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]}, {"properties": {"b": {"enum": ["q"]}}}]},
    {"type": "object", "properties": {}},
]


def walk(spec: GrammarSpec, seed: int, *, most: int = 600) -> str | None:
    """A random text of a grammar, with a taste for its end; None if it takes too long."""
    chance = random.Random(seed)
    matcher = new_matcher(LIBRARY, library_text(spec))
    assert error_of(matcher) is None, error_of(matcher)
    ids: list[int] = []
    while len(ids) < most:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        assert allowed and error_of(matcher) is None
        if EOS in allowed and (len(allowed) == 1 or chance.random() < 0.6):
            return TOKENIZER.decode(ids, skip_special_tokens=False)
        closing = [token for token in allowed if VOCABULARY.tokens[token][:1] in (b'"', b"}", b"]", b"<", b"\n")]
        token = chance.choice(closing if closing and chance.random() < 0.4 else allowed)
        if token == EOS:
            continue
        assert matcher.consume_token(token)
        ids.append(token)
    return None


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("number", range(len(SCHEMAS)))
def test_whatever_a_grammar_lets_through_is_calls_that_fit(form: str, number: int) -> None:
    tools = [tool("f", SCHEMAS[number], strict=True), tool("other")]
    spec = grammar(form, tools)
    ended = 0
    for seed in range(12):
        if (text := walk(spec, seed)) is None:
            continue
        ended += 1
        parsed = parse_tools(TOOL_FORMATS[form].make(tools), text)
        assert parsed.content == "" and 1 <= len(parsed.calls) <= MAX_CALLS, text
        for one in parsed.calls:
            arguments = json.loads(one.arguments)
            if one.name == "f":
                jsonschema.validate(arguments, SCHEMAS[number])
            else:
                assert (one.name, arguments) == ("other", {})
    assert ended >= 4


@pytest.mark.parametrize("form", FORMATS)
def test_one_function_and_one_call(form: str) -> None:
    tools = [tool("f"), tool("g")]
    f, g = call(form, "f", {}), call(form, "g", {})
    named = grammar(form, tools, ToolChoice("required", ("g",), parallel=False))
    assert accepts(named, answer(form, g))
    assert not accepts(named, answer(form, f))
    assert not accepts(named, answer(form, g, g))
    many = grammar(form, tools)
    assert accepts(many, answer(form, g, f)) is (form != "llama_json")


@pytest.mark.parametrize("form", FORMATS)
def test_strict_functions_bind_calls_and_leave_text_free(form: str) -> None:
    tools = [tool("f", SCHEMAS[0], strict=True), tool("g")]
    spec = grammar(form, tools, ToolChoice("auto"))
    good, bad = answer(form, call(form, "f", {"a": 5})), answer(form, call(form, "f", {"a": 50}))
    assert accepts(spec, good) and not accepts(spec, bad)
    assert accepts(spec, "") and accepts(spec, "Just text, with { and <b>.\n")
    if TOOL_FORMATS[form].grammar.marker is not None:  # type: ignore[union-attr]
        assert accepts(spec, f"Text first.\n{good}") and not accepts(spec, f"Text first.\n{bad}")
        assert accepts(spec, f"{good}\n{good} and text") and not accepts(spec, f"{good}\n{bad}")
        once = grammar(form, tools, ToolChoice("auto", parallel=False))
        assert accepts(once, f"Text first.\n{good}") and not accepts(once, f"{good}\n{good}")


@pytest.mark.parametrize("form", FORMATS)
def test_an_answer_by_schema_or_calls(form: str) -> None:
    content = json_schema({"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]})
    spec = grammar(form, [tool("g")], ToolChoice("auto"), content=content)
    assert accepts(spec, '{"city": "Rome"}') and accepts(spec, answer(form, call(form, "g", {})))
    assert not accepts(spec, "Rome") and not accepts(spec, '{"city": "Bonn"}')
    forced = grammar(form, [tool("g")], REQUIRED, content=content)
    assert not accepts(forced, '{"city": "Rome"}') and accepts(forced, answer(form, call(form, "g", {})))


def test_where_tools_ask_for_nothing_there_is_no_grammar() -> None:
    form = TOOL_FORMATS["hermes"].grammar
    content = regex("[a-z]+")
    for tools, choice in (([tool("f")], ToolChoice()), ([], ToolChoice()), ([tool("f")], ToolChoice("none"))):
        assert tool_grammar(form, tools, choice, {}) is None
        assert tool_grammar(form, [], ToolChoice(), {}, content) == content
    # A model without a format is asked for text alone.
    assert tool_grammar(None, [tool("f", strict=True)], ToolChoice(), {}) is None


@pytest.mark.parametrize(
    ("tools", "choice", "param", "names"),
    [
        ([tool("f")], ToolChoice("required", ("g",)), "tool_choice", "'g'"),
        ([], REQUIRED, "tool_choice", "no tools"),
        ([{"type": "function"}], REQUIRED, "tools[0].function", "object"),
        ([tool("f"), tool("")], REQUIRED, "tools[1].function.name", "text"),
        ([tool("f", 3)], REQUIRED, "tools[0].function.parameters", "schema"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_name(tools: list[Any], choice: ToolChoice, param: str, names: str) -> None:
    with pytest.raises(RequestError, match=names) as refused:
        tool_grammar(TOOL_FORMATS["hermes"].grammar, tools, choice, {})
    assert refused.value.param == param
    with pytest.raises(RequestError, match="tool_parser"):
        tool_grammar(None, [tool("f")], REQUIRED, {})


def test_a_schema_nested_too_deeply_is_that_requests_error() -> None:
    deep: Any = {"type": "string"}
    for _ in range(500):
        deep = {"type": "object", "properties": {"a": deep}}
    for form in FORMATS:
        with pytest.raises(RequestError, match="deep"):
            tool_grammar(TOOL_FORMATS[form].grammar, [tool("f", deep)], REQUIRED, {})


@pytest.mark.parametrize("form", ["hermes", "minimax_m3"])
def test_markers_that_are_control_tokens_are_tokens_in_the_grammar(form: str) -> None:
    marks = TOOL_FORMATS[form].markers
    backend = small_tokenizer(VOCAB)
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer = Tokenizer(backend, TokenizerSettings({"eos_token": "[e~["}, {}))
    tokens = {mark: token for mark in marks if (token := tokenizer.token_id(mark)) is not None}
    assert len(tokens) == len(marks) and tokenizer.special_ids.issuperset(tokens.values())
    library = library_tokenizer(vocabulary_of(tokenizer, max(VOCAB, *(t + 1 for t in tokens.values())), (EOS,)))
    tools = [tool("f", {"type": "object", "properties": {"a": {"type": "string"}}})]
    for choice in (REQUIRED, ToolChoice("auto", parallel=False)):
        spec = tool_grammar(TOOL_FORMATS[form].grammar, tools, choice, tokens)
        assert spec is not None
        matcher = new_matcher(library, library_text(spec))
        ids = tokenizer.encode(answer(form, call(form, "f", {"a": "x"})))
        assert tokens.keys() >= set(marks) and set(tokens.values()) <= set(ids)
        assert all(matcher.consume_token(token) for token in ids) and matcher.is_accepting(), error_of(matcher)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("opened", [False, True])
def test_calls_behind_reasoning(form: str, opened: bool) -> None:
    marks = ReasoningMarks("<think>", "</think>", opened=opened)
    tools = [tool("f", SCHEMAS[0], strict=True)]
    good, bad = (answer(form, call(form, "f", {"a": value})) for value in (5, 50))
    thought = "so: <tool_call> {</think>\n\n" if opened else "<think>\nso: <tool_call> {</think>\n\n"

    def whole(spec: GrammarSpec, text: str) -> bool:
        matcher = new_matcher(LIBRARY, behind_reasoning(library_text(spec), marks, may_open_line=False))
        assert error_of(matcher) is None, error_of(matcher)
        return all(matcher.consume_token(token) for token in VOCABULARY.encode(text)) and matcher.is_accepting()

    forced = grammar(form, tools, may_open_lines=True)
    assert whole(forced, thought + good) and not whole(forced, thought + bad) and not whole(forced, thought)
    assert whole(forced, good) is (not opened)
    free = grammar(form, tools, ToolChoice("auto"), reasoning_open="<think>")
    assert whole(free, thought + "some text") and not whole(free, thought.rstrip() + bad)


def test_empty_lines_behind_reasoning() -> None:
    tools = [tool("f")]
    text = answer("hermes", call("hermes", "f", {}))
    assert accepts(grammar("hermes", tools, may_open_lines=True), f"\n\n{text}")
    assert not accepts(grammar("hermes", tools), f"\n\n{text}")
    assert parse_tools(TOOL_FORMATS["hermes"].make(tools), f"\n\n{text}").calls == (ToolCall(name="f", arguments="{}"),)


@pytest.mark.parametrize("form", ["hermes", "json", "llama_json"])
def test_members_that_a_schema_does_not_name_need_its_leave(form: str) -> None:
    plain = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for schema_of_f, allowed in ((plain, False), ({**plain, "additionalProperties": {"type": "integer"}}, True)):
        spec = grammar(form, [tool("f", schema_of_f)])
        assert accepts(spec, answer(form, call(form, "f", {"a": 1})))
        assert accepts(spec, answer(form, call(form, "f", {"a": 1, "b": 2}))) is allowed


@pytest.mark.parametrize("form", FORMATS)
def test_schemas_as_generators_write_them(form: str) -> None:
    parameters = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": "http://example.org/tool",
        "type": "object",
        "properties": {
            "mail": {"type": "string", "format": "email", "pattern": "^(?!\\.)[a-z.]*@[a-z.]+$", "title": "Mail"},
            "size": {"$ref": "#/definitions/size"},
            "kind": {"type": "string", "format": "none that is known", "default": "x", "examples": ["y"]},
            "either": {"oneOf": [{"type": "string"}, {"type": "integer"}]},
            "maybe": {"type": ["string", "null"], "nullable": True},
            "rest": {},
        },
        "required": ["size"],
        "definitions": {"size": {"type": "integer", "exclusiveMinimum": 0}},
    }
    spec = grammar(form, [tool("f", parameters)])
    assert accepts(spec, answer(form, call(form, "f", {"size": 3})))
    assert accepts(spec, answer(form, call(form, "f", {"size": 3, "kind": "any", "either": "a", "maybe": "b"})))
    assert not accepts(spec, answer(form, call(form, "f", {"kind": "any"})))
