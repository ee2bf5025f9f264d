"""What tests of tool parsers share: texts parsed whole and in pieces, and the calls that came of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from longturn.frontend.parsers.base import ToolText, join_calls, parse_tools
from longturn.frontend.parsers.json_scan import is_object


def in_pieces(parser: Any, pieces: Iterable[str]) -> ToolText:
    made = [*(parser.push(piece) for piece in pieces), parser.finish()]
    return ToolText(
        "".join(piece.content for piece in made), join_calls(call for piece in made for call in piece.calls)
    )


def parsed_anyhow(make: Callable[[], Any], text: str, *cuts: Iterable[str]) -> ToolText:
    """A text parsed whole by a new parser, which gives the same character by character and for each of `cuts`."""
    whole = parse_tools(make(), text)
    for pieces in (text, *cuts):
        assert in_pieces(make(), pieces) == whole
    return whole


def halves(text: str) -> list[list[str]]:
    """The text cut in two at every place."""
    return [[text[:at], text[at:]] for at in range(len(text))]


def calls_of(parsed: ToolText) -> list[tuple[str, Any]]:
    """Calls with their arguments; with the text that was written of those that are no JSON."""
    return [
        (call.name, json.loads(call.arguments) if is_object(call.arguments) else call.arguments)
        for call in parsed.calls
    ]
