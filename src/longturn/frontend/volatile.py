"""Volatile headers: dates, counters and states near the front of a prompt that differ where all behind them is equal.

Some agents write a billing line, the date, the working directory or the state of a repository into their system
prompt. Every token behind such a part is computed anew whenever it changes, though nothing else has. So the beginning
of each prompt (its system messages and tools) is compared with those that the tenant has sent before: the longest
common prefix, then the first place where both go on alike.

What is found is told to the client that sent the prompt as a place and a hash; the text of the other prompt never
leaves this module, and prompts are compared within one tenant and one salt only, whose cache they share anyway.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from longturn.frontend.conversation_keys import SYSTEM_ROLES, History, scope_of
from longturn.frontend.records import ChatPrompt, TextRequest, VolatileSpan
from longturn.frontend.volatile_lines import LearnedLine, Moved, learned_line, move_lines

_log = logging.getLogger(__name__)

Mode = Literal["off", "report", "move"]

HEAD_CHARS = 1 << 17
"""Of a prompt's beginning, more is not compared."""
SPAN_CHARS = 512
"""Longest differing part."""
MAX_SPANS = 8
ANCHOR_CHARS = 32
"""Equal text that ends a differing part."""
MIN_LOST_CHARS = 1024
"""A differing part counts if at least this much equal text stands behind it: about two pages."""

_HEADS = 16
"""Beginnings that are kept of one tenant."""
_LINES = 16
"""Learned lines that are kept of one tenant."""
_PINS = 4096
_LOGGED = 4096
_FIND_CHARS = 256
_TAIL_CHARS = 4
_COMPARED = 3
"""Beginnings that a new one is compared with in full."""

_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = (
    # Behind whatever the template writes before a system prompt.
    ("header", re.compile(r"(?:\A|[\s>\]])x-[a-z0-9-]+: ", re.I)),
    ("directory", re.compile(r"\bdirectory\b|\bcwd\b", re.I)),
    ("git", re.compile(r"\bgit\b|\bgitstatus\b|\bbranch\b|\bcommit\b", re.I)),
    ("date", re.compile(r"\b(?:date|time|today|now)\b|\d{4}-\d\d-\d\d|\d\d:\d\d", re.I)),
    ("id", re.compile(r"\b[0-9a-f]{8,}\b|\bid\b", re.I)),
)


@dataclass(frozen=True, slots=True)
class Difference:
    """A part in which two texts differ: old[old_from:old_to] became new[new_from:new_to]."""

    old_from: int
    old_to: int
    new_from: int
    new_to: int


@dataclass(slots=True)
class _Head:
    text: str
    shape: bytes
    """Stands for tools and template arguments: what they change is no header."""
    body: bytes
    """The conversation that came with it last."""


@dataclass(slots=True)
class _Known:
    """What is known of one tenant under one salt."""

    heads: list[_Head] = field(default_factory=list)
    lines: list[LearnedLine] = field(default_factory=list)

    @property
    def nchars(self) -> int:
        return sum(len(head.text) for head in self.heads)

    def closest(self, text: str, shape: bytes) -> list[_Head]:
        """The beginnings that are most like `text` at both ends; comparing in full takes a millisecond each."""
        # The end was written by the template: where it differs this is another kind of prompt.
        same = [head for head in self.heads if head.shape == shape and head.text[-_TAIL_CHARS:] == text[-_TAIL_CHARS:]]
        likeness = [common_chars(head.text, text) + common_chars(head.text, text, at_end=True) for head in same]
        order = sorted(range(len(same)), key=lambda number: (likeness[number], number), reverse=True)
        return [same[number] for number in order[:_COMPARED]]


