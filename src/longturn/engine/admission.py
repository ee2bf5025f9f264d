"""Who comes next among prompts, and how much output an admission reserves pages for.

Order. A waiting prompt counts as half as long for every `ageing_ms` it has waited, and the shortest goes first. Taking
the logarithm, every prompt's length falls by the same amount in the same time, so the order between two prompts never
changes and one number made at arrival settles it:

    urgency = arrived / ageing + log2(tokens to compute) + priority

The bound that follows: a prompt of R tokens is overtaken only by prompts of r tokens that arrive less than
ageing * log2(R / r) after it (plus one ageing time for each step of priority): 8.5 s for 142,000 tokens against
single tokens at the default 500 ms. Everything that arrives later waits behind it.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable

from longturn.config import PAGE_TOKENS
from longturn.engine.pool import PagePool
from longturn.engine.sequence import Sequence, State, pages_for

_EXPECTED_WEIGHT = 0.1


def urgency(arrived_ns: int, tokens: int, priority: int, ageing_ns: int) -> float:
    """Order of a prompt with `tokens` left to compute; the least comes first. `ageing_ns` 0 is order of arrival."""
    if ageing_ns <= 0:
        return float(arrived_ns)
    return arrived_ns / ageing_ns + math.log2(max(1, tokens)) + priority


class WaitingQueue:
    """Requests without a row, in order of urgency, and those that were set aside, in the order in which they were.
    Requests that ended while waiting fall out when they are met."""

    __slots__ = ("_heap", "_length", "held")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []
        self.held: deque[Sequence] = deque()
        """Those set aside; some may have ended."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, sequence: Sequence) -> None:
        heapq.heappush(self._heap, (sequence.score, sequence.number, sequence))
        self._length += 1

    def first(self) -> Sequence | None:
        """The most urgent request, which stays."""
        while self._heap:
            sequence = self._heap[0][2]
            if sequence.state is State.WAITING:
                return sequence
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Sequence:
        """Take out the request that `first` showed."""
        self._length -= 1
        return heapq.heappop(self._heap)[2]

    def drop(self) -> None:
        """A waiting request has ended; its entry is skipped from now on."""
        self._length -= 1
        # Many aborts under a blocked head must not pile up.
        if len(self._heap) + len(self.held) > 64 + 2 * self._length:
            self._heap = [entry for entry in self._heap if entry[2].state is State.WAITING]
            heapq.heapify(self._heap)
            self.held = deque(sequence for sequence in self.held if sequence.state is State.WAITING)

    def set_aside(self) -> None:
        """The request that `first` showed waits on and is not in others' way."""
        self.held.append(heapq.heappop(self._heap)[2])

    def aside(self) -> Sequence | None:
        """Of those set aside the first."""
        while self.held and self.held[0].state is not State.WAITING:
            self.held.popleft()
        return self.held[0] if self.held else None

    def take_back(self) -> Sequence:
        """The request that `aside` showed is in order of urgency again."""
        sequence = self.held.popleft()
        heapq.heappush(self._heap, (sequence.score, sequence.number, sequence))
        return sequence


class ExpectedOutput:
    """Mean output length of recent requests: what admission reserves for, instead of `max_tokens`.

    Agents ask for tens of thousands of tokens and write some hundred; reserving the maximum would leave rows empty.
    Where the mean is wrong, preemption pays for it.
    """

    __slots__ = ("tokens",)

    def __init__(self, tokens: float) -> None:
        self.tokens = tokens

    def observe(self, output_tokens: int) -> None:
        """A request ended by itself after `output_tokens`."""
        self.tokens += _EXPECTED_WEIGHT * (output_tokens - self.tokens)

    def pages(self, sequence: Sequence) -> int:
        """Pages that `sequence` is expected to need in all.

        One that has outrun the mean is expected to go on for a page more.
        """
        remaining = max(int(self.tokens) - len(sequence.generated), PAGE_TOKENS)
        # The token at the limit is sampled but never computed, hence the - 1.
        return pages_for(min(sequence.limit - 1, sequence.seen + remaining))

    def reserved(self, running: Iterable[Sequence]) -> int:
        """Pages that `running` requests are expected to take beyond those they hold."""
        return sum(max(0, self.pages(sequence) - len(sequence.pages)) for sequence in running)


class ComputingPages:
    """Prompt pages that running requests are about to compute, by hash.

    When a fleet of agents starts on one system prompt, one of them computes it and the others wait for its pages
    instead of computing the same thing beside it.
    """

    __slots__ = ("_owners",)

    def __init__(self) -> None:
        self._owners: dict[bytes, Sequence] = {}

    def __len__(self) -> int:
        return len(self._owners)

    def owner(self, page_hash: bytes) -> Sequence | None:
        """The request that will have computed this page, if it has not yet."""
        owner = self._owners.get(page_hash)
        if owner is None or owner.state is not State.RUNNING:
            return None
        return owner

    def add(self, sequence: Sequence, first_page: int) -> None:
        """`sequence` starts to compute its pages from `first_page` on."""
        for page_hash in sequence.hashes[first_page:]:
            self._owners.setdefault(page_hash, sequence)

    def remove(self, sequence: Sequence, first_page: int, end_page: int) -> None:
        """Pages `first_page .. end_page-1` of `sequence` are computed, or never will be."""
        owners = self._owners
        if not owners:
            return
        for page_hash in sequence.hashes[first_page:end_page]:
            if owners.get(page_hash) is sequence:
                del owners[page_hash]


class PromptOrder:
    """Scores of prompts, and which of them wait for pages that a running one computes."""

    __slots__ = ("_ageing_ns", "_caching", "_pool", "computing")

    def __init__(self, pool: PagePool, ageing_ns: int, *, caching: bool) -> None:
        """`caching`: prompts find pages in `pool`."""
        self._pool = pool
        self._ageing_ns = ageing_ns
        self._caching = caching
        self.computing = ComputingPages()

    def urgency(self, sequence: Sequence, tokens: int) -> float:
        """Place of `sequence` among prompts if it has `tokens` left to compute."""
        return urgency(sequence.arrived_ns, tokens, sequence.request.priority, self._ageing_ns)

    def place(self, sequence: Sequence) -> None:
        """Score a request that is about to wait, by what is cached of it now."""
        if self._caching:
            sequence.expected_hit = self._pool.cached_prefix(sequence.hashes, sequence.hit_limit)
        sequence.score = self.urgency(sequence, sequence.seen - sequence.expected_hit * PAGE_TOKENS)

    def must_wait_for_pages(self, sequence: Sequence) -> bool:
        """Whether the next page that a waiting `sequence` needs is being computed by a running request.

        The running request inherits the urgency, so that waiting for it is never worse than going first.
        """
        computing = self.computing
        if not self._caching or len(computing) == 0:
            return False
        hashes = sequence.hashes
        most = min(sequence.hit_limit, len(hashes))
        if sequence.expected_hit >= most or computing.owner(hashes[sequence.expected_hit]) is None:
            sequence.expected_hit = self._pool.cached_prefix(hashes, most)
            if sequence.expected_hit >= most:
                return False
        owner = computing.owner(hashes[sequence.expected_hit])
        if owner is None:
            return False
        owner.score = min(owner.score, sequence.score)
        return True
