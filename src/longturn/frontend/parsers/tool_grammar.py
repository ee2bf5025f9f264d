"""Grammars that make a model call tools, in its own syntax, with arguments by the tools' schemas.

Three needs have one: a choice that requires a call or names the function, functions that are `strict`, and requests
that take one call at most. Where a call is required the answer is calls and nothing else. Where it is not, text is free
up to the marker that opens calls; in formats without a marker, an answer that begins like a call must be one.

JSON is spelled as templates spell it (a space after commas and colons, no other white space): so an earlier turn's
calls are rendered as they were written, and a model with nothing to say cannot fill its answer with spaces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longturn.errors import RequestError
from longturn.frontend import grammar
from longturn.frontend.grammar import GrammarSpec, lark_body, lark_text, lark_token
from longturn.frontend.parsers.text_formats import TEXT_FORMATS
from longturn.frontend.records import ToolChoice

MAX_CALLS = 32
"""Most calls of one answer that a grammar allows: a small model that must call tools may not find an end."""
_JSON_OPTIONS: Mapping[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    # No \\uXXXX: characters are written as they are, as templates write them.
    "json_allowed_escapes": 'nrbtf\\"',
}
_ANY = "(?s:.*)"
_UNFOLLOWED = re.compile(r"\(\?<?[=!]|\\[1-9]|\\k<")
"""Look-around and back-references in a pattern."""
_COMBINERS = frozenset({"allOf", "anyOf", "oneOf", "$ref", "patternProperties", "if", "unevaluatedProperties"})
"""Keywords that may allow members which `properties` does not name."""


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the request's tools."""

    name: str
    parameters: Mapping[str, Any]
    """Schema of an object."""
    strict: bool


@dataclass(slots=True)
class Rules:
    """Rules of a grammar while it is made."""

    control_tokens: Mapping[str, int]
    """Ids of the markers that are control tokens of the vocabulary, which no literal text matches."""
    words: tuple[str, ...] = ()
    """Texts that are lexemes of their own: the lexer takes the longest lexeme there is, and would not come back from
    one that begins like another."""
    lines: list[str] = field(default_factory=list)

    def add(self, prefix: str, body: str, options: str = "") -> str:
        """A new rule; returns its name."""
        name = f"{prefix}_{len(self.lines)}"
        self.lines.append(f"{name}{options}: {body}")
        return name

    def literal(self, text: str) -> str:
        """Exactly this text, as part of a rule."""
        parts: list[str] = []
        while text:
            marks = (*self.control_tokens, *self.words)
            at, mark = min(((at, mark) for mark in marks if (at := text.find(mark)) >= 0), default=(len(text), ""))
            parts += [lark_text(text[:at])] if at else []
            if mark:
                token = self.control_tokens.get(mark)
                parts.append(lark_text(mark) if token is None else lark_token(token))
            text = text[at + len(mark) :]
        return " ".join(parts)

    def up_to(self, marker: str, *patterns: str, but_not: str = "") -> str:
        """Text that matches all `patterns`, and the marker that ends it: the first one there is.

        Args:
            marker: what ends the text.
            patterns: regular expressions of the whole text; any text if there is none.
            but_not: what is added to the lexeme to take texts out, such as ` & ~/a.*/`.
        """
        for mark in self.control_tokens:
            if marker.startswith(mark):
                text = " & ".join(f"/{pattern}/" for pattern in patterns or [_ANY])
                return self.add("free", f"{self.lexeme(f'{text}{but_not}')} {self.literal(marker)}")
        text = " & ".join(f"/{pattern}{escaped(marker)}/" for pattern in patterns or [_ANY])
        return self.add("free", self.lexeme(f"{text}{but_not}"), "[lazy]")

    def lexeme(self, expression: str) -> str:
        """A new lexeme; returns its name."""
        name = f"TEXT_{len(self.lines)}"
        self.lines.append(f"{name}: {expression}")
        return name

    def json(self, schema: Mapping[str, Any], *, strict: bool) -> str:
        """JSON by a schema."""
        lenient: Mapping[str, Any] = {} if strict else {"lenient": True, "coerce_one_of": True}
        options = {"x-guidance": {**_JSON_OPTIONS, **lenient}}
        return self.add("json", "%json " + json.dumps({**schema, **options}, ensure_ascii=False))


