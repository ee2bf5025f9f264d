"""What an answer must look like: a specification that every API dialect makes, and its text for the grammar library.

JSON keeps the order of a schema's properties and may have white space between its parts, bounded: a model that has
nothing good to say would otherwise write spaces up to `max_tokens`.

A model that reasons first is not constrained while it does: see `grammar_reasoning`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from longturn.errors import RequestError

Kind = Literal["json_object", "json_schema", "regex", "ebnf", "choice", "lark"]

MAX_CHOICES = 10_000
MAX_JSON_DEPTH = 120
"""Nesting of a schema's JSON, two levels for each object in an object: about where the library's own reader ends."""
MAX_SPACE_CHARS = 32
"""Longest run of white space in JSON: a line end and the indentation of sixteen levels."""
_SPACE = rf"[\x20\x0A\x0D\x09]{{0,{MAX_SPACE_CHARS}}}"
_OPTIONS = "x-guidance"
"""Key of a schema under which the library finds its options. A request's own is replaced."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint on the whole of an answer."""

    kind: Kind
    text: str
    """json_schema: the schema as JSON. choice: a JSON list of texts. json_object: empty. Otherwise the grammar itself:
    regex in Rust's syntax (no look-around, no back-references), ebnf in GBNF's or Lark's, lark in the library's."""
    strict: bool = True
    """A schema with keywords that cannot be followed is refused; otherwise they are ignored."""
    compact: bool = False
    """JSON without white space."""
    param: str = "response_format"
    """The request's field, for messages."""
    tools: tuple[str, ...] = ()
    """lark: for messages, the name of the tool that each line was made for; empty where it is none's."""


# --- specifications --------------------------------------------------------------------------------------------------


def json_object(*, compact: bool = False, param: str = "response_format") -> GrammarSpec:
    """Any JSON object."""
    return GrammarSpec("json_object", "", compact=compact, param=param)


def json_schema(
    schema: Any, *, strict: bool = True, compact: bool = False, param: str = "response_format"
) -> GrammarSpec:
    """JSON by a schema, which is a JSON object, its text, or true.

    Raises:
        RequestError: it is none of these, or nested too deeply.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise _bad(param, "is not valid JSON") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise _bad(param, "must be a JSON schema: an object")
    if _deeper(schema, MAX_JSON_DEPTH):
        raise _bad(param, f"is nested more than {MAX_JSON_DEPTH} levels deep")
    return GrammarSpec("json_schema", canonical_json(schema), strict, compact, param)


def regex(pattern: str, *, param: str = "regex") -> GrammarSpec:
    """A text that the whole of a regular expression matches.

    Raises:
        RequestError: it is empty.
    """
    return GrammarSpec("regex", _filled(pattern, param), param=param)


def choice(texts: Sequence[str], *, param: str = "choice") -> GrammarSpec:
    """One of several texts.

    Raises:
        RequestError: there is none, or too many, or one is not a text.
    """
    if not isinstance(texts, (list, tuple)) or not texts or not all(isinstance(text, str) for text in texts):
        raise _bad(param, "must be a non-empty list of texts")
    if len(texts) > MAX_CHOICES:
        raise _bad(param, f"may have at most {MAX_CHOICES} texts, not {len(texts)}")
    return GrammarSpec("choice", canonical_json(list(dict.fromkeys(texts))), param=param)


def ebnf(text: str, *, param: str = "grammar") -> GrammarSpec:
    """A grammar in GBNF's notation (`root ::= ...`) or in Lark's (`start: ...`).

    Raises:
        RequestError: it is empty.
    """
    return GrammarSpec("ebnf", _filled(text, param), param=param)


def lark(text: str, *, param: str = "tool_choice", tools: tuple[str, ...] = ()) -> GrammarSpec:
    """A grammar in the library's dialect of Lark, made with `lark_text` and `lark_json`; its first rule is `start`."""
    return GrammarSpec("lark", text, param=param, tools=tools)


