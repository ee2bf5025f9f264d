"""What a format that writes texts as they are cannot keep of a strict function's schema.

JSON goes to the grammar library, which refuses what it cannot follow. Texts, lists and objects that a format spells
itself are rules made here, so what these rules leave out must be refused here: a strict call that need not fit its
schema would be worse than an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from longturn.errors import RequestError
from longturn.frontend.parsers.schema import MAX_ALTERNATIVES, alternatives, listed, resolved
from longturn.frontend.parsers.text_formats import TEXT_FORMATS
from longturn.frontend.parsers.tool_grammar import Function

Schema = Mapping[str, Any]

_LOGIC = frozenset({"not", "if", "then", "else", "dependentRequired", "dependentSchemas", "dependencies"})
_COMBINED = frozenset({"allOf", "anyOf", "oneOf"})
_TEXT = frozenset({"pattern", "minLength", "maxLength", "format"})
_NUMBER = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_ARRAY = frozenset({"prefixItems", "uniqueItems", "contains", "minContains", "maxContains"})
_KEPT_ARRAY = frozenset({"items", "minItems", "maxItems"})
_OBJECT = frozenset({"patternProperties", "propertyNames", "minProperties", "maxProperties"})
_KEPT_OBJECT = frozenset({"properties", "required", "additionalProperties"})
_ALL = _LOGIC | _COMBINED | _TEXT | _NUMBER | _ARRAY | _KEPT_ARRAY | _OBJECT | _KEPT_OBJECT | {"enum", "const", "$ref"}
_HARMLESS = frozenset({"uniqueItems", "minProperties", "not"})
"""Keywords that say nothing if they are false or 0."""


def text_schema(function: Function, schema: Schema) -> Schema:
    """The schema of a text, with what stands for it followed where it is all there is.

    Raises:
        RequestError: the function is strict and more is said of the text than rules for it keep.
    """
    if function.strict:
        schema = text_or_null(schema) or schema
    for _ in range(MAX_ALTERNATIVES):
        inner: Any = None
        if isinstance(reference := schema.get("$ref"), str):
            inner = resolved(reference, function.parameters)
            said = "$ref"
        else:
            said = next((key for key in sorted(_COMBINED) if key in schema), "")
            if isinstance(parts := schema.get(said), list) and len(parts) == 1:
                inner = parts[0]
        if not isinstance(inner, Mapping) or (_ALL | {"type"}) & (schema.keys() - {said}):
            break
        schema = inner
    if function.strict:
        if schema.keys() & (_COMBINED | {"$ref"}) or isinstance(schema.get("type"), list):
            check_any_text(function, schema)
        _refuse(function, schema, _LOGIC)
        if schema.get("format") not in (None, *TEXT_FORMATS):
            raise _not_kept(function, "format")
    return schema


def text_or_null(schema: Schema) -> Schema | None:
    """The schema of a `nullable` text, if a schema is that of a text or null and says no more; None of any other."""
    if isinstance(kinds := schema.get("type"), list):
        text: Any = {**schema, "type": "string"} if sorted(map(str, kinds)) == ["null", "string"] else None
    else:
        said = "anyOf" if "anyOf" in schema else "oneOf"
        parts = schema.get(said)
        if not isinstance(parts, list) or len(parts) != 2 or (_ALL | {"type"}) & (schema.keys() - {said}):
            return None
        text = next((part for part, other in (parts, parts[::-1]) if _is_null(other)), None)
    if not isinstance(text, Mapping) or text.get("type") != "string" or listed(text):
        return None
    return None if text.keys() & (_COMBINED | {"$ref"}) else {**text, "nullable": True}


def _is_null(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "null" and not schema.keys() & _ALL


def check_any_text(function: Function, schema: Schema) -> None:
    """For a text that may also be something else, of which rules keep nothing. Raises as `text_schema`."""
    if not function.strict:
        return
    for part in alternatives(schema, function.parameters):
        _check_reference(function, part)
        _refuse(function, part, _ALL - _COMBINED - {"$ref", "enum", "const"})
        if part is not schema and "allOf" in schema:
            _refuse(function, part, frozenset({"enum", "const"}))
        if any(not isinstance(value, str) for value in listed(part)):
            _refuse(function, part, frozenset({"enum", "const"}))


def check_listed(function: Function, schema: Schema) -> None:
    """For values that are listed. Raises as `text_schema`."""
    if function.strict:
        _refuse(function, schema, _LOGIC | _COMBINED | _TEXT | _NUMBER | {"$ref"})


def check_alone(function: Function, schema: Schema, keyword: str) -> None:
    """For a schema of which nothing but `keyword` is kept; a reference must lead somewhere. Raises as `text_schema`."""
    if function.strict:
        _refuse(function, schema, _ALL - {keyword})
        _check_reference(function, schema)


def check_array(function: Function, schema: Schema) -> None:
    """For a list whose entries are spelled one by one. Raises as `text_schema`."""
    if function.strict:
        _refuse(function, schema, _LOGIC | _COMBINED | _ARRAY)


def check_object(function: Function, schema: Schema, written: Set[str], required: Set[str]) -> None:
    """For an object whose members are spelled one by one.

    Args:
        function: whose schema it is a part of.
        schema: the object's.
        written: names that have a rule.
        required: names that it must have.

    Raises:
        RequestError: as `text_schema`.
    """
    if not function.strict:
        return
    waiting: list[Any] = [schema]
    for _ in range(MAX_ALTERNATIVES):
        if not waiting:
            break
        part = waiting.pop()
        if isinstance(part, Mapping):
            _refuse(function, part, _LOGIC | _OBJECT | {"anyOf", "oneOf"})
            if isinstance(reference := part.get("$ref"), str):
                waiting.append(resolved(reference, function.parameters))
            if isinstance(parts := part.get("allOf"), list):
                waiting.extend(parts)
    if not required <= written:
        raise _not_kept(function, "required")


def _check_reference(function: Function, schema: Schema) -> None:
    if isinstance(reference := schema.get("$ref"), str) and resolved(reference, function.parameters) is None:
        raise _not_kept(function, "$ref")


def _refuse(function: Function, schema: Schema, keywords: Set[str]) -> None:
    for key, value in schema.items():
        if key in keywords and (value or key not in _HARMLESS or isinstance(value, (Mapping, list))):
            raise _not_kept(function, key)


def _not_kept(function: Function, keyword: str) -> RequestError:
    return RequestError(
        f"'tools': the schema of the tool '{function.name}' is strict, and its '{keyword}' cannot be kept in the form"
        " in which this model writes calls",
        param="tools",
        code="invalid_grammar",
    )