def escaped(text: str) -> str:
    """A literal text as a part of a regular expression between two slashes."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


@dataclass(frozen=True, slots=True)
class CallGrammar:
    """How a format writes calls, for a grammar."""

    call: Callable[[Rules, Function], str]
    """The right side of a rule for a call of one function."""
    open: str = ""
    close: str = ""
    between: str | None = None
    """What stands between two calls; None where an answer has one at most."""
    marker: str | None = None
    """The beginning of `open` that free text ends at; None where calls have no marker."""
    words: tuple[str, ...] = ()
    """As `Rules.words`."""


def json_call(arguments_key: str) -> Callable[[Rules, Function], str]:
    """A call as a JSON object: `{"name": "f", "arguments": {...}}`."""

    def call(rules: Rules, function: Function) -> str:
        # One schema and not a text with a schema in it: the library has a lexer of its own for JSON, and where an
        # answer may be other JSON, too, one of the two would have to be chosen at the first brace.
        parameters = moved(function.parameters, f"#/properties/{arguments_key}", strict=function.strict)
        schema = {
            "type": "object",
            "properties": {"name": {"const": function.name}, arguments_key: parameters},
            "required": ["name", arguments_key],
            "additionalProperties": False,
        }
        return rules.json(schema, strict=function.strict)

    return call


def moved(schema: Any, to: str, *, strict: bool) -> Any:
    """A schema that has become a part of another one, at `to`: its references into itself follow.

    Where it need not be kept strictly, patterns that the library cannot follow go: generators of schemas write
    look-ahead for as little as an e-mail address.
    """
    if isinstance(schema, list):
        return [moved(item, to, strict=strict) for item in schema]
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if isinstance(value, str):
            if key in ("$id", "$schema") or (key == "pattern" and not strict and _UNFOLLOWED.search(value)):
                continue  # `$id` would make it a document of its own, in which the references lead nowhere
            made[key] = to + value[1:] if key == "$ref" and value.startswith("#") else value
        else:
            made[key] = moved(value, to, strict=strict)
    return made


def text_up_to(rules: Rules, schema: Mapping[str, Any], end: str, *, strict: bool) -> str:
    """A text that is written as it is, by its schema, and the marker that ends it."""
    wanted: list[str] = []
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and strict:
        begin = "" if pattern.startswith("^") else "(?s:.*)"
        rest = "" if pattern.endswith("$") and not pattern.endswith("\\$") else "(?s:.*)"
        inner = pattern.removeprefix("^")
        inner = inner if rest else inner.removesuffix("$")
        wanted.append(f"{begin}(?:{_slashes(inner)}){rest}")
    if strict and (form := TEXT_FORMATS.get(str(schema.get("format")))):
        wanted.append(form)
    least, most = count_of(schema.get("minLength")), count_of(schema.get("maxLength"))
    if (least or most is not None) and (strict or not wanted):
        wanted.append(f"(?s:.{{{least or 0},{'' if most is None else most}}})")
    if strict and schema.get("nullable") is True:
        wanted = [f"(?:{pattern}|null)" for pattern in wanted]
    return rules.up_to(end, *wanted)


def count_of(value: Any) -> int | None:
    """A number of things in a schema; None if it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _slashes(pattern: str) -> str:
    return pattern.replace("\\/", "/").replace("/", "\\/")


