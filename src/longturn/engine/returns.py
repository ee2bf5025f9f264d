"""Sessions that come back and find their pages evicted: how many compute them again at once, and which wait.

When more sessions take turns than the pool holds, every turn computes its whole prompt again, and evicts for it what
the next turn is about to ask for. Which pages go makes little difference then: in simulations a choice that knew when
each session would return brought some percent. Fewer sessions taking turns at a time bring several times as many turns.

The rule. Once a session computes again, for a time c, what was evicted of it, the next one that wants to is held for
c / share from there, or until nothing runs; after a quiet time the first few pass. Meanwhile the others take their
turns out of the cache. Held turns go on one by one in the order in which they were held, and none passes them that has
to be held itself: so the n-th waits at most for c / share of each before it, and for room. After five minutes it waits
for those before it alone, and the device is never idle because of it. Neither held nor counted are turns that find
nearly all of their pages, first turns, requests without a session, those with a priority below 0 and those that were
preempted.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from longturn.config import PAGE_TOKENS
from longturn.engine.pacing import StepTimeModel
from longturn.engine.sequence import Sequence, State

_PROMPTS = 4096
"""Prompts of sessions that are remembered, by one hash each."""
_QUIET = 2
"""After a quiet time of that many pauses one more turn may follow at once for each: a session now and then that finds
nothing is no sign of too many."""
_LONGEST_NS = 300_000_000_000
"""A turn that has waited for so long is not held any longer than those before it: clients give up after ten minutes."""
_MOST_LOST = 16
"""A turn that has lost at most this part of its prompt is not held."""


class Returns:
    """What sessions have had in the cache, and when the next of them may compute it again."""

    __slots__ = ("_chunk_tokens", "_known", "_open_ns", "_recalled", "_share", "_step_time")

    def __init__(self, share: float, step_time: StepTimeModel, chunk_tokens: int) -> None:
        """
        Args:
            share: of the time, for computing again what was evicted; 1: no turn is held, 0: each until nothing runs.
            step_time: says what prompts cost.
            chunk_tokens: a prompt's tokens in one step.
        """
        self._share = share
        self._step_time = step_time
        self._chunk_tokens = chunk_tokens
        self._known: OrderedDict[bytes, None] = OrderedDict()
        """Hashes near the ends of prompts that were computed, of requests of sessions."""
        self._open_ns = -math.inf
        """From here on nothing is held."""
        self._recalled: Sequence | None = None
        """The turn that was held and may go on."""

    def ended(self, sequence: Sequence) -> None:
        """A request has ended; if it has output, its prompt was computed."""
        pages = sequence.prompt_tokens // PAGE_TOKENS
        if self._share >= 1.0 or sequence.request.session_id is None or not sequence.generated:
            return
        if not 0 < pages <= len(sequence.hashes):
            return
        # Not the last page: templates write the few tokens at a prompt's end differently when it has been answered.
        known = sequence.hashes[max(0, pages - 2)]
        self._known[known] = None
        self._known.move_to_end(known)
        if len(self._known) > _PROMPTS:
            self._known.popitem(last=False)

    def lost(self, sequence: Sequence, hits: int) -> int:
        """Pages after the first `hits` of a prompt that sessions had computed and that are not cached any more."""
        known, hashes = self._known, sequence.hashes
        for index in range(min(sequence.hit_limit, len(hashes)) - 1, hits - 1, -1):
            if hashes[index] in known:
                return index + 1 - hits
        return 0

    def open(self, now_ns: int) -> bool:
        """Whether a session may compute again what it has lost, as far as the time goes."""
        return now_ns >= self._open_ns

    def overdue(self, held: Sequence, now_ns: int) -> bool:
        """Whether the first held turn may go on because it has waited so long."""
        return now_ns - held.arrived_ns >= _LONGEST_NS

    def recall_ns(self, held: Sequence) -> float:
        """From when on the first held turn may go on while others run, if none is admitted before."""
        return min(self._open_ns, held.arrived_ns + _LONGEST_NS)

    def exempt(self, sequence: Sequence) -> bool:
        """Whether a waiting request is not held, whatever it has lost."""
        return sequence is self._recalled or not self._counts(sequence)

    def _counts(self, sequence: Sequence) -> bool:
        request = sequence.request
        return (
            self._share < 1.0
            and request.session_id is not None
            and request.priority >= 0
            and not sequence.preemptions
            and not sequence.scores
        )

    def missing(self, sequence: Sequence, hits: int) -> int:
        """The same as `lost` of a request of which it counts, and is enough to be held; else 0."""
        lost = self.lost(sequence, hits) if self._counts(sequence) else 0
        return lost if lost * _MOST_LOST * PAGE_TOKENS > sequence.prompt_tokens else 0

    @property
    def busy(self) -> bool:
        """A turn was recalled and has not been admitted."""
        return self._recalled is not None and self._recalled.state is State.WAITING

    def recall(self, sequence: Sequence) -> None:
        """A held turn may go on; the next one not before it has."""
        self._recalled = sequence

    def admitted(self, sequence: Sequence, hits: int, now_ns: int) -> None:
        """A request has been admitted and has found `hits` pages of its prompt."""
        lost = self.missing(sequence, hits) * PAGE_TOKENS
        if not lost:
            return
        if self._share <= 0.0:
            self._open_ns = math.inf
            return
        steps = -(-lost // self._chunk_tokens)
        cost_ns = self._step_time.chunk_ns(hits * PAGE_TOKENS, lost) + steps * self._step_time.fixed_ns
        # A pause from now at most, not the sum: those held do not pay for what was admitted because nothing ran.
        pause_ns = cost_ns / self._share
        after_ns = max(self._open_ns, now_ns - _QUIET * pause_ns) + pause_ns
        self._open_ns = max(self._open_ns, min(after_ns, now_ns + pause_ns))
