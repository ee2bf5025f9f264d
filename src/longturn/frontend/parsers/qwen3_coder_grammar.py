"""Qwen3-Coder's calls as a grammar: parameters by schema, as `qwen3_coder` reads them.

A text ends at the first line that begins with its closing tag, so a forced call cannot write that line; all other
values are JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from longturn.frontend.parsers.minimax_m3_grammar import properties_of
from longturn.frontend.parsers.qwen3_coder import (
    BLOCK,
    BLOCK_END,
    FUNCTION,
    FUNCTION_END,
    PARAMETER,
    PARAMETER_END,
)
from longturn.frontend.parsers.schema import allowed_types, listed
from longturn.frontend.parsers.strict_schema import check_listed, check_object, text_schema
from longturn.frontend.parsers.tool_grammar import CallGrammar, Function, Rules, moved, text_up_to

_END = f"\n{PARAMETER_END}"
_ROOT = "#/$defs/root"
"""Where the schema of all parameters stands in that of each, for references."""


def _call(rules: Rules, function: Function) -> str:
    properties, required = properties_of(function.parameters, function.parameters)
    nameless = {name for name in properties if set(name) & set("<>\n") or not name}  # no tag can have such a name
    check_object(function, function.parameters, properties.keys() - nameless, required)
    parts = [rules.literal(f"{FUNCTION}{function.name}>\n")]
    for name, schema in properties.items():
        if name in nameless:
            continue
        begin, end = rules.literal(f"{PARAMETER}{name}>\n"), rules.literal("\n")
        parameter = f"{begin} {_value(rules, function, schema)} {end}"
        parts.append(parameter if name in required else f"({parameter})?")
    return " ".join([*parts, rules.literal(FUNCTION_END)])


def _value(rules: Rules, function: Function, schema: Any) -> str:
    """A value and its closing tag."""
    root, plain = function.parameters, schema if isinstance(schema, Mapping) else {}
    if values := _listed(function, plain):
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        return rules.add("value", " | ".join(rules.literal(f"{text}{_END}") for text in texts))
    types = allowed_types(plain, root)
    if not types or "string" in types:
        return text_up_to(rules, text_schema(function, plain), _END, strict=function.strict)
    whole = dict(moved(plain, _ROOT, strict=function.strict))
    whole["$defs"] = {"root": moved(root, _ROOT, strict=function.strict)}
    return rules.add("value", f"{rules.json(whole, strict=function.strict)} {rules.literal(_END)}")


def _listed(function: Function, schema: Mapping[str, Any]) -> list[Any]:
    """The values that a schema lists, also beside null; empty if there are others."""
    plain = text_schema(function, schema) if schema.keys() == {"$ref"} else schema
    if values := listed(plain):
        check_listed(function, plain)
        return values
    choices = plain.get("anyOf")
    if not isinstance(choices, list) or not all(isinstance(choice, Mapping) for choice in choices):
        return []
    if not all(listed(choice) or choice == {"type": "null"} for choice in choices):
        return []
    for choice in choices:
        check_listed(function, choice)
    return [value for choice in choices for value in listed(choice) or [None]]


QWEN3_CODER = CallGrammar(_call, f"{BLOCK}\n", f"\n{BLOCK_END}", f"\n{BLOCK_END}\n{BLOCK}\n", BLOCK)