def tool_grammar(
    form: CallGrammar | None,
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    control_tokens: Mapping[str, int],
    content: GrammarSpec | None = None,
    *,
    may_open_lines: bool = False,
    reasoning_open: str | None = None,
) -> GrammarSpec | None:
    """What an answer to a request with tools must be; `content` itself where the tools ask for nothing.

    Args:
        form: how the model writes calls; None if it has no format.
        tools: the request's, as OpenAI's chat API has them.
        choice: which of them may be called.
        control_tokens: ids of those of the format's markers that are control tokens.
        content: what an answer without calls must be.
        may_open_lines: one or two line ends may stand before the first call (the model writes them behind its
            reasoning).
        reasoning_open: what begins the model's reasoning, after which this grammar holds. Free text must not begin with
            it: a call that the model only thinks of would be taken for one.

    Raises:
        RequestError: the choice cannot be kept, or a tool is malformed.
    """
    if choice.mode == "none":
        return content
    functions = [function_of(tool, f"tools[{number}]") for number, tool in enumerate(tools)]
    if choice.names is not None:
        known = {function.name for function in functions}
        if missing := [name for name in choice.names if name not in known]:
            raise RequestError(f"'tool_choice' names '{missing[0]}', which is none of the tools", param="tool_choice")
        functions = [function for function in functions if function.name in choice.names]
    forced = choice.mode == "required"
    if not functions and not forced:
        return content
    if not functions:
        raise RequestError("'tool_choice' requires a call, but there are no tools", param="tool_choice")
    if not (forced or content or choice.names is not None or not choice.parallel or any(f.strict for f in functions)):
        return None
    if form is None:
        if not forced:
            return content
        raise RequestError(
            "'tool_choice' requires a call, but it is not known how this model writes calls (model.tool_parser)",
            param="tool_choice",
            code="unsupported_value",
        )
    rules = Rules(control_tokens, form.words)
    alternatives: list[str] = []
    owners = ["", ""]  # of every line: what is behind the two that begin the text
    for function in functions:
        alternatives.append(rules.add("call", form.call(rules, function)))
        owners += [function.name] * (2 + len(rules.lines) - len(owners))
    called = rules.add("call", " | ".join(alternatives))
    more = ""
    if choice.parallel and form.between is not None:
        more = f"({rules.literal(form.between)} {called}){{0,{MAX_CALLS - 1}}}"
    calls = f"{called} {more} {rules.literal(form.close)}"
    lines = r"/\n{0,2}/ " if may_open_lines else ""
    whole = f"{lines}{rules.literal(form.open)} {calls}"
    if forced:
        start = whole
    elif content is not None:
        if (answer := _answer(rules, content)) is None:
            return content  # a grammar with rules of its own: nothing but what it says
        start = f"{answer} | {whole}"
    else:
        but_not = "" if reasoning_open is None else rf" & ~/\s*{escaped(reasoning_open)}(?s:.*)/"
        if form.marker is not None:
            free, rest = rules.up_to(form.marker, but_not=but_not), rules.lexeme(f"/(?s:.*)/{but_not}")
            call = f"{rules.literal(form.open.removeprefix(form.marker))} {calls}"
            start = f"{rest} | {free} {call}"
            if choice.parallel:
                again = rules.up_to(form.marker)
                start = f"{rest} | {free} {call} ({again} {call})* {rules.lexeme('/(?s:.*)/')}"
        else:
            plain = rules.lexeme(rf"/\s*[^\s{{\[`<](?s:.*)/{but_not}")
            start = f"{plain}? | {whole}"
    text = "\n".join(["%llguidance {}", f"start: {start}", *rules.lines])
    param = "tool_choice" if forced and not any(f.strict for f in functions) else "tools"
    return grammar.lark(text, param=param, tools=tuple(owners))


def _answer(rules: Rules, content: GrammarSpec) -> str | None:
    """A rule for an answer without calls."""
    if content.kind in ("json_object", "json_schema"):
        # Spelled like the calls, which makes both of them one lexer's.
        return rules.json(json.loads(content.text or '{"type": "object"}'), strict=content.strict)
    body = lark_body(content)
    return None if body is None else rules.add("content", body)


def function_of(tool: Mapping[str, Any], where: str) -> Function:
    """The function of a tool.

    Raises:
        RequestError: it is malformed, or its schema is nested too deeply.
    """
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping):
        raise RequestError(f"'{where}.function' must be an object", param=f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(f"'{where}.function.name' must be a text", param=f"{where}.function.name")
    where = f"{where}.function.parameters"
    schema = function.get("parameters")
    if schema is None:
        schema = {"properties": {}}
    if not isinstance(schema, Mapping):
        raise RequestError(f"'{where}' must be a JSON schema: an object", param=where)
    grammar.json_schema(schema, param=where)  # refuses what is nested too deeply
    if "properties" in schema and not _COMBINERS.intersection(schema):
        # Few schemas say so, and a model that may add members of its own may never come to an end of them.
        schema = {"additionalProperties": False, **schema}
    return Function(name, schema if "type" in schema else {"type": "object", **schema}, bool(function.get("strict")))
