"""The scheduler: from requests to step plans, and from step results to outputs.

There are no phases. Each step serves running decodes first, then prompts (or what is left of them) in order of urgency
under what remains of the token budget; a waiting request is admitted only when its turn to compute has come. Pages are
taken for all known tokens at admission, then one by one while decoding.

`schedule` may be called again before earlier results are read. See `lifecycle` for what that means for rows and pages,
and `admission`, `holding`, `pacing` and `preemption` for the policies.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from longturn.config import PAGE_TOKENS, CacheConfig, SchedulerConfig
from longturn.engine.holding import recall
from longturn.engine.kv_events import CacheEvents
from longturn.engine.launched import Launched, check_answer
from longturn.engine.leap import Stretch, Taken, move_on, stretch_of
from longturn.engine.lifecycle import Requests
from longturn.engine.pacing import MIN_CHUNK_TOKENS, Allowance
from longturn.engine.preemption import make_room
from longturn.engine.prompts import StepDraft, schedule_prompts
from longturn.engine.protocols import ExecutorInfo
from longturn.engine.records import (
    EngineRequest,
    EngineStats,
    FinishReason,
    RequestOutput,
    RowResult,
    StepPlan,
    StepResult,
    decode_output,
    decode_work,
)
from longturn.engine.sequence import Sequence, State
from longturn.engine.tier_copies import apply_copies
from longturn.engine.watching import check_launched, check_requests, plan_line, stats_of

_RUNNING, _ENDED = State.RUNNING, State.ENDED
"""Looked up once: a member of an enumeration is slow to find, and each row of a step asks."""
_BLANK_SHARE = 16
"""At most this part of the pool is kept blank."""


class Scheduler:
    """Decides what every step computes. Not thread-safe: the engine loop owns it."""

    def __init__(
        self,
        info: ExecutorInfo,
        scheduler: SchedulerConfig,
        cache: CacheConfig,
        events: Callable[[str], None] | None = None,
        cache_events: CacheEvents | None = None,
    ) -> None:
        """
        Args:
            events: receives one line for everything that happens; two runs are equal if their lines are.
            cache_events: collects what becomes of cached pages.

        Raises:
            ConfigError: a setting is out of range.
        """
        self.requests = Requests(info, scheduler, cache, events, cache_events)
        self.step_time = self.requests.step_time
        self._events = events
        self._step_tokens = scheduler.step_tokens
        self._chunk_tokens = scheduler.chunk_tokens
        self._target_ns = scheduler.target_itl_ms * 1e6
        self._decode_tokens = max(1, math.ceil(scheduler.decode_share * scheduler.step_tokens))
        """Decode rows that prompts cannot push out of a step."""
        self._blank_pages = min(
            self.requests.pool.capacity // _BLANK_SHARE, -(-scheduler.step_tokens // PAGE_TOKENS) + info.rows
        )
        """With a host tier: pages that a step should find blank, since it waits for the copy of those it evicts."""
        self._launched: dict[int, Launched] = {}
        self._step_id = 0
        self._steps = 0
        self._generated_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended, holds pages still, or has outputs that were not taken."""
        return self.requests.live or bool(self.requests.outputs)

    def add(self, request: EngineRequest, now_ns: int) -> None:
        """Queue a request.

        Raises:
            RequestError: it is malformed, its id is in use, or it could never fit.
            OverloadedError: `max_waiting` requests wait already beyond those that there are rows for.
        """
        self.requests.add(request, now_ns)

    def abort(self, request_id: str, now_ns: int) -> bool:
        """End a request wherever it stands, with an ABORT output. False if there is no such request (any more)."""
        return self.requests.abort(request_id, now_ns)

    def clear_cache(self) -> int:
        """Forget all cached pages; the number of pages that were known. Requests keep those that they hold."""
        return self.requests.clear_cache()

    def take_outputs(self) -> tuple[RequestOutput, ...]:
        """Outputs since the last call."""
        outputs = tuple(self.requests.outputs)
        self.requests.outputs.clear()
        return outputs

    # --- plans ------------------------------------------------------------------------------------------------------

    def schedule(self, now_ns: int) -> StepPlan | None:
        """The next step, or None if nothing can be computed before an earlier result is read."""
        requests = self.requests
        if requests.waiting.held:
            recall(requests, now_ns)
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        short_of_page = 0
        for sequence in requests.running:
            known = sequence.known
            if known >= sequence.limit or sequence.arriving:
                continue  # its last token is being sampled, or its pages are not here yet
            if known - sequence.scheduled == 1 and sequence.announced:
                decodes.append(sequence)
                if sequence.scheduled >= sequence.page_end:
                    short_of_page += 1
            else:
                prefills.append(sequence)
        if short_of_page > requests.pool.free:
            make_room(requests, decodes, prefills, short_of_page, now_ns)
        prompts = len(prefills) > 0 or requests.may_admit()
        quota = max(self._decode_tokens, self._step_tokens - MIN_CHUNK_TOKENS) if prompts else self._step_tokens
        if len(decodes) > quota:
            decodes.sort(key=lambda s: s.last_step)  # take turns
            del decodes[quota:]

        step = StepDraft(self._step_id + 1, now_ns)
        if short_of_page:
            decodes = [sequence for sequence in decodes if self._has_page(sequence, step)]
        step_id, sequences = step.step_id, decodes
        step.work = work = decode_work([s.row for s in decodes], [s.scheduled for s in decodes])
        step.sequences = decodes
        for sequence in decodes:
            sequence.scheduled += 1
            sequence.known += 1
            sequence.in_flight += 1
            sequence.last_step = step_id
        count = len(work)
        launched = Launched(sequences, count, 0, 0.0)
        if prompts:
            allowance = self._allowance(count)
            schedule_prompts(requests, allowance, prefills, step)
            launched = Launched(sequences, count, allowance.spent_tokens, allowance.pairs)
        host = requests.pool.host
        saves: tuple[tuple[int, int], ...] = ()
        loads: tuple[tuple[int, int], ...] = ()
        if host is not None:
            if work:
                requests.pool.keep_blank(self._blank_pages, now_ns)
            elif not host.orders and (self._launched or not host.loading):
                return None
            saves, loads = host.take_orders()
            if not work:
                launched = launched._replace(awaited=next(reversed(host.loading.items()), None))
        elif not work:
            return None
        freed, copied = tuple(requests.freed_rows), tuple(requests.copied_pages)
        plan = StepPlan(step_id, tuple(work), tuple(step.new_rows), tuple(step.new_pages), freed, copied, saves, loads)
        requests.freed_rows.clear()
        requests.copied_pages.clear()
        self._step_id = step_id
        self._launched[step_id] = launched
        if self._events is not None:
            self._events(plan_line(plan, now_ns))
        return plan

    def _has_page(self, sequence: Sequence, step: StepDraft) -> bool:
        """Whether there is a page for what `sequence` decodes next; takes one if it must.

        Without one it sits out until a preempted request's pages have come back.
        """
        if sequence.scheduled >= sequence.page_end:
            page = self.requests.grow(sequence, step.now_ns)
            if page is None:
                return False
            step.new_pages.append((sequence.row, (page.id,)))
        return True

    def _allowance(self, decodes: int) -> Allowance:
        """What prompts may take of a step that has `decodes` decode rows."""
        if decodes == 0:
            return Allowance(self.step_time, self._step_tokens, None, self._chunk_tokens)
        tokens = min(self._step_tokens - decodes, max(self._step_tokens - self._decode_tokens, 1))
        budget_ns = self._target_ns - self.step_time.decode_ns if self._target_ns > 0 else None
        return Allowance(self.step_time, tokens, budget_ns, self._chunk_tokens)

    # --- results ----------------------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult, now_ns: int) -> None:
        """Apply the result of a launched plan. Results come in the order of launch.

        Raises:
            ResultMismatch: the result does not belong to the plan; nothing has been applied.
        """
        requests = self.requests
        awaited = self._launched[plan.step_id].awaited
        if awaited is not None or result.loaded_pages or result.lost_pages or result.lost_slots:
            # Before anything can be wrong with the rest: what a result says of copies is said once.
            apply_copies(requests, plan.step_id, awaited, result, now_ns)
        check_answer(plan, result)
        launched = self._launched.pop(plan.step_id)
        self._steps += 1
        if plan.work:
            self.step_time.observe(result.elapsed_ns, launched.decodes, launched.prefill_tokens, launched.prefill_pairs)
        results, scores = iter(result.rows), iter(result.scores)
        for item, sequence in zip(plan.work, launched.sequences, strict=True):
            sequence.in_flight -= 1
            sequence.computed = computed = item.start + item.count
            if item.scores:
                found = next(scores)
                if sequence.state is not _ENDED:
                    requests.score(sequence, item.start, found.logprobs)
            if item.samples:
                row_result = next(results)
                if sequence.state is not _ENDED:
                    self._apply(sequence, row_result, now_ns)
            if computed >= sequence.register_at and requests.caching:
                requests.register_pages(sequence)
            if sequence.state is not _RUNNING:
                requests.settle(sequence, now_ns)

    def _apply(self, sequence: Sequence, result: RowResult, now_ns: int) -> None:
        """Append a sampled token to its request, or end the request."""
        token_ids = result.token_ids
        if result.error is not None or len(token_ids) != 1:
            error = result.error or f"executor sampled {len(token_ids)} tokens where one was asked for"
            self.requests.end(sequence, FinishReason.ERROR, now_ns, error=error)
            return
        token = token_ids[0]
        generated = sequence.generated
        count = len(generated)
        if token in sequence.stop_ids and count >= sequence.min_tokens:
            self.requests.end(sequence, FinishReason.STOP, now_ns, stop_token_id=token)
            return
        if not count:
            sequence.first_token_ns = now_ns
        generated.append(token)
        self._generated_tokens += 1
        if sequence.prompt_tokens + count + 1 >= sequence.limit:
            self.requests.end(sequence, FinishReason.LENGTH, now_ns, token_ids, result.logprobs)
            return
        cached, preemptions = sequence.cached_tokens, sequence.preemptions
        output = decode_output(sequence.request_id, token_ids, result.logprobs, cached, preemptions)
        self.requests.outputs.append(output)

    def fail(self, plan: StepPlan, message: str, now_ns: int) -> None:
        """The executor failed on a launched plan: its requests end with ERROR, saying `message`."""
        for sequence in self._launched.pop(plan.step_id).sequences:
            sequence.in_flight -= 1
            if sequence.state is not State.ENDED:
                self.requests.end(sequence, FinishReason.ERROR, now_ns, error=message)
            self.requests.settle(sequence, now_ns)

    # --- several turns at once --------------------------------------------------------------------------------------

    def stretch(self, plan: StepPlan, busy_pages: int) -> Stretch | None:
        """Turns ahead that are alike, see `leap.stretch_of`; None also if someone listens to every event."""
        if self._events is not None:
            return None
        return stretch_of(self.requests, plan, self._launched[plan.step_id], self._blank_pages, busy_pages)

    def leap(self, stretch: Stretch, elapsed_ns: list[int], turn_ns: list[int]) -> tuple[StepPlan, list[Taken]]:
        """Be what turns of a stretch, at these times, leave: results applied that took `elapsed_ns`, one step launched.

        Returns:
            That step, and what the turns give the executor beside the work.
        """
        turns, rows = len(turn_ns), len(stretch.sequences)
        taken = move_on(self.requests, stretch, turn_ns, self._blank_pages)
        for ns in elapsed_ns:
            self.step_time.observe(ns, rows, 0, 0.0)
        plan = stretch.plan_after(turns)
        self._launched[plan.step_id] = self._launched.pop(stretch.plan.step_id)
        self._step_id = plan.step_id
        self._steps += turns
        self._generated_tokens += turns * rows
        return plan, taken

    # --- watching ---------------------------------------------------------------------------------------------------

    def stats(self, busy_ns: int = 0, leak_faults: int = 0) -> EngineStats:
        """Gauges and counters now, with two that the loop counts."""
        made = self._generated_tokens
        return stats_of(
            self.requests, steps=self._steps, generated_tokens=made, busy_ns=busy_ns, leak_faults=leak_faults
        )

    def check(self) -> None:
        """Raises RuntimeError if pages, rows or states do not add up."""
        check_requests(self.requests)
        check_launched(self.requests, [launched.sequences for launched in self._launched.values()])
