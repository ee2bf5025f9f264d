"""MiniMax-M3's tags in a text that comes in pieces.

Every structural tag has the namespace marker `]<]minimax[>[` before it, one token of the vocabulary that nothing else
uses, so values need no escaping: HTML in an argument is text. A tag's inside has no line end and no angle bracket, and
at most `MAX_TAG_CHARS` characters; a marker without such a tag behind it is text.
"""

from __future__ import annotations

from dataclasses import dataclass

from longturn.frontend.stop import overlap

NAMESPACE = "]<]minimax[>["
TOOL_BLOCK = f"{NAMESPACE}<tool_call>"
MAX_TAG_CHARS = 256
"""Bounds what is held back behind a marker; function names have at most 64 characters."""

_OPENING = f"{NAMESPACE}<"


@dataclass(frozen=True, slots=True)
class Tag:
    """A structural tag."""

    body: str
    """What is between the angle brackets: `item`, `/item`, `invoke name="f"`."""

    @property
    def raw(self) -> str:
        """The tag as it was written."""
        return f"{_OPENING}{self.body}>"


class TagReader:
    """Cuts text into tags and what is between them; consecutive texts belong together."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = ""

    def push(self, text: str) -> list[str | Tag]:
        """Texts (never empty) and tags that are certain after more text."""
        text = self._held + text
        found: list[str | Tag] = []
        begin = at = 0
        while (at := text.find(_OPENING, at)) >= 0:
            inside = at + len(_OPENING)
            end = _first_bracket(text, inside)
            if end < 0:
                if len(text) - inside <= MAX_TAG_CHARS:
                    break
            elif text[end] == ">" and text[inside:end].strip("/ \t"):
                if begin < at:
                    found.append(text[begin:at])
                found.append(Tag(text[inside:end]))
                begin = at = end + 1
                continue
            at = inside
        if at < 0:
            at = len(text) - overlap(text[begin:], _OPENING)
        if begin < at:
            found.append(text[begin:at])
        self._held = text[at:]
        return found

    def finish(self) -> str:
        """What was held back, which is text after all."""
        held, self._held = self._held, ""
        return held


def _first_bracket(text: str, start: int) -> int:
    """Where the first character that no tag's inside can have is, within the longest tag; negative if nowhere."""
    ends = (text.find(char, start, start + MAX_TAG_CHARS + 1) for char in "<>\n")
    return min((end for end in ends if end >= 0), default=-1)
