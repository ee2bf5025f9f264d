"""Elements of text to JSON values, by JSON schema.

A model that writes arguments as text writes `3` for the number and for the string alike: the tool's schema decides.
Where the schema allows several types the narrowest that fits is taken (null, integer, number, boolean, array, object,
string); where a text fits none, or no schema is known for it, it stays the string that it is, and whoever called the
model sees what was written. References into the schema itself are followed; other references say nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TEXT_MEMBER = "$text"
ITEM = "item"
MAX_ALTERNATIVES = 64
"""Schemas that one place may stand for; also what ends a circle of references."""
MAX_DIGITS = 300
MAX_JSON_DEPTH = 200

_INTEGER = re.compile(r"-?[0-9]+")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_COMBINERS = ("allOf", "anyOf", "oneOf")
_MOST_EXACT = 1 << 53
"""Beyond it a float is no exact integer."""

Schema = Mapping[str, Any]


@dataclass(slots=True)
class Element:
    """A named piece of text with elements in it; grows while it is read."""

    name: str
    parts: list[str] = field(default_factory=list)
    children: list[Element] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Its own text, without that of its children."""
        return "".join(self.parts)


def tool_schemas(tools: Iterable[Mapping[str, Any]]) -> dict[str, Schema]:
    """Schemas of the arguments, by function name; tools as OpenAI's or Anthropic's API has them."""
    schemas: dict[str, Schema] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping):
            continue
        schema = function.get("parameters", function.get("input_schema"))
        if isinstance(name := function.get("name"), str) and isinstance(schema, Mapping):
            schemas[name] = schema
    return schemas


def tool_names(tools: Iterable[Mapping[str, Any]]) -> list[str]:
    """Function names, in the order of the tools."""
    functions = (tool.get("function", tool) for tool in tools)
    names = (function.get("name") for function in functions if isinstance(function, Mapping))
    return [name for name in names if isinstance(name, str)]


def argument_schema(name: str, root: Schema) -> Any:
    """The schema of one argument; None if there is none.

    Args:
        name: the argument's.
        root: schema of the object that all arguments make.
    """
    return _member_schema(name, alternatives(root, root))


def allowed_types(schema: Any, root: Schema) -> set[str]:
    """The JSON types that `schema`, a part of `root`, names; empty if it says nothing of them."""
    return _types(alternatives(schema, root))


def argument_value(group: Sequence[Element], root: Schema) -> Any:
    """The value of an argument that was written as these elements, mostly one, under the schema of all arguments."""
    schema = argument_schema(group[0].name, root)
    return _value(group[0], schema, root) if len(group) == 1 else _repeated(group, schema, root)


def text_value(text: str, schema: Any, root: Schema) -> Any:
    """The value of an argument that was written as a text.

    Args:
        text: as written.
        schema: of the argument; None if none is known.
        root: what references lead into.
    """
    return _scalar(text, allowed_types(schema, root), alternatives(schema, root))


