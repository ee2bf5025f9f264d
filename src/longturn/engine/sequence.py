"""One request's state inside the scheduler.

Three positions tell where a request stands; run-ahead is nothing but their difference:

    computed   K/V exist up to here and the host has seen the step's result
    scheduled  K/V will exist up to here once every launched step is done
    known      tokens that exist, or that a launched step samples

`known - scheduled` is what is left to compute: a prompt, the rest of one, one decoded token, or everything again after
a preemption. There are no phases.
"""

from __future__ import annotations

from array import array
from enum import IntEnum

from longturn.config import PAGE_TOKENS
from longturn.engine.hashing import next_page_hash
from longturn.engine.kv_events import CacheEvents
from longturn.engine.pages import Page
from longturn.engine.pool import PagePool
from longturn.engine.records import EngineRequest, RequestTimes, pack_tokens

_TOKEN_BYTES = 4
_PAGE_BYTES = _TOKEN_BYTES * PAGE_TOKENS
_NEVER = 1 << 62


class State(IntEnum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    """Gets no more work; its pages come back when the launched steps that refer to it have been read."""
    ENDED = 3


def pages_for(tokens: int) -> int:
    """Pages that hold `tokens` positions."""
    return -(-tokens // PAGE_TOKENS)


class Sequence:
    """A request and where it stands. Mutable, and touched by the scheduler alone."""

    __slots__ = (
        "announced",
        "arrived_ns",
        "arriving",
        "cached_tokens",
        "computed",
        "expected_hit",
        "failed",
        "first_token_ns",
        "generated",
        "hashes",
        "host_hits",
        "in_flight",
        "known",
        "last_step",
        "limit",
        "min_tokens",
        "number",
        "page_end",
        "pages",
        "preemptions",
        "prompt_tokens",
        "register_at",
        "request",
        "request_id",
        "row",
        "scheduled",
        "scheduled_ns",
        "score",
        "scored",
        "state",
        "stop_ids",
    )

    def __init__(self, request: EngineRequest, prompt_tokens: int, limit: int, number: int, now_ns: int) -> None:
        """
        Args:
            limit: most tokens of prompt and output together.
            number: position in the order of arrival.
        """
        self.request = request
        self.request_id = request.request_id
        self.prompt_tokens = prompt_tokens
        self.limit = limit
        self.number = number
        self.arrived_ns = now_ns
        self.scheduled_ns = 0
        self.first_token_ns = 0
        self.state = State.WAITING
        self.score = 0.0
        """Order among prompts that want to be computed, see `admission.urgency`; the least comes first."""
        self.generated = array("i")
        """Output tokens that the host has seen."""
        self.known = prompt_tokens
        self.scheduled = 0
        self.computed = 0
        self.in_flight = 0
        """Launched and unread steps that refer to this request's row."""
        self.last_step = 0
        self.row = -1
        self.announced = False
        """The executor knows of the row."""
        self.arriving = 0
        """Of `pages`, those on their way from host memory; there is nothing to compute before they are here."""
        self.host_hits = 0
        """Of `pages`, those that were found in host memory."""
        self.pages: list[Page] = []
        self.page_end = 0
        """Positions that `pages` can hold."""
        self.hashes = list(request.page_hashes)
        self.register_at = PAGE_TOKENS
        """Positions computed at which the next page is complete and goes into the prefix cache."""
        self.expected_hit = 0
        """Pages of cached prefix at the last look."""
        self.cached_tokens = -1
        """Prompt tokens from the prefix cache at the first admission; -1 before it."""
        self.preemptions = 0
        self.failed = False
        """Ended with ERROR: what it computed is not to be reused."""
        self.scored = 0 if request.sampling.prompt_logprobs is not None else prompt_tokens
        """Positions whose following prompt token has been given out with its log-probability; where a request does not
        ask for them, all."""
        self.stop_ids = frozenset(request.sampling.stop_token_ids)
        self.min_tokens = request.sampling.min_tokens

    @property
    def seen(self) -> int:
        """Tokens that the host knows: prompt and returned output."""
        return self.prompt_tokens + len(self.generated)

    @property
    def scores(self) -> bool:
        """Log-probabilities of the prompt are wanted still: nothing of it is taken from the cache."""
        return self.scored < self.prompt_tokens - 1

    @property
    def hit_limit(self) -> int:
        """Most pages a prefix hit may have: the last known token is computed again, for its logits, and a page that
        other requests may share is never written to."""
        return 0 if self.scores else (self.seen - 1) // PAGE_TOKENS

    def tokens(self) -> bytes:
        """Prompt and returned output, int32 little-endian."""
        return self.request.prompt + pack_tokens(self.generated) if self.generated else self.request.prompt

    def times(self, now_ns: int) -> RequestTimes:
        return RequestTimes(self.arrived_ns, self.scheduled_ns, self.first_token_ns, now_ns)

    def start(self, hits: list[Page], fresh: list[Page], row: int) -> None:
        """Hold `row` and these pages; the first `hits` are filled, or being filled from host memory."""
        filled = len(hits) * PAGE_TOKENS
        self.state = State.RUNNING
        self.row = row
        self.pages = hits + fresh
        self.page_end = len(self.pages) * PAGE_TOKENS
        self.known = self.seen
        self.scheduled = self.computed = filled
        self.register_at = filled + PAGE_TOKENS

    def stop(self) -> list[Page]:
        """Give up row and pages; returns the pages, in order."""
        pages, self.pages = self.pages, []
        self.row = -1
        self.announced = False
        self.page_end = self.scheduled = self.computed = 0
        self.known = self.seen
        return pages

    def register_pages(self, pool: PagePool) -> None:
        """Enter pages that `computed` has completed into the prefix cache.

        Call it once a result has been read: a page of a launched step holds nothing yet if that step fails.
        """
        if self.failed:
            return
        complete = min(self.computed, self.seen)
        while self.register_at <= complete:
            index = self.register_at // PAGE_TOKENS - 1
            if index == len(self.hashes) and self.request.hash_key:
                parent = self.hashes[-1] if self.hashes else None
                self.hashes.append(next_page_hash(parent, self.page_tokens(index), self.request.hash_key))
            if index >= len(self.hashes):
                self.register_at = _NEVER  # no key to go on with: nothing after this page can be named
                return
            pool.put(self.pages[index], self.hashes[index])
            self.register_at += PAGE_TOKENS

    def page_tokens(self, index: int) -> bytes:
        """Token ids of a complete page, int32 little-endian."""
        begin = index * PAGE_TOKENS
        from_prompt = self.request.prompt[index * _PAGE_BYTES : (index + 1) * _PAGE_BYTES]
        if len(from_prompt) == _PAGE_BYTES:
            return from_prompt
        first = max(0, begin - self.prompt_tokens)
        return from_prompt + pack_tokens(self.generated[first : begin + PAGE_TOKENS - self.prompt_tokens])


def tell_stored(events: CacheEvents, sequence: Sequence, first: int) -> None:
    """Tell of the pages of `sequence` from `first` on that became findable. Equal content that another request had
    computed before is known under that one's page."""
    run: list[tuple[bytes, bytes]] = []
    end = min(min(sequence.computed, sequence.seen) // PAGE_TOKENS, len(sequence.hashes))
    for index in range(first, end + 1):
        if index < end and sequence.pages[index].hash == sequence.hashes[index]:
            run.append((sequence.hashes[index], sequence.page_tokens(index)))
        elif run:
            start = index - len(run)
            events.stored(sequence.hashes[start - 1] if start else None, run)
            run = []
