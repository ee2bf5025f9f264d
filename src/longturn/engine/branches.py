"""Dead branches: what a session's last turn wrote and its next turn does not begin with.

Templates leave old reasoning out, and agents rewrite their answers. Such pages are the youngest of all and the least
useful: once the session has come back without them, they have no claim to be kept for it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from longturn.config import PAGE_TOKENS
from longturn.engine.sequence import Sequence

_SESSIONS = 1024
"""Sessions whose last turn is remembered."""
_MOST_PAGES = 64
"""Pages of a turn's output that are remembered, half a kilobyte each."""
_PAGE_BYTES = 4 * PAGE_TOKENS


class _Tail(NamedTuple):
    first: int
    """Number of the first page that holds output."""
    parent: bytes | None
    """Hash of the page before it."""
    hashes: tuple[bytes, ...]
    tokens: bytes
    """Of these pages."""


class Branches:
    """Last turns of sessions: of each the pages with output."""

    __slots__ = ("_tails",)

    def __init__(self) -> None:
        self._tails: OrderedDict[str, _Tail] = OrderedDict()

    def ended(self, sequence: Sequence) -> None:
        """A request has ended and given its pages back."""
        session = sequence.request.session_id
        first = sequence.prompt_tokens // PAGE_TOKENS
        hashes = tuple(sequence.hashes[first : first + _MOST_PAGES])
        if session is None or not hashes:
            return
        parent = sequence.hashes[first - 1] if first else None
        tokens = b"".join(sequence.page_tokens(first + number) for number in range(len(hashes)))
        self._tails[session] = _Tail(first, parent, hashes, tokens)
        self._tails.move_to_end(session)
        if len(self._tails) > _SESSIONS:
            self._tails.popitem(last=False)

    def dead(self, sequence: Sequence) -> tuple[bytes, ...]:
        """Pages of its session's last turn that an admitted request goes past without them, in order.

        Another conversation of that session, such as a subagent's, has another prompt and says nothing.
        """
        session = sequence.request.session_id
        tail = None if session is None else self._tails.get(session)
        if tail is None or session is None or len(sequence.hashes) < tail.first:
            return ()
        if tail.first and sequence.hashes[tail.first - 1] != tail.parent:
            return ()
        del self._tails[session]
        start = tail.first * _PAGE_BYTES
        old = tail.tokens
        new = sequence.request.prompt[start : start + len(old)]
        common = min(len(old), len(new))
        if old[:common] == new[:common]:
            return ()
        for number in range(len(tail.hashes)):
            page = slice(number * _PAGE_BYTES, min((number + 1) * _PAGE_BYTES, common))
            if old[page] != new[page]:
                return tail.hashes[number:]
        return ()