def element_object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is; None if it is none."""
    value = _loaded(text)
    return value if isinstance(value, dict) else None


# --- schemas ---------------------------------------------------------------------------------------------------------


def alternatives(schema: Any, root: Schema) -> list[Schema]:
    """A schema and all that it is combined of, references followed."""
    found: list[Schema] = []
    waiting = [schema]
    while waiting and len(found) < MAX_ALTERNATIVES:
        schema = waiting.pop(0)
        if not isinstance(schema, Mapping):
            continue
        found.append(schema)
        if isinstance(reference := schema.get("$ref"), str):
            waiting.append(resolved(reference, root))
        for combiner in _COMBINERS:
            if isinstance(members := schema.get(combiner), Sequence):
                waiting.extend(members)
    return found


def resolved(reference: str, root: Schema) -> Any:
    """What a reference into the schema `root` stands for; None for other references."""
    if not reference.startswith("#"):
        return None
    place: Any = root
    for step in reference[1:].split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        place = place.get(key) if isinstance(place, Mapping) else None
    return place


def _types(schemas: Iterable[Schema]) -> set[str]:
    types: set[str] = set()
    for schema in schemas:
        declared = schema.get("type")
        if isinstance(declared, str):
            types.add(declared)
        elif isinstance(declared, Sequence):
            types.update(name for name in declared if isinstance(name, str))
        else:
            types.update(_implied(schema))
        if schema.get("nullable") is True:
            types.add("null")
    return types


def _implied(schema: Schema) -> Iterable[str]:
    if "properties" in schema or isinstance(schema.get("additionalProperties"), Mapping):
        yield "object"
    if "items" in schema or "prefixItems" in schema:
        yield "array"
    for value in listed(schema):
        for name, kind in _TYPE_NAMES:
            if isinstance(value, kind):
                yield name
                break


_TYPE_NAMES: tuple[tuple[str, type], ...] = (
    ("null", type(None)), ("boolean", bool), ("integer", int), ("number", float), ("string", str), ("array", list),
    ("object", dict),
)  # fmt: skip


def listed(schema: Schema) -> list[Any]:
    """The values that a schema lists, if it does."""
    values = schema.get("enum")
    listed = list(values) if isinstance(values, (list, tuple)) else []
    return [*listed, schema["const"]] if "const" in schema else listed


def _member_schema(name: str, schemas: Iterable[Schema]) -> Any:
    rest: Any = None
    for schema in schemas:
        properties = schema.get("properties")
        if isinstance(properties, Mapping) and name in properties:
            return properties[name]
        if rest is None and isinstance(schema.get("additionalProperties"), Mapping):
            rest = schema["additionalProperties"]
    return rest


def _entry_schema(index: int, schemas: Iterable[Schema]) -> Any:
    for schema in schemas:
        first = schema.get("prefixItems")
        if isinstance(first, Sequence) and index < len(first):
            return first[index]
        if isinstance(schema.get("items"), Mapping):
            return schema["items"]
    return None


# --- values ----------------------------------------------------------------------------------------------------------


def _value(element: Element, schema: Any, root: Schema) -> Any:
    schemas = alternatives(schema, root)
    types = _types(schemas)
    if not element.children:
        return _scalar(element.text, types, schemas)
    items = all(child.name == ITEM for child in element.children)
    if "array" in types and (items or "object" not in types):
        return _array(element, schemas, root)
    if items and "object" not in types:
        return _array(element, schemas, root)
    return _object(element, schemas, root)


def _array(element: Element, schemas: Sequence[Schema], root: Schema) -> list[Any]:
    values = [_value(child, _entry_schema(i, schemas), root) for i, child in enumerate(element.children)]
    return values if not element.text.strip() else [*values, element.text]


def _object(element: Element, schemas: Sequence[Schema], root: Schema) -> dict[str, Any]:
    groups: dict[str, list[Element]] = {}
    for child in element.children:
        groups.setdefault(child.name, []).append(child)
    made: dict[str, Any] = {}
    for name, group in groups.items():
        schema = _member_schema(name, schemas)
        made[name] = _value(group[0], schema, root) if len(group) == 1 else _repeated(group, schema, root)
    if element.text.strip():
        name = TEXT_MEMBER
        while name in made:
            name = "$" + name
        made[name] = element.text
    return made


def _repeated(group: Sequence[Element], schema: Any, root: Schema) -> list[Any]:
    """A name that comes several times is a list of its values."""
    schemas = alternatives(schema, root)
    if "array" not in _types(schemas):
        return [_value(element, schema, root) for element in group]
    # For a list each may be one entry or several.
    values: list[Any] = []
    for element in group:
        if element.children and all(child.name == ITEM for child in element.children):
            values += _array(element, schemas, root)
        else:
            values.append(_value(element, _entry_schema(len(values), schemas), root))
    return values


def _scalar(text: str, types: set[str], schemas: Iterable[Schema]) -> Any:
    if not types or types == {"string"}:
        return text
    if "string" in types and any(text in listed(schema) for schema in schemas):
        return text
    plain = text.strip()
    if not plain:
        return _empty(text, types)
    if "null" in types and plain.lower() == "null":
        return None
    if types & {"integer", "number"} and (number := _number(plain, types)) is not None:
        return number
    if "boolean" in types and plain.lower() in ("true", "false"):
        return plain.lower() == "true"
    if types & {"array", "object"}:
        value = _loaded(plain)
        if isinstance(value, (dict, list)) and ("object" if isinstance(value, dict) else "array") in types:
            return value
    return text


def _empty(text: str, types: set[str]) -> Any:
    """An empty element is what the template writes for an empty list and an empty object."""
    if "string" in types:
        return text
    if "array" in types:
        return []
    if "object" in types:
        return {}
    return None if "null" in types else text


def _number(text: str, types: set[str]) -> int | float | None:
    if len(text) > MAX_DIGITS or not _NUMBER.fullmatch(text):
        return None
    if _INTEGER.fullmatch(text):
        return int(text)
    value = float(text)
    if not math.isfinite(value):
        return None
    if "number" in types:
        return value
    return int(value) if value.is_integer() and abs(value) <= _MOST_EXACT else None


def _loaded(text: str) -> Any:
    """The value of JSON text; None if it is none, or one that could not be written again."""
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    level, depth = [value], 0
    while level := [
        v for c in level for v in (c.values() if isinstance(c, dict) else c if isinstance(c, list) else ())
    ]:
        depth += 1
        if depth > MAX_JSON_DEPTH:
            return None
    return value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is out of range")
    return value
