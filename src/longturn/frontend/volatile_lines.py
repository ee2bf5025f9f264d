"""Moves volatile lines of a system prompt behind its stable part. The rules, in full:

1. Only the first message is looked at, if it is the system's and a text; only whole lines move, each unchanged.
2. A line moves if it has one of these forms (spaces around it and its case aside):
   `x-NAME: VALUE` (a header);
   `Date|Time|Current date|Current time|Current date and time|Today's date`, then `:` or `is`, and a text with a digit,
   such as `Today's date: 2026-05-01` or `The current date is May 1st, 2026.`; `Today`, and a text with a year;
   `cwd|Working directory|Current|Primary working directory`, then `:` or `is`, and a text;
   `Git branch|commit|revision`, then `:` or `is`, and one word;
   or if it has differed between requests in a part with a digit, with at least 8 equal characters before it.
3. A line stays where it is inside a code fence or an element (`<env>` ... `</env>`) and in a list. Where no line that
   stays stands behind any of them, they are at the end already.
4. Moved lines stand at the end of the message behind an empty line, headers first, else in their order; where they
   were, of two empty lines that meet one goes.
5. Headers keep the values that the conversation began with: they say nothing to a model, and may be another in every
   request. All other lines are as the request has them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longturn.frontend.conversation_keys import SYSTEM_ROLES
from longturn.frontend.records import ChatPrompt

MIN_PREFIX_CHARS = 8

_HEADER = re.compile(r"\s*x-[a-z0-9-]+: \S.*", re.I)
_FORMS = tuple(
    re.compile(form, re.I)
    for form in (
        r"\s*(?:today's date|(?:the )?(?:current )?(?:date and time|date|time))(?::| is:?) .*\d.*",
        r"\s*today(?::| is:?) .*\b(?:19|20)\d\d\b.*",
        r"\s*(?:cwd|(?:the )?(?:(?:current|primary) )?working directory)(?::| is:?) \S.*",
        r"\s*git (?:branch|commit|revision)(?::| is:?) \S+\s*",
    )
)
_FENCE = re.compile(r"\s*(?:```|~~~)")
_OPENS = re.compile(r"\s*<([A-Za-z][\w:-]*)(?:\s[^<>]*)?>\s*")
_CLOSES = re.compile(r"\s*</([A-Za-z][\w:-]*)>\s*")


@dataclass(frozen=True, slots=True)
class LearnedLine:
    """A line that was seen to change between these two parts."""

    before: str
    after: str

    def fits(self, line: str) -> bool:
        changing = line[len(self.before) : len(line) - len(self.after)]
        return line.startswith(self.before) and line.endswith(self.after) and any(char.isdigit() for char in changing)


@dataclass(frozen=True, slots=True)
class Moved:
    """A prompt whose volatile lines stand apart."""

    original: ChatPrompt
    stable: str
    """The system message without them."""
    headers: tuple[str, ...]
    lines: tuple[str, ...]
    """Those that are no headers."""

    def prompt(self, headers: Sequence[str]) -> ChatPrompt:
        """The prompt with its volatile lines at the end of the system message, its headers replaced by these."""
        first, *rest = self.original.messages
        content = "\n".join((self.stable, "", *headers, *self.lines))
        message: Mapping[str, Any] = {**first, "content": content}
        return dataclasses.replace(self.original, messages=(message, *rest))


def learned_line(old: str | None, new: str | None) -> LearnedLine | None:
    """What two forms of a line have in common; None if that is too little to know the line again, or it differs in
    words: those may be what the prompt is about."""
    if old is None or new is None or old == new:
        return None
    before = 0
    while before < min(len(old), len(new)) and old[before] == new[before]:
        before += 1
    after = 0
    while after < min(len(old), len(new)) - before and old[-1 - after] == new[-1 - after]:
        after += 1
    while before and old[before - 1].isdigit():  # 09 and 10: all of a number changes
        before -= 1
    while after and old[-after].isdigit():
        after -= 1
    line = LearnedLine(old[:before], old[len(old) - after :])
    return line if before >= MIN_PREFIX_CHARS and line.fits(old) and line.fits(new) else None


def move_lines(prompt: ChatPrompt, learned: Sequence[LearnedLine] = ()) -> Moved | None:
    """Take the volatile lines out of a prompt; None if there is nothing to move."""
    first = prompt.messages[0] if prompt.messages else {}
    content = first.get("content")
    if first.get("role") not in SYSTEM_ROLES or not isinstance(content, str):
        return None
    lines = content.split("\n")
    volatile = [number for number in _free(lines) if _is_volatile(lines[number], learned)]
    staying = set(range(len(lines))).difference(volatile)
    last = max((number for number in staying if lines[number].strip()), default=-1)
    headers = tuple(lines[number] for number in volatile if _HEADER.fullmatch(lines[number]))
    if last < 0 or not (headers or any(number < last for number in volatile)):
        return None
    stable: list[str] = []
    for number, line in enumerate(lines[: last + 1]):
        if number in staying:
            behind_moved = number > 0 and number - 1 not in staying
            if not line.strip() and behind_moved and (not stable or not stable[-1].strip()):
                continue
            stable.append(line)
    others = tuple(lines[number] for number in volatile if not _HEADER.fullmatch(lines[number]))
    return Moved(prompt, "\n".join(stable), headers, others)


def _is_volatile(line: str, learned: Sequence[LearnedLine]) -> bool:
    if _HEADER.fullmatch(line) or any(form.fullmatch(line) for form in _FORMS):
        return True
    return any(known.fits(line) for known in learned)


def _free(lines: Sequence[str]) -> list[int]:
    """Numbers of the lines that are in no fence and no element."""
    free: list[int] = []
    fenced = False
    closing = _closing(lines)
    until = -1
    for number, line in enumerate(lines):
        if _FENCE.match(line):
            fenced = not fenced
        elif number <= until:
            continue
        elif not fenced:
            if number in closing:
                until = closing[number]
            else:
                free.append(number)
    return free


def _closing(lines: Sequence[str]) -> dict[int, int]:
    """The line that closes an element, by the line that opens it; elements that nothing closes are text."""
    open_at: dict[str, list[int]] = {}
    pairs: dict[int, int] = {}
    for number, line in enumerate(lines):
        if found := _OPENS.fullmatch(line):
            open_at.setdefault(found[1], []).append(number)
        elif (found := _CLOSES.fullmatch(line)) and open_at.get(found[1]):
            pairs[open_at[found[1]].pop()] = number
    return pairs