class HeaderWatch:
    """Finds volatile parts and, if told to, moves their lines. Bounded; to be used from one thread."""

    def __init__(self, mode: Mode = "report", *, max_chars: int = 16 << 20) -> None:
        """
        Args:
            mode: off, report, or move: report, and move volatile lines to the end of the system message.
            max_chars: of all beginnings that are kept.
        """
        self.mode = mode
        self._max_chars = max_chars
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._nchars = 0
        self._pins: OrderedDict[bytes, tuple[str, ...]] = OrderedDict()
        self._logged: OrderedDict[bytes, None] = OrderedDict()

    def settled(self, prompt: ChatPrompt, request: TextRequest) -> ChatPrompt:
        """The prompt as it is to be rendered: with volatile lines moved, if that is the mode."""
        if self.mode != "move":
            return prompt
        scope = scope_of(request.tenant, request.cache_salt)
        known = self._known.get(scope)
        moved = move_lines(prompt, known.lines if known is not None else ())
        if moved is None:
            return prompt
        return moved.prompt(self._pinned(moved, scope))

    def observe(self, prompt: ChatPrompt, rendered: str, request: TextRequest, history: History) -> VolatileSpan | None:
        """The first volatile part of a prompt whose beginning was not seen before; None if it has none.

        Args:
            prompt: as `settled` gave it.
            rendered: its text.
            request: where it came from.
            history: its names.
        """
        if self.mode == "off":
            return None
        scope, body, shape = history.scope, history.body, history.tools + history.arguments
        known = self._use(scope)
        text = head_of(prompt, rendered)
        for number, head in enumerate(known.heads):
            if head.text == text:
                head.body = body
                known.heads.append(known.heads.pop(number))
                return None
        for head in known.closest(text, shape):
            found = differences(head.text, text)
            if found and _counts(found, text, same_conversation=head.body == body):
                break
        else:
            self._keep(known, _Head(text, shape, body))
            return None
        if self.mode == "move":
            self._learn(known, head.text, text, found)
        same_conversation = head.body == body
        if same_conversation:  # its old beginning will not come again
            known.heads.remove(head)
            self._nchars -= len(head.text)
        self._keep(known, _Head(text, shape, body))
        span = _span(text, found[0], scope)
        self._tell(request, scope, span, same_conversation)
        return span

    def _pinned(self, moved: Moved, scope: bytes) -> tuple[str, ...]:
        """The header lines that this system prompt came with first: a model has no use for others, and templates write
        the tools behind them."""
        key = hashlib.blake2b(moved.stable.encode("utf-8", "surrogatepass"), digest_size=32, key=scope).digest()
        lines = self._pins.setdefault(key, moved.headers)
        self._pins.move_to_end(key)
        while len(self._pins) > _PINS:
            self._pins.popitem(last=False)
        return lines

    def _learn(self, known: _Known, old: str, new: str, found: tuple[Difference, ...]) -> None:
        for difference in found:
            line = learned_line(
                line_at(old, difference.old_from, difference.old_to),
                line_at(new, difference.new_from, difference.new_to),
            )
            if line is not None and line not in known.lines:
                known.lines = [*known.lines, line][-_LINES:]

    def _use(self, scope: bytes) -> _Known:
        known = self._known.setdefault(scope, _Known())
        self._known.move_to_end(scope)
        return known

    def _keep(self, known: _Known, head: _Head) -> None:
        known.heads.append(head)
        self._nchars += len(head.text)
        if len(known.heads) > _HEADS:
            self._nchars -= len(known.heads.pop(0).text)
        while self._nchars > self._max_chars and len(self._known) > 1:
            self._nchars -= self._known.popitem(last=False)[1].nchars
        while self._nchars > self._max_chars and known.heads:
            self._nchars -= len(known.heads.pop(0).text)

    def _tell(self, request: TextRequest, scope: bytes, span: VolatileSpan, same_conversation: bool) -> None:
        session = request.session_id or span.digest
        key = hashlib.blake2b(session.encode("utf-8", "surrogatepass"), digest_size=16, key=scope).digest()
        if key in self._logged:
            return
        self._logged[key] = None
        while len(self._logged) > _LOGGED:
            self._logged.popitem(last=False)
        _log.log(
            # Between conversations the system prompt is lost, within one the whole of it.
            logging.WARNING if same_conversation else logging.INFO,
            "request %s: volatile header (%s, hash %s) at character %d of the prompt: the cache ends there%s",
            request.request_id,
            span.kind,
            span.digest,
            span.at_chars,
            "" if self.mode == "move" else "; see frontend.stabilise_headers",
        )


# --- comparing -------------------------------------------------------------------------------------------------------


