"""Tool calls as JSON objects: where such an object ends in a text that comes in pieces, and which calls it stands for.

The arguments are given out as the model has spelled them, since that is what its next prompt must repeat; where its
spelling is no strict JSON (a line end inside a string), it is corrected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any, Literal

from longturn.frontend.parsers.schema import MAX_JSON_DEPTH
from longturn.frontend.records import ToolCall

CALL_KEYS = frozenset({"name", "arguments", "parameters", "type", "id", "function"})
"""Keys of an object that is a call where nothing but its form tells."""

_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["\[\]{}]|[^ \t\r\n:,0-9A-Za-z+\-.]')
_TEXT_EVENT = re.compile(r'["\\\x00-\x1f]')
_VALUE_EVENT = re.compile(r'["\[\]{}<`]')
_SPACE = re.compile(r"[ \t\r\n]*")
_FIRST_KEY = re.compile(r'\s*(?:\[\s*)?\{\s*"([^"\\]*)"')
_CALL_HEAD = re.compile(
    r'\{S*(?:"(?:id|type)"S*:S*"[^"\\]*"S*,S*)*"name"S*:S*"([^"\\\x00-\x1f]+)"S*,S*'
    r'(?:"(?:id|type)"S*:S*"[^"\\]*"S*,S*)*"(?:arguments|parameters)"S*:S*(?=\{)'.replace("S*", r"[ \t\r\n]*")
)
"""The beginning of a call whose arguments follow as an object, with its name before them, as nearly all are written."""
_NO_CALL = re.compile(r"\s*(?:\[\s*[^\s{]|(?:\[\s*)?\{\s*[^\s\"])")


class JsonEnd:
    """Finds the end of an object or list. Every character is looked at once, however the text is cut."""

    __slots__ = ("_depth", "_escaped", "_in_string")

    def __init__(self, depth: int = 0) -> None:
        """`depth`: brackets that were opened before the text that is pushed first."""
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> int | None:
        """More text, of which the first begins with a brace or a bracket.

        Returns:
            Where in this text the value ends (one past its last character), 0 if the value is no JSON, or None if more
            text decides.
        """
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_IN_STRING if self._in_string else _OUTSIDE).search(text, at)
            if found is None:
                return None
            at = found.end()
            char = found[0]
            if self._in_string:
                self._escaped = char == "\\"
                self._in_string = self._escaped
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
                if self._depth > MAX_JSON_DEPTH:
                    return 0
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at
            else:
                return 0
        return None


class ArgumentsScan:
    """Gives out the arguments of a call, an object, as they are written. However the text is cut, the pieces add up to
    the same: to valid JSON if the model has written some, line ends inside of strings forgiven.

    What is no JSON is given out as it is: whoever made the call is to see it, and what went before cannot be taken
    back.
    """

    __slots__ = ("_closer", "_depth", "_escaped", "_in_string", "open")

    def __init__(self, closer: str = "") -> None:
        """`closer`: text that ends arguments whose brackets are still open, unless it stands in a string."""
        self._closer = closer
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.open = True

    def push(self, text: str) -> tuple[str, int]:
        """More text, of which the first begins with a brace.

        Returns:
            A piece of the arguments, and how much of the text is used up: what is left behind must come again with more
            text, unless `open` is false now: then the arguments end there.
        """
        made: list[str] = []
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                made.append(text[at])
                at += 1
                continue
            found = (_TEXT_EVENT if self._in_string else _VALUE_EVENT).search(text, at)
            if found is None:
                made.append(text[at:])
                return "".join(made), len(text)
            made.append(text[at : found.start()])
            at, char = found.start(), found[0]
            if self._in_string and char not in '"\\':
                made.append(json.dumps(char)[1:-1])  # a line end and the like, which JSON wants escaped
            elif not self._in_string and char in "<`" and self._closer.startswith(text[at : at + len(self._closer)]):
                self.open = len(text) - at < len(self._closer)
                return "".join(made), at
            else:
                made.append(char)
                self._count(char)
            at += 1
            if not 0 < self._depth <= MAX_JSON_DEPTH:
                self.open = False
                break
        return "".join(made), at

    def _count(self, char: str) -> None:
        if self._in_string:
            self._escaped = char == "\\"
            self._in_string = self._escaped
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1


def cannot_be_call(head: str) -> bool | None:
    """Whether a JSON text that begins like this is no call by its form; None if more of it decides."""
    if (key := _FIRST_KEY.match(head)) is not None:
        return key[1] not in CALL_KEYS
    if _NO_CALL.match(head) is not None:
        return True
    return False if "\\" in head else None


def call_head(text: str) -> tuple[str, int] | None:
    """The name of the call that a text begins with, and where its arguments begin; None if (so far) it is no such text.

    The arguments then are what follows: an object.
    """
    found = _CALL_HEAD.match(text)
    return None if found is None else (found[1], found.end())


def read_calls(text: str, known: Collection[str] | None) -> tuple[ToolCall, ...] | None:
    """The calls that a whole JSON text stands for; None if it is no call.

    Args:
        text: an object, or a list of them.
        known: the functions that there are, where nothing but its form says that an object is a call: then another
            name, or a key that calls have not, makes it data. None accepts any name.
    """
    try:
        value = _DECODER.decode(text)
        objects = [raw for _, raw in _entries(text)] if isinstance(value, list) else [text]
        calls = [_call(raw, known) for raw in objects]
    except (ValueError, RecursionError):  # no JSON, a number with too many digits, or nested too deeply
        return None
    found = tuple(call for call in calls if call is not None)
    return found if found and len(found) == len(calls) else None


def _call(text: str, known: Collection[str] | None) -> ToolCall | None:
    if not text.startswith("{"):
        return None
    members = {key: (value, raw) for key, value, raw in _members(text)}
    if known is not None and not CALL_KEYS.issuperset(members):
        return None
    inner, raw = members.get("function", (None, ""))
    if isinstance(inner, dict) and "name" not in members:
        return _call(raw, known)
    name = members.get("name", (None, ""))[0]
    if not isinstance(name, str) or not name or (known is not None and name not in known):
        return None
    value, raw = members.get("arguments") or members.get("parameters") or ({}, "{}")
    if isinstance(value, str):  # an object written as a text, as OpenAI's API has it
        raw = value.strip()
        value = _DECODER.decode(raw) if raw else None
    if value is None:
        value, raw = {}, "{}"
    return ToolCall(name=name, arguments=_spelled(value, raw)) if isinstance(value, dict) else None


def _spelled(value: dict[str, Any], raw: str) -> str:
    try:
        json.loads(raw)
    except ValueError:
        raw = json.dumps(value, ensure_ascii=False)
        try:
            raw.encode()
        except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can carry
            raw = json.dumps(value)
    return raw


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


# Not strict: small models write line ends inside of strings.
_DECODER = json.JSONDecoder(strict=False, parse_constant=_refuse)


def is_object(text: str) -> bool:
    """Whether a text is a JSON object: what a call's arguments are, unless they were cut off or are broken."""
    return container(text) == "object"


def container(text: str) -> Literal["array", "object"] | None:
    """What a JSON text is; None if it is neither of the two, or no JSON."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return "object" if isinstance(value, dict) else "array" if isinstance(value, list) else None


def _members(text: str) -> Iterator[tuple[str, Any, str]]:
    """Key, value and the value's spelling of each member of a valid object."""
    at = _after_space(text, 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        begin = _after_space(text, _after_space(text, at) + 1)
        value, at = _DECODER.raw_decode(text, begin)
        yield key, value, text[begin:at]
        at = _after_comma(text, at)


def _entries(text: str) -> Iterator[tuple[Any, str]]:
    """Value and spelling of each entry of a valid list."""
    at = _after_space(text, 1)
    while text[at] != "]":
        value, end = _DECODER.raw_decode(text, at)
        yield value, text[at:end]
        at = _after_comma(text, end)


def _after_comma(text: str, at: int) -> int:
    at = _after_space(text, at)
    return _after_space(text, at + 1) if text[at] == "," else at


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return found.end() if found else at
