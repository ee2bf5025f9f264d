"""A request's life: waiting, running, perhaps preempted and waiting again, ended.

All moves between these states are here, with the rows and pages that change hands at each. Whatever a launched step
may still touch stays where it is: a request that ends or is preempted keeps its row and pages (it is *draining*) until
the last launched step that refers to it has been read, and its last page has arrived from host memory.
"""

from __future__ import annotations

from collections.abc import Callable

from longturn.config import PAGE_TOKENS, CacheConfig, SchedulerConfig
from longturn.engine.admission import ExpectedOutput, PromptOrder, WaitingQueue
from longturn.engine.arrivals import NO_HITS, Arrivals, find_hits, place_hits
from longturn.engine.branches import Branches
from longturn.engine.kv_events import CacheEvents
from longturn.engine.limits import context_limit, validate_config, validate_request
from longturn.engine.pacing import StepTimeModel
from longturn.engine.pages import Page
from longturn.engine.pool import PagePool
from longturn.engine.protocols import ExecutorInfo
from longturn.engine.records import EngineRequest, FinishReason, NewRow, RequestOutput, TokenLogprobs
from longturn.engine.returns import Returns
from longturn.engine.sequence import Sequence, State, pages_for, tell_stored
from longturn.errors import OverloadedError, RequestError


