"""Specifications, their library text, reasoning before them, and real tokenizers under them."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longturn.errors import RequestError
from longturn.frontend import grammar
from longturn.frontend.gguf_tokenizer import gguf_backend
from longturn.frontend.grammar import GrammarSpec, lark_body, lark_json, lark_text, lark_token, library_text
from longturn.frontend.grammar_reasoning import ReasoningMarks, behind_reasoning
from longturn.frontend.grammar_vocabulary import reasoning_marks, vocabulary_of
from longturn.frontend.parsers.registry import REASONING_FORMATS
from longturn.frontend.tokenizer import Tokenizer, TokenizerSettings
from longturn.grammar_library import Vocabulary, error_of, library_tokenizer, new_matcher
from tests.frontend.fakes import END_OF_TEXT, IM_END, sentencepiece_metadata, tiny_tokenizer
from tests.grammars import CLOSE, OPEN, encode, vocabulary

LIBRARY = library_tokenizer(vocabulary())


def accepts(text: str, output: str | list[int]) -> bool:
    """Whether an output is a whole answer of the grammar `text`."""
    matcher = new_matcher(LIBRARY, text)
    assert error_of(matcher) is None, error_of(matcher)
    ids = encode(output) if isinstance(output, str) else output
    return all(matcher.consume_token(token) for token in ids) and matcher.is_accepting()


@given(st.lists(st.text(max_size=6), min_size=1, max_size=5), st.text(max_size=6))
def test_a_choice_is_one_of_its_texts(texts: list[str], other: str) -> None:
    text = library_text(grammar.choice(texts))
    assert all(accepts(text, item) for item in texts)
    assert accepts(text, other) == (other in texts)


@given(st.text(min_size=1, max_size=12))
def test_any_literal_text_can_stand_in_a_rule_and_in_a_pattern(text: str) -> None:
    assert accepts(library_text(grammar.lark(f"start: {lark_text(text)}")), text)
    escaped = "".join(f"\\x{{{ord(char):x}}}" for char in text)
    assert accepts(library_text(grammar.regex(escaped)), text)


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("a/b", "a/b", r"a\/b"),
        (r"a\/b", "a/b", r"a\/b"),
        (r"\\/", r"\/", "/"),
        ("[/]+", "//", "\\"),
        (r"^\d+$", "12", "^12$"),
        ("a\nb", "a\nb", r"a\nb"),
        ("a|bc", "bc", "ac"),
        ('"', '"', ""),
    ],
)
def test_patterns_mean_what_re_means(pattern: str, yes: str, no: str) -> None:
    assert re.fullmatch(pattern, yes) and not re.fullmatch(pattern, no)
    text = library_text(grammar.regex(pattern))
    assert accepts(text, yes) and not accepts(text, no)


def test_json_has_bounded_white_space_and_the_schemas_order() -> None:
    schema = {
        "type": "object",
        "properties": {"b": {"type": "integer"}, "a": {"type": "integer"}},
        "required": ["b", "a"],
    }
    loose, compact = (library_text(grammar.json_schema(schema, compact=value)) for value in (False, True))
    assert accepts(loose, '{"b":1,"a":2}') and accepts(compact, '{"b":1,"a":2}')
    pretty = '{\n  "b": 1,\n  "a": 2\n}'
    assert accepts(loose, pretty) and not accepts(compact, pretty)
    assert not accepts(loose, '{"a":2,"b":1}')
    assert not accepts(loose, '{"b":' + " " * (grammar.MAX_SPACE_CHARS + 1) + '1,"a":2}')
    anything = library_text(grammar.json_object())
    assert accepts(anything, '{"x": [1, {"y": null}]}') and not accepts(anything, "[1]")


def test_a_lenient_schema_drops_what_cannot_be_followed() -> None:
    schema = {"type": "object", "not": {"required": ["x"]}}
    assert "not" in (error_of(new_matcher(LIBRARY, library_text(grammar.json_schema(schema)))) or "")
    assert accepts(library_text(grammar.json_schema(schema, strict=False)), '{"x": 1}')


def test_options_in_a_schema_are_not_the_requests_to_set() -> None:
    spec = grammar.json_schema({"type": "integer", "x-guidance": {"lenient": True, "whitespace_pattern": "x*"}})
    (made,) = json.loads(library_text(spec))["grammars"]
    assert "lenient" not in made["json_schema"]["x-guidance"]
    assert accepts(library_text(grammar.json_schema(True)), "[1]")


def test_ebnf_in_both_notations() -> None:
    for text in ('root ::= "a" digit+\ndigit ::= [0-9]', 'start: "a" DIGIT+\nDIGIT: /[0-9]/'):
        made = library_text(grammar.ebnf(text))
        assert accepts(made, "a12") and not accepts(made, "a")
    with pytest.raises(ValueError, match="neither GBNF's nor Lark's"):
        library_text(grammar.ebnf('root ::= "a" [0-9'))


def test_rules_can_be_put_together() -> None:
    """What tool calls need: literal text, control tokens, JSON by a schema, repeated, or an answer instead."""
    call = lark_json({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})
    answer = lark_body(grammar.choice(["done", "stop"]))
    rules = [
        "start: call+ | answer",
        f"call: {lark_token(OPEN)} {lark_text('<c>')} {call} {lark_text('</c>')} {lark_token(CLOSE)}",
        f"answer: {answer}",
    ]
    text = library_text(grammar.lark("\n".join(rules)))
    one = [OPEN, *encode('<c>{"x": 1}</c>'), CLOSE]
    assert accepts(text, one) and accepts(text, one + one) and accepts(text, "done")
    assert not accepts(text, '<|open|><c>{"x": 1}</c><|close|>'), "the text of a control token is not that token"
    body = lark_body(grammar.json_schema({"enum": [1, 2]}))
    assert body is not None and accepts(library_text(grammar.lark(f"start: {body}")), "2")
    assert lark_body(grammar.regex("a")) is None


BAD = [
    (lambda: grammar.json_schema("{"), "is not valid JSON"),
    (lambda: grammar.json_schema([1]), "must be a JSON schema"),
    (lambda: grammar.json_schema(False), "must be a JSON schema"),
    (lambda: grammar.json_schema("[" * 100_000), "is not valid JSON"),
    (lambda: grammar.json_schema(json.loads('{"a":' * 200 + "1" + "}" * 200)), "more than 120 levels"),
    (lambda: grammar.regex(""), "non-empty text"),
    (lambda: grammar.regex(5), "non-empty text"),  # type: ignore[arg-type]
    (lambda: grammar.ebnf(""), "non-empty text"),
    (lambda: grammar.choice([]), "non-empty list"),
    (lambda: grammar.choice("ab"), "non-empty list"),
    (lambda: grammar.choice([1]), "non-empty list"),  # type: ignore[list-item]
    (lambda: grammar.choice(["a"] * 10_001), "at most 10000"),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_malformed_specifications_are_refused_by_name(make: object, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        make()  # type: ignore[operator]
    assert caught.value.param and caught.value.param in str(caught.value) and caught.value.http_status == 400


# --- reasoning -------------------------------------------------------------------------------------------------------

MARKS = ReasoningMarks("<think>", "</think>")
JSON = library_text(grammar.json_object())


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("lines", [False, True])
def test_reasoning_is_free_and_the_answer_is_not(special: bool, opened: bool, lines: bool) -> None:
    begin, end = ([OPEN], [CLOSE]) if special else (encode("<think>"), encode("</think>"))
    marks = ReasoningMarks("<think>", "</think>", *((OPEN, CLOSE) if special else (None, None)), opened)
    text = behind_reasoning(JSON, marks, may_open_line=lines)
    thought, answer = encode('so {"a": 1}\nor not'), encode('{"b": 2}')
    assert accepts(text, thought + end + answer) == opened
    assert accepts(text, end + answer) == opened
    if not (opened and special):  # an opening marker again: where it is text, it is a thought like any other
        assert accepts(text, begin + thought + end + answer)
    assert accepts(text, answer) == (not opened)
    assert not accepts(text, begin + thought + end)
    assert not accepts(text, begin + thought)
    assert not accepts(text, begin + thought + end + encode("so: ") + answer)
    assert accepts(text, [*(thought if opened else begin), *end, *encode("\n\n"), *answer]) == lines
    # The first end marker is the end.
    assert not accepts(text, [*(thought if opened else begin), *end, *thought, *end, *answer])


@pytest.mark.parametrize("name", sorted(REASONING_FORMATS))
def test_the_grammar_and_the_parser_agree_on_where_reasoning_ends(name: str) -> None:
    form = REASONING_FORMATS[name]
    begin, end = form.markers[:2]
    tokenizer = tiny_tokenizer()
    for prompt, output in (
        (f"x{begin}\n", f'hm{end}{{"a":1}}'),
        ("x", f'{begin}hm{end}{{"a":1}}'),
        ("x", '{"a":1}'),
    ):
        marks = reasoning_marks(form, tokenizer, prompt)
        assert marks.opened == (begin in prompt)
        assert accepts(behind_reasoning(JSON, marks, may_open_line=True), output)
        parser = form.make(prompt, False)
        pieces = (parser.push(output), parser.finish())
        assert "".join(piece.content for piece in pieces) == '{"a":1}'
        assert "".join(piece.reasoning for piece in pieces) == ("hm" if end in output else "")


def test_reasoning_stays_before_grammars_of_several_rules() -> None:
    spec = grammar.lark('start: item ("," item)*\nitem: "a" | "b"')
    text = behind_reasoning(library_text(spec), MARKS, may_open_line=False)
    assert accepts(text, "<think>a,b</think>a,b") and accepts(text, "b") and not accepts(text, "<think></think>c")


# --- tokenizers ------------------------------------------------------------------------------------------------------


def sentencepiece() -> Tokenizer:
    backend, special = gguf_backend(sentencepiece_metadata(), "test")
    return Tokenizer(backend, TokenizerSettings(special))


def follow(made: Vocabulary, spec: GrammarSpec) -> str:
    """An answer in which the smallest allowed token comes next."""
    tokenizer = library_tokenizer(made)
    matcher = new_matcher(tokenizer, library_text(spec))
    out = b""
    for _ in range(100):
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little"))
        assert error_of(matcher) is None
        assert len(allowed), "the grammar has come to a dead end"
        if set(allowed) & set(made.end_ids):
            return out.decode()
        out += made.tokens[int(allowed[-1])]
        assert matcher.consume_token(int(allowed[-1]))
    raise AssertionError(out)


TEXTS = ["<|im_end|>x", "a<|im_start|><|im_end|>", '{"a b": "é😀"}', " ab", "ab c", "<s>", "abc", "\n\x00"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_forced_text_comes_out_whatever_the_tokenizer(text: str) -> None:
    """Also one that looks like a control token: it must come out as text, or the answer would end there."""
    byte_level = vocabulary_of(tiny_tokenizer(), 320, (IM_END, END_OF_TEXT))
    assert follow(byte_level, grammar.choice([text])) == text
    assert follow(vocabulary_of(sentencepiece(), 280, (2,)), grammar.choice([text])) == text


@given(st.text(max_size=30))
def test_the_encoder_for_forced_text_is_exact(text: str) -> None:
    for tokenizer, size, ends in ((tiny_tokenizer(), 303, (IM_END,)), (sentencepiece(), 267, (2,))):
        made = vocabulary_of(tokenizer, size, ends)
        for piece in (text, f"{text}<|im_end|>{text}</s>"):
            ids = made.encode(piece)
            assert b"".join(made.tokens[i] for i in ids) == piece.encode()
            assert not set(ids) & set(made.special_ids)


def test_ordinary_text_is_encoded_as_the_model_would(smollm: Tokenizer) -> None:
    made = vocabulary_of(smollm, smollm.vocab_size, (2,))
    for text in ('{"name": "Ada", "age": 36}', "def f(x):\n    return x", "naïve 日本"):
        assert made.encode(text) == smollm.encode(text)


@pytest.mark.parametrize("size", [303, 310, 400])
def test_the_head_may_have_more_rows_than_there_are_tokens(size: int) -> None:
    made = vocabulary_of(tiny_tokenizer(), size, (IM_END,))
    assert len(made.tokens) == size and follow(made, grammar.regex(r"\w{1,3}"))