# --- parts of Lark grammars ------------------------------------------------------------------------------------------


def lark_text(text: str) -> str:
    """A literal text in a Lark rule. Control tokens in it must be written by number: `lark_token`."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def lark_token(token_id: int) -> str:
    """A single token in a Lark rule, by its id."""
    return f"<[{token_id}]>"


def lark_json(schema: Mapping[str, Any], *, strict: bool = True, compact: bool = False) -> str:
    """JSON by a schema in a Lark rule, as in `call: "<call>" %json {...} "</call>"`."""
    return "%json " + canonical_json(_with_options(schema, strict=strict, compact=compact))


def lark_body(spec: GrammarSpec) -> str | None:
    """The right side of a Lark rule for what `spec` allows; None for grammars that have rules of their own.

    So a rule can offer an answer beside something else: `start: answer | calls`.
    """
    if spec.kind in ("json_object", "json_schema"):
        return lark_json(_schema_of(spec), strict=spec.strict, compact=spec.compact)
    if spec.kind == "choice":
        return " | ".join(map(lark_text, json.loads(spec.text)))
    return None


# --- the library's form ----------------------------------------------------------------------------------------------


def library_text(spec: GrammarSpec) -> str:
    """The grammar as the library takes it, and as `SamplingParams.grammar` carries it.

    Raises:
        ValueError: a text in EBNF is in neither notation.
    """
    return canonical_json({"grammars": [_library_grammar(spec)]})


def _library_grammar(spec: GrammarSpec) -> dict[str, Any]:
    if spec.kind in ("json_object", "json_schema"):
        return {"json_schema": _with_options(_schema_of(spec), strict=spec.strict, compact=spec.compact)}
    if spec.kind == "regex":
        return {"lark_grammar": f"start: /{_slashes(spec.text)}/"}
    if spec.kind == "choice":
        return {"lark_grammar": f"start: {lark_body(spec)}"}
    if spec.kind == "ebnf":
        return {"lark_grammar": _lark_of_ebnf(spec)}
    return {"lark_grammar": spec.text}


def _lark_of_ebnf(spec: GrammarSpec) -> str:
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        converted: str = any_to_lark(spec.text)
    except Exception as error:  # the converter raises whatever its reading of a malformed text runs into
        raise ValueError(f"neither GBNF's nor Lark's notation ({' '.join(str(error).split())})") from None
    return converted


def _schema_of(spec: GrammarSpec) -> Mapping[str, Any]:
    schema: Mapping[str, Any] = {"type": "object"} if spec.kind == "json_object" else json.loads(spec.text)
    return schema


def _with_options(schema: Mapping[str, Any], *, strict: bool, compact: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"whitespace_flexible": False} if compact else {"whitespace_pattern": _SPACE}
    if not strict:
        options |= {"lenient": True, "coerce_one_of": True}
    return {**schema, _OPTIONS: options}


def canonical_json(value: Any) -> str:
    # Not sorted: properties are written in the schema's order.
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _slashes(pattern: str) -> str:
    """A regular expression for between two slashes: those in it escaped, unless they are."""
    out: list[str] = []
    escaped = False
    for char in pattern:
        out.append("\\/" if char == "/" and not escaped else char)
        escaped = char == "\\" and not escaped
    return "".join(out)


def _deeper(value: Any, levels: int) -> bool:
    stack = [(value, levels)]
    while stack:
        item, left = stack.pop()
        children = item.values() if isinstance(item, Mapping) else item if isinstance(item, list) else ()
        if left == 0 and isinstance(item, (Mapping, list)):
            return True
        stack.extend((child, left - 1) for child in children)
    return False


def _filled(text: Any, param: str) -> str:
    if not isinstance(text, str) or not text:
        raise _bad(param, "must be a non-empty text")
    return text


def _bad(param: str, what: str) -> RequestError:
    return RequestError(f"'{param}' {what}", param=param, code="invalid_grammar")
