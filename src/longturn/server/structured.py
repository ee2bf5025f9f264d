"""How API dialects ask for constrained output, as one `GrammarSpec`.

OpenAI's chat has `response_format`, its Responses API `text.format`; vLLM adds `structured_outputs` and, before that,
`guided_json` and its like. More than one of them in a request is refused: the answer could not be both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from longturn.errors import RequestError
from longturn.frontend import grammar
from longturn.frontend.grammar import GrammarSpec
from longturn.server.fields import invalid
from longturn.server.openai_types import SamplingFields

_Make = Callable[[Any, str, bool], GrammarSpec]
"""From a field's value, its name, and whether JSON is to have no white space."""
_VLLM_KINDS: Mapping[str, _Make] = {
    "json": lambda value, param, compact: grammar.json_schema(value, compact=compact, param=param),
    "regex": lambda value, param, compact: grammar.regex(value, param=param),
    "choice": lambda value, param, compact: grammar.choice(value, param=param),
    "grammar": lambda value, param, compact: grammar.ebnf(value, param=param),
}
_COMPACT = "disable_any_whitespace"
_JSON_OBJECT = "json_object"
_NO_MATTER = ("disable_fallback", "_backend", "_backend_was_auto")
"""Which library vLLM uses: there is one here."""
_RESPONSE_FORMATS = "'text', 'json_object' or 'json_schema'"


def grammar_of(request: SamplingFields) -> GrammarSpec | None:
    """What a completion or chat request wants its answer to be; None if it does not say.

    Raises:
        RequestError: a field is malformed, or two of them ask for different things.
    """
    specs = [
        *_some(response_format_grammar(request.response_format, "response_format")),
        *_some(_structured_outputs(request.structured_outputs)),
    ]
    for kind, make in _VLLM_KINDS.items():
        name = f"guided_{kind}"
        value = getattr(request, name)
        if value is not None:
            specs.append(make(value, name, False))
    if len(specs) > 1:
        raise invalid(specs[1].param, f"cannot be given together with '{specs[0].param}'")
    return specs[0] if specs else None


def response_format_grammar(form: Any, param: str) -> GrammarSpec | None:
    """Of `response_format`, with its schema under `json_schema`, or of Responses' `text.format`, which has it inside.

    Raises:
        RequestError: it is malformed, or of a type that is not supported.
    """
    if form is None:
        return None
    if not isinstance(form, Mapping):
        raise invalid(param, "must be an object")
    kind = form.get("type", "text")
    if kind == "text":
        return None
    if kind == _JSON_OBJECT:
        return grammar.json_object(param=param)
    if kind != "json_schema":
        raise invalid(f"{param}.type", f"must be {_RESPONSE_FORMATS}")
    inner, where = (form, param) if "schema" in form else (form.get("json_schema"), f"{param}.json_schema")
    if not isinstance(inner, Mapping):
        raise invalid(where, "must be an object" if "json_schema" in form else "is missing")
    strict = inner.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise invalid(f"{where}.strict", "must be true or false")
    schema = {"type": "object"} if inner.get("schema") is None else inner["schema"]
    return grammar.json_schema(schema, strict=bool(strict), param=f"{where}.schema")


def _structured_outputs(options: Any) -> GrammarSpec | None:
    param = "structured_outputs"
    if options is None:
        return None
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    compact = given.pop(_COMPACT, None) is True
    for name in _NO_MATTER:
        given.pop(name, None)
    unknown = [name for name in given if name not in _VLLM_KINDS and name != _JSON_OBJECT]
    if unknown:
        known = ", ".join((*_VLLM_KINDS, _JSON_OBJECT, _COMPACT))
        raise RequestError(
            f"'{param}.{unknown[0]}' is not supported (supported: {known})",
            param=f"{param}.{unknown[0]}",
            code="unsupported_value",
        )
    if len(given) != 1:
        raise invalid(param, f"must have one of {', '.join((*_VLLM_KINDS, _JSON_OBJECT))}")
    ((name, value),) = given.items()
    if name == _JSON_OBJECT:
        return grammar.json_object(compact=compact, param=f"{param}.{name}")
    return _VLLM_KINDS[name](value, f"{param}.{name}", compact)


def _some(spec: GrammarSpec | None) -> list[GrammarSpec]:
    return [] if spec is None else [spec]