class Requests:
    """Every request of one executor, the rows and the pages."""

    def __init__(
        self,
        info: ExecutorInfo,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        events: Callable[[str], None] | None = None,
        cache_events: CacheEvents | None = None,
    ) -> None:
        """`cache_events` collects what becomes of cached pages. Raises ConfigError if a setting is out of range."""
        validate_config(scheduler, cache, info)
        self._info = info
        self._max_waiting = scheduler.max_waiting
        self._events = events
        self.caching = cache.prefix_caching
        self._cache_events = cache_events
        on_forget = None if cache_events is None else cache_events.removed
        half_life_ns = int(cache.retention_half_life_s * 1e9)
        host_slots = info.host_pages if cache.prefix_caching else 0
        self.pool = PagePool(info.pages, half_life_ns, on_forget, host_slots=host_slots)
        self.expected = ExpectedOutput(scheduler.expected_output_tokens)
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        """In order of admission."""
        self.draining: list[Sequence] = []
        self.outputs: list[RequestOutput] = []
        """Not taken yet."""
        self.freed_rows: list[int] = []
        """Rows that the executor has not been told about."""
        self.copied_pages: list[tuple[int, int]] = []
        """(from, to): copies that the executor has not been told about."""
        self.rows = min(scheduler.max_running, info.rows)
        self.free_rows = list(range(self.rows - 1, -1, -1))
        self.by_id: dict[str, Sequence] = {}
        self.order = PromptOrder(self.pool, int(scheduler.ageing_ms * 1e6), caching=cache.prefix_caching)
        self.arriving = Arrivals()
        self._branches = Branches()
        self.step_time = StepTimeModel()
        chunk_tokens = scheduler.chunk_tokens or scheduler.step_tokens
        self.returns = Returns(scheduler.recompute_share, self.step_time, chunk_tokens)
        self._blocked: tuple[int, int] | None = None
        self._arrivals = 0
        self.never_admitted = 0
        self.prompt_tokens = self.cached_tokens = self.host_hit_tokens = self.preemptions = self.aborts = 0

    @property
    def live(self) -> bool:
        """Whether any request has not ended, or has ended and still holds pages."""
        return bool(self.by_id or self.draining)

    # --- waiting ----------------------------------------------------------------------------------------------------

    def add(self, request: EngineRequest, now_ns: int) -> None:
        """Queue a request. Raises as `Scheduler.add`."""
        prompt_tokens = validate_request(request, self._info)
        if request.request_id in self.by_id:
            raise RequestError(f"request id '{request.request_id}' is in use", param="request_id")
        if (beyond := self._waiting_beyond_rows()) >= self._max_waiting:
            waiting = "1 request waits" if beyond == 1 else f"{beyond} requests wait"
            raise OverloadedError(
                f"{waiting} already, the most that may; try again later",
                code="too_many_requests",
            )
        limit = min(prompt_tokens + request.sampling.max_tokens, context_limit(self._info))
        sequence = Sequence(request, prompt_tokens, limit, self._arrivals, now_ns)
        self._arrivals += 1
        self.by_id[request.request_id] = sequence
        self.never_admitted += 1
        self._enqueue(sequence)
        self.log(now_ns, "add", sequence)

    def abort(self, request_id: str, now_ns: int) -> bool:
        """End a request wherever it stands; False if there is none of that id."""
        sequence = self.by_id.get(request_id)
        if sequence is None:
            return False
        self.aborts += 1
        self.end(sequence, FinishReason.ABORT, now_ns)
        self.settle(sequence, now_ns)
        return True

    def _waiting_beyond_rows(self) -> int:
        """New requests that wait, less those that rows are there for: of a burst the next step admits as many.

        Rows that free pages cannot fill are no room: while the first in the queue is known not to fit, all count.
        """
        waiting = self.never_admitted
        if waiting < self._max_waiting:
            return waiting
        first = self.waiting.first()
        if first is not None and self._blocked == (first.number, self.pool.releases):
            return waiting
        return min(waiting, len(self.by_id) - self.rows)

    def _enqueue(self, sequence: Sequence) -> None:
        self.order.place(sequence)
        self.waiting.push(sequence)

    def may_admit(self) -> bool:
        """Whether trying to admit the first waiting request could succeed: something has changed since the last try."""
        first = self.waiting.first() if self.free_rows else None
        return first is not None and self._blocked != (first.number, self.pool.releases)

    # --- running ----------------------------------------------------------------------------------------------------

    def admit(self, sequence: Sequence, now_ns: int) -> bool:
        """Give the first waiting request a row and the pages of all its tokens; False if that does not fit now.

        It may be computed once the pages of its prompt that rest in host memory have arrived.
        """
        attempt = (sequence.number, self.pool.releases)
        if not self.free_rows or self._blocked == attempt:
            return False
        pool = self.pool
        # Found before anything is allocated: the copied page may be the very one that is evicted, content in place.
        cached = self.caching and not sequence.scores
        hits = find_hits(pool, sequence, self._info.copies_pages) if cached else NO_HITS
        fresh = pages_for(sequence.seen) - len(hits.shared)
        available = pool.free - sum(page.refs == 0 for page in hits.shared)
        needed = fresh
        if self.running:
            # Expected output of everyone: this is also what keeps a preempted request out of the same shortage.
            # Head-room on top after each preemption saves little recomputing and leaves rows idle.
            needed = self.expected.pages(sequence) - len(hits.shared) + self.expected.reserved(self.running)
        if available < needed:
            self._blocked = attempt
            return False
        self._blocked = None
        self.waiting.pop()
        if self.caching and (dead := self._branches.dead(sequence)):
            pool.unclaim(dead, now_ns)
        pool.share(hits.shared)
        if pool.host is not None:
            pool.host.hold(hits.prefix.slots if hits.last_slot is None else [*hits.prefix.slots, hits.last_slot])
        pages = [page for page in (pool.allocate(now_ns) for _ in range(fresh)) if page is not None]
        if len(pages) != fresh:
            raise RuntimeError(f"page pool promised {fresh} pages and gave {len(pages)}")
        filled, rest = place_hits(pool, hits, pages)
        sequence.start(filled, rest, self.free_rows.pop())
        sequence.host_hits = len(hits.prefix.slots) + (hits.last_slot is not None)
        if hits.last is not None or hits.last_slot is not None:
            sequence.scheduled = sequence.computed = sequence.seen - 1
        if hits.last is not None:
            # Safe though nobody holds `last`: copies come before all writes of their step, and steps run in order.
            self.copied_pages.append((hits.last.id, rest[0].id))
        self.running.append(sequence)
        if self.caching:
            self.order.computing.add(sequence, len(filled))
            self.returns.admitted(sequence, len(filled), now_ns)
        if pool.host is not None and pool.host.loading:
            self.arriving.expect(sequence, pool.host.loading)
        return True

    def new_row(self, sequence: Sequence, now_ns: int) -> NewRow:
        """An admitted `sequence` is computed for the first time: what the executor needs to know of it."""
        sequence.announced = True
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = sequence.scheduled
            sequence.scheduled_ns = now_ns
            self.never_admitted -= 1
            self.prompt_tokens += sequence.prompt_tokens
            self.cached_tokens += sequence.cached_tokens
            self.host_hit_tokens += min(sequence.host_hits * PAGE_TOKENS, sequence.cached_tokens)
        page_ids = tuple(page.id for page in sequence.pages)
        prompt_tokens, sampling = sequence.prompt_tokens, sequence.request.sampling
        return NewRow(sequence.row, sequence.request_id, sequence.tokens(), prompt_tokens, page_ids, sampling)

    def grow(self, sequence: Sequence, now_ns: int) -> Page | None:
        """One more page for a running request, which is returned; None if all are held."""
        page = self.pool.allocate(now_ns)
        if page is not None:
            sequence.pages.append(page)
            sequence.page_end += PAGE_TOKENS
        return page

    def score(self, sequence: Sequence, start: int, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Give out log-probabilities of the prompt tokens that follow the positions from `start` on.

        A request that was preempted computes again what it has given out.
        """
        fresh = logprobs[sequence.scored - start :]
        sequence.scored += len(fresh)
        output = RequestOutput(sequence.request_id, cached_tokens=sequence.cached_tokens, prompt_logprobs=fresh)
        self.outputs.append(output)

    def register_pages(self, sequence: Sequence) -> None:
        """Pages of `sequence` are complete: make them findable."""
        first = sequence.register_at // PAGE_TOKENS - 1
        sequence.register_pages(self.pool)
        self.order.computing.remove(sequence, first, sequence.computed // PAGE_TOKENS)
        if self._cache_events is not None:
            tell_stored(self._cache_events, sequence, first)

    def clear_cache(self) -> int:
        """Forget all cached pages; the number of pages that were known."""
        pages = self.pool.clear_cache()
        if self._cache_events is not None:
            self._cache_events.cleared()
        return pages

    def preempt(self, sequence: Sequence, now_ns: int) -> None:
        """Take a running request's row and pages; it waits again once they have come back."""
        sequence.preemptions += 1
        self.preemptions += 1
        self.log(now_ns, "preempt", sequence)
        self.drain(sequence, State.PREEMPTED)
        self.settle(sequence, now_ns)

    # --- ends -------------------------------------------------------------------------------------------------------

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        now_ns: int,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        stop_token_id: int | None = None,
        error: str | None = None,
    ) -> None:
        """Say that a request has ended. Its row and pages come back with `settle`, which the caller must call."""
        if sequence.cached_tokens < 0:
            self.never_admitted -= 1
        sequence.failed = reason is FinishReason.ERROR
        if reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.expected.observe(len(sequence.generated))
        del self.by_id[sequence.request_id]
        cached, times = max(0, sequence.cached_tokens), sequence.times(now_ns)
        ends = (reason, stop_token_id, cached, times, error, sequence.preemptions)
        self.outputs.append(RequestOutput(sequence.request_id, token_ids, logprobs, *ends))
        self.log(now_ns, reason.value, sequence)
        if sequence.state is State.WAITING:
            self.waiting.drop()
            sequence.state = State.ENDED
        elif sequence.state is State.RUNNING:
            self.drain(sequence, State.ENDED)
        else:
            sequence.state = State.ENDED

    def settle(self, sequence: Sequence, now_ns: int) -> None:
        """Release an ended or preempted request if no launched step refers to it any more."""
        if sequence.in_flight or sequence.arriving or sequence.row < 0 or sequence.state < State.PREEMPTED:
            return
        returns = sequence.state is State.PREEMPTED
        self.draining.remove(sequence)
        self.order.computing.remove(sequence, 0, len(sequence.hashes))
        self.free_rows.append(sequence.row)
        if sequence.announced:
            self.freed_rows.append(sequence.row)
        # Whoever is expected back keeps a claim on the content for a while: a session, a preempted request, or one that
        # is more urgent than others.
        claimed = returns or sequence.request.session_id is not None or sequence.request.priority < 0
        self.log(now_ns, "release", sequence)
        self.pool.release(sequence.stop(), now_ns, claimed, distrust=sequence.failed)
        if self.caching and not returns and not sequence.failed:
            self._branches.ended(sequence)
            self.returns.ended(sequence)
        if returns:
            sequence.state = State.WAITING
            self._enqueue(sequence)

    def drain(self, sequence: Sequence, state: State) -> None:
        """Stop running: row and pages stay until `settle` finds that nothing refers to them."""
        sequence.state = state
        self.running.remove(sequence)
        self.draining.append(sequence)

    def log(self, now_ns: int, what: str, sequence: Sequence) -> None:
        """One line for what happens to a request, if anybody listens."""
        if self._events is not None:
            pages = [page.id for page in sequence.pages]
            self._events(f"{now_ns} {what} {sequence.request_id} row {sequence.row} seen {sequence.seen} pages {pages}")
