"""Which prompts a step computes, and how much of each: the most urgent first, under what the step allows them."""

from __future__ import annotations

from dataclasses import dataclass, field

from longturn.config import PAGE_TOKENS
from longturn.engine.holding import hold
from longturn.engine.lifecycle import Requests
from longturn.engine.pacing import Allowance
from longturn.engine.records import NewRow, RequestOutput, RowWork
from longturn.engine.sequence import Sequence

_MOST_DEFERRED = 64
"""Requests waiting for others' pages that one step looks past."""


@dataclass(slots=True)
class StepDraft:
    """A step while it is put together."""

    step_id: int
    now_ns: int
    work: list[RowWork] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    """Of each work item."""
    new_rows: list[NewRow] = field(default_factory=list)
    new_pages: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)


def schedule_prompts(requests: Requests, allowance: Allowance, prefills: list[Sequence], step: StepDraft) -> None:
    """Spend `allowance` on running and waiting prompts, the most urgent first.

    Args:
        requests: admits those that wait.
        allowance: what prompts may take of the step.
        prefills: running requests with a prompt, or the rest of one, to compute; used up.
        step: gets the work.
    """
    for sequence in prefills:
        # The minimum keeps an urgency that was inherited from a request waiting for this one's pages.
        sequence.score = min(sequence.score, requests.order.urgency(sequence, sequence.known - sequence.scheduled))
    prefills.sort(key=lambda s: (s.score, s.number), reverse=True)
    deferred: list[Sequence] = []
    blocked = not requests.may_admit()
    scores = False
    while allowance.open:
        waiting = None if blocked or len(deferred) >= _MOST_DEFERRED else requests.waiting.first()
        if prefills and (waiting is None or prefills[-1].score <= waiting.score):
            sequence = prefills.pop()
        elif waiting is None:
            break
        elif requests.order.must_wait_for_pages(waiting):
            deferred.append(requests.waiting.pop())
            continue
        elif hold(requests, waiting, step.now_ns):
            continue
        else:
            if not requests.admit(waiting, step.now_ns):
                # Strictly in order: smaller requests behind this one could go on taking what it waits for.
                blocked = True
                continue
            if waiting.arriving:
                continue  # its turn comes when its pages have
            sequence = waiting
        if not sequence.scores:
            _schedule(requests, allowance, sequence, step)
        elif not scores:
            # One page of one prompt a step: logits of all its positions are hundreds of times what others need.
            scores = True
            _schedule(requests, allowance, sequence, step, most=PAGE_TOKENS)
    for sequence in deferred:
        requests.waiting.push(sequence)


def _schedule(
    requests: Requests, allowance: Allowance, sequence: Sequence, step: StepDraft, most: int | None = None
) -> None:
    """Put the next part of a prompt into the step, `most` tokens of it at most."""
    first = sequence.cached_tokens < 0
    if not sequence.announced:
        step.new_rows.append(requests.new_row(sequence, step.now_ns))
    start = sequence.scheduled
    left = sequence.known - start
    count = allowance.take(start, left if most is None else min(left, most), PAGE_TOKENS)
    scores = most is not None and start < sequence.prompt_tokens - 1
    step.work.append(RowWork(sequence.row, start, count, count == left, scores))
    step.sequences.append(sequence)
    sequence.scheduled = start + count
    sequence.known += count == left
    sequence.in_flight += 1
    sequence.last_step = step.step_id
    if first and count < left:
        # Its first token may be minutes away; how much was cached is known now.
        requests.outputs.append(RequestOutput(sequence.request_id, cached_tokens=sequence.cached_tokens))