def head_of(prompt: ChatPrompt, rendered: str) -> str:
    """A rendering up to its first message that is not the system's."""
    number = next((n for n, m in enumerate(prompt.messages) if m.get("role") not in SYSTEM_ROLES), None)
    content = None if number is None else prompt.messages[number].get("content")
    if isinstance(content, str) and (start := content.strip()[:_FIND_CHARS]):
        # The system prompt may hold the same text; behind its end is where the message is.
        # (Some agents write as the system in the middle of a conversation too.)
        systems = [m["content"].strip() for m in prompt.messages[:number] if m.get("content")]
        behind = 0
        for system in systems if all(isinstance(system, str) for system in systems) else ():
            if (at := rendered.find(system, behind)) >= 0:
                behind = at + len(system)
        if (at := rendered.find(start, behind)) >= 0:
            return rendered[: min(at, HEAD_CHARS)]
    return rendered[:HEAD_CHARS]


def common_chars(a: str, b: str, *, at_end: bool = False) -> int:
    """Number of equal characters at the beginning of two texts, or at their end."""
    low, high = 0, min(len(a), len(b))
    while low < high:  # a comparison of slices is much faster than one of characters
        middle = (low + high + 1) // 2
        if at_end:
            equal = a[len(a) - middle : len(a) - low] == b[len(b) - middle : len(b) - low]
        else:
            equal = a[low:middle] == b[low:middle]
        if equal:
            low = middle
        else:
            high = middle - 1
    return low


def differences(old: str, new: str) -> tuple[Difference, ...] | None:
    """The short parts in which two texts differ, in order; None if they are not the same text but for such parts."""
    found: list[Difference] = []
    i = j = 0
    if abs(len(old) - len(new)) > MAX_SPANS * SPAN_CHARS:
        return None
    while True:
        common = common_chars(old[i:], new[j:])
        i, j = i + common, j + common
        if i == len(old) and j == len(new):
            return tuple(found)
        if len(found) == MAX_SPANS or (end := _resynchronised(old, new, i, j)) is None:
            return None
        found.append(Difference(i, end[0], j, end[1]))
        i, j = end


def _resynchronised(old: str, new: str, i: int, j: int) -> tuple[int, int] | None:
    """Where two texts that differ from old[i] and new[j] on go on alike."""
    last = min(i + SPAN_CHARS, len(old) - ANCHOR_CHARS)
    places = {old[at : at + ANCHOR_CHARS]: at for at in range(last, i - 1, -1)}  # the first of equal ones stays
    for to in range(j, min(j + SPAN_CHARS, len(new)) + 1):
        anchor = new[to : to + ANCHOR_CHARS]
        if len(anchor) < ANCHOR_CHARS:  # near the end, all the rest must be equal
            at = len(old) - len(anchor)
            if i <= at <= i + SPAN_CHARS and old.endswith(anchor):
                return at, to
        elif anchor in places:
            return places[anchor], to
    return None


def _counts(found: tuple[Difference, ...], new: str, *, same_conversation: bool) -> bool:
    """Whether differences cost something that need not be lost: text behind them, or the conversation."""
    differing = sum(part.new_to - part.new_from for part in found)
    if same_conversation:
        return 2 * differing <= len(new)
    return len(new) - found[0].new_from - differing >= MIN_LOST_CHARS


def line_at(text: str, begin: int, end: int) -> str | None:
    """The line that holds text[begin:end]; None if that is no single line."""
    if "\n" in text[begin:end]:
        return None
    line_end = text.find("\n", end)
    return text[text.rfind("\n", 0, begin) + 1 : len(text) if line_end < 0 else line_end]


def _span(text: str, part: Difference, scope: bytes) -> VolatileSpan:
    line_end = text.find("\n", part.new_to)
    line = text[text.rfind("\n", 0, part.new_from) + 1 : len(text) if line_end < 0 else line_end]
    near = text[max(0, part.new_from - 64) : part.new_to + 64] if len(line) > SPAN_CHARS else line
    digest = hashlib.blake2b(near.encode("utf-8", "surrogatepass"), digest_size=8, key=scope).hexdigest()
    return VolatileSpan(part.new_from, part.new_to - part.new_from, next(_kinds(near), "other"), digest)


def _kinds(line: str) -> Iterator[str]:
    return (kind for kind, pattern in _KINDS if pattern.search(line))
