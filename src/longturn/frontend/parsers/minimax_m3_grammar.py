"""MiniMax-M3's calls as a grammar: elements by schema, as `minimax_m3_tools` reads them.

Every rule for a value also takes the namespace marker of the tag that closes it: text ends at the first marker, and a
lexer that has begun to read a marker as text could not go back. Numbers, truth values and objects of unknown members
are JSON, which the parser reads by the same schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longturn.frontend.parsers.minimax_m3_tags import NAMESPACE, TOOL_BLOCK
from longturn.frontend.parsers.schema import ITEM, MAX_ALTERNATIVES, listed, resolved
from longturn.frontend.parsers.strict_schema import (
    check_alone,
    check_any_text,
    check_array,
    check_listed,
    check_object,
    text_or_null,
    text_schema,
)
from longturn.frontend.parsers.tool_grammar import CallGrammar, Function, Rules, count_of, text_up_to

Schema = Mapping[str, Any]


def _call(rules: Rules, function: Function) -> str:
    maker = _Elements(rules, function)
    head = rules.literal(f'{NAMESPACE}<invoke name="{function.name}">')
    return f"{head} {maker.members(function.parameters)} {rules.literal('</invoke>')}"


MINIMAX_M3 = CallGrammar(_call, f"{TOOL_BLOCK}\n", f"\n{NAMESPACE}</tool_call>", "\n", TOOL_BLOCK, (NAMESPACE,))


@dataclass(slots=True)
class _Elements:
    """Rules of one function's arguments."""

    rules: Rules
    function: Function
    references: dict[str, str] = field(default_factory=dict)
    """Rules by reference: what ends a schema that contains itself."""

    def members(self, schema: Schema) -> str:
        """An object's members as elements, in the order of the schema, and the marker after them."""
        properties, required = properties_of(schema, self.function.parameters)
        # No tag can have such a name.
        nameless = {key for key in properties if set(key) & set("<>\n") or not key.strip("/ \t")}
        check_object(self.function, schema, properties.keys() - nameless, required)
        parts = []
        for key, member in properties.items():
            if key in nameless:
                continue
            element = f"{self._marked(f'<{key}>')} {self.value(member)} {self.rules.literal(f'</{key}>')}"
            parts.append(element if key in required else f"({element})?")
        return self.rules.add("members", " ".join([*parts, self.rules.literal(NAMESPACE)]))

    def value(self, schema: Any) -> str:
        """A value and the marker of the tag that closes it."""
        if not isinstance(schema, Mapping):
            schema = {}
        if isinstance(reference := schema.get("$ref"), str):
            check_alone(self.function, schema, "$ref")
            return self._referred(reference)
        if self.function.strict and text_or_null(schema) is not None:
            return self._text(schema)
        choices = schema.get("anyOf") or schema.get("oneOf")
        kinds = schema.get("type")
        if choices:
            check_alone(self.function, schema, "anyOf" if schema.get("anyOf") else "oneOf")
        if not choices and isinstance(kinds, Sequence) and not isinstance(kinds, str):
            # Once each: every level of a schema would multiply the next one.
            choices = [{**schema, "type": kind} for kind in dict.fromkeys(map(str, kinds))]
        if isinstance(choices, Sequence) and not isinstance(choices, str) and choices:
            return self._one_of(choices[:MAX_ALTERNATIVES])
        if values := listed(schema):
            check_listed(self.function, schema)
            texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
            return self.rules.add("value", " | ".join(self.rules.literal(f"{text}{NAMESPACE}") for text in texts))
        if kinds == "array" or (kinds is None and "items" in schema):
            return self._array(schema)
        if kinds == "object" or (kinds is None and "properties" in schema):
            properties, _ = properties_of(schema, self.function.parameters)
            return self.members(schema) if properties else self._json({**schema, "type": "object"})
        if kinds in ("integer", "number", "boolean", "null"):
            return self._json(schema)
        return self._text(schema)

    def _array(self, schema: Schema) -> str:
        check_array(self.function, schema)
        item = schema.get("items")
        element = f"{self._marked(f'<{ITEM}>')} {self.value(item)} {self.rules.literal(f'</{ITEM}>')}"
        least, most = schema.get("minItems"), schema.get("maxItems")
        times = f"{{{count_of(least) or 0},{'' if count_of(most) is None else most}}}"
        return self.rules.add("items", f"({element}){times} {self.rules.literal(NAMESPACE)}")

    def _one_of(self, choices: Sequence[Any]) -> str:
        plain = [choice for choice in choices if isinstance(choice, Mapping)]
        text = [choice for choice in plain if choice.get("type") == "string" and not listed(choice)]
        if text and len(plain) == 1:
            return self._text(text[0])
        if text:  # any text takes in the others
            for choice in plain:
                check_any_text(self.function, choice)
            return self._text({})
        return self.rules.add("value", " | ".join([self.value(choice) for choice in plain] or [self._text({})]))

    def _referred(self, reference: str) -> str:
        if reference not in self.references:
            name = self.references[reference] = f"ref_{len(self.references)}_of_{len(self.rules.lines)}"
            body = self.value(resolved(reference, self.function.parameters))
            self.rules.lines.append(f"{name}: {body}")
        return self.references[reference]

    def _text(self, schema: Schema) -> str:
        return text_up_to(self.rules, text_schema(self.function, schema), NAMESPACE, strict=self.function.strict)

    def _json(self, schema: Schema) -> str:
        json_rule = self.rules.json(schema, strict=self.function.strict)
        return self.rules.add("value", f"{json_rule} {self.rules.literal(NAMESPACE)}")

    def _marked(self, tag: str) -> str:
        return self.rules.literal(f"{NAMESPACE}{tag}")


def properties_of(schema: Schema, root: Schema) -> tuple[dict[str, Any], set[str]]:
    """Members of an object and which of them must be there, all that it is combined of taken together."""
    properties: dict[str, Any] = {}
    required: set[str] = set()
    waiting: list[Any] = [schema]
    for _ in range(MAX_ALTERNATIVES):
        if not waiting:
            break
        part = waiting.pop(0)
        if not isinstance(part, Mapping):
            continue
        if isinstance(own := part.get("properties"), Mapping):
            properties = {**own, **properties}
        if isinstance(names := part.get("required"), Sequence):
            required.update(name for name in names if isinstance(name, str))
        if isinstance(reference := part.get("$ref"), str):
            waiting.append(resolved(reference, root))
        if isinstance(parts := part.get("allOf"), Sequence):
            waiting.extend(parts)
    return properties, required
