"""Arguments of a call as JSON that is written while they are read, for formats that write them as text.

The pieces add up to one object. A name that comes again later is a second member of that name, as no piece can be taken
back; readers of JSON take the last one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from longturn.frontend.parsers.json_scan import container
from longturn.frontend.parsers.schema import (
    TEXT_MEMBER,
    Element,
    Schema,
    allowed_types,
    argument_schema,
    argument_value,
    element_object,
    text_value,
)

_SURROGATE = re.compile("[\ud800-\udfff]")


def json_text(value: Any) -> str:
    """A value as JSON without needless space; halves of surrogate pairs, which UTF-8 cannot carry, are escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class ArgumentsWriter:
    """Writes the arguments of one call."""

    __slots__ = ("_names", "_pieces", "_root")

    def __init__(self, schema: Schema | None) -> None:
        """`schema`: of the object that they make; None if it is not known."""
        self._root: Schema = schema or {}
        self._names: set[str] = set()
        self._pieces: list[str] = []

    def schema_of(self, name: str) -> Any:
        """The schema of an argument; None if none is known."""
        return argument_schema(name, self._root)

    def streams(self, name: str) -> bool:
        """Whether an argument can be nothing but the text that is written for it."""
        return allowed_types(self.schema_of(name), self._root) == {"string"}

    def open_text(self, name: str) -> None:
        """Begin a text; `text` and `close_text` must follow."""
        self._name(name)
        self._pieces.append('"')

    def text(self, text: str) -> None:
        """More of the text that was begun."""
        self._pieces.append(json_text(text)[1:-1])

    def close_text(self) -> None:
        """The end of the text that was begun."""
        self._pieces.append('"')

    def value(self, name: str, value: Any) -> None:
        """A whole argument."""
        self._name(name)
        self._pieces.append(json_text(value))

    def converted(self, name: str, text: str) -> None:
        """A whole argument of which this text is written; JSON for a list or an object keeps its spelling."""
        schema = self.schema_of(name)
        if container(text) in allowed_types(schema, self._root):
            self._name(name)
            self._pieces.append(text.strip())
        else:
            self.value(name, text_value(text, schema, self._root))

    def elements(self, group: Sequence[Element]) -> None:
        """A whole argument of which this is written; several elements make a list."""
        self.value(group[0].name, argument_value(group, self._root))

    def loose_text(self, text: str) -> None:
        """Text that belongs to no argument. Where there is none, and the text is a JSON object, that is the arguments.

        To be called last.
        """
        if not text.strip():
            return
        if not self._names and (members := element_object(text)) is not None:
            for name, value in members.items():
                self.value(name, value)
            return
        name = TEXT_MEMBER
        while name in self._names:
            name = "$" + name
        self.value(name, text)

    def close(self) -> None:
        """The end of the arguments."""
        self._pieces.append("}" if self._names else "{}")

    def take(self) -> str:
        """What was written since the last call."""
        text = "".join(self._pieces)
        self._pieces.clear()
        return text

    def _name(self, name: str) -> None:
        self._pieces += ("," if self._names else "{", json_text(name), ":")
        self._names.add(name)
