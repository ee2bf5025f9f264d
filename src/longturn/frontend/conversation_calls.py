"""Tool calls as the values that they are, whatever an agent makes of them before it sends them back.

Agents decode arguments by the tool's schema and send back what came of it: members in the schema's order, defaults
written out, numbers and booleans for the texts that a model wrote for them (Claude Code does all three), and numbers as
JavaScript spells them. None of that changes what was called.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longturn.frontend.parsers.schema import Schema, allowed_types, text_value, tool_schemas


@dataclass(frozen=True, slots=True)
class ArgumentForms:
    """What one tool's schema says of its arguments."""

    root: Schema = field(default_factory=dict)
    """Of the object that they make."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values that they have where a call leaves them out."""
    no_texts: Mapping[str, Any] = field(default_factory=dict)
    """Schemas of those that can be no text, by name."""


Forms = Mapping[str, ArgumentForms]
"""By the tool's name."""

_UNKNOWN = ArgumentForms()


def argument_forms(tools: Sequence[Mapping[str, Any]]) -> Forms:
    """What the schemas of a request's tools say of arguments."""
    forms: dict[str, ArgumentForms] = {}
    for name, root in tool_schemas(tools).items():
        properties = root.get("properties")
        schemas = properties if isinstance(properties, Mapping) else {}
        forms[name] = ArgumentForms(
            root=root,
            defaults={
                key: _settled(schema["default"])
                for key, schema in schemas.items()
                if isinstance(schema, Mapping) and "default" in schema
            },
            no_texts={
                key: schema
                for key, schema in schemas.items()
                if (types := allowed_types(schema, root)) and "string" not in types
            },
        )
    return forms


def canonical_call(call: Any, forms: Forms) -> Any:
    """A tool call's name and arguments, the same for all that agents make of one call; no calls are left as they are.

    Args:
        call: in the form of OpenAI's chat API; arguments as an object or as JSON text.
        forms: of the request's tools.
    """
    function = call.get("function", call) if isinstance(call, Mapping) else call
    if not isinstance(function, Mapping):
        return call
    arguments, name = function.get("arguments"), function.get("name")
    form = forms.get(name, _UNKNOWN) if isinstance(name, str) else _UNKNOWN
    # What is no JSON, or nested too deeply, is compared as the text that it is.
    with contextlib.suppress(ValueError, RecursionError):
        arguments = _canonical(json.loads(arguments) if isinstance(arguments, str) else arguments, form)
    return {"name": name, "arguments": arguments}


def _canonical(arguments: Any, form: ArgumentForms) -> Any:
    if not isinstance(arguments, Mapping) or not all(isinstance(key, str) for key in arguments):
        return arguments
    values = {key: _value(key, value, form) for key, value in arguments.items()}
    kept = {key: v for key, v in values.items() if key not in form.defaults or not _same(v, form.defaults[key])}
    return json.loads(json.dumps(kept, sort_keys=True))


def _value(name: str, value: Any, form: ArgumentForms) -> Any:
    if isinstance(value, str) and value.strip() and name in form.no_texts:
        value = text_value(value, form.no_texts[name], form.root)
    return _settled(value)


def _settled(value: Any) -> Any:
    """A value with whole numbers as integers: JSON has one kind of number, and JavaScript writes 2.0 as 2."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {key: _settled(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_settled(item) for item in value]
    return value


def _same(a: Any, b: Any) -> bool:
    # In Python 0 == False, in JSON not.
    return type(a) is type(b) and bool(a == b)
