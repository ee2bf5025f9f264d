"""Several turns of the loop at once, where each would do the same: for a simulation, whose clock is moved by hand.

While requests decode and nobody comes or ends, a turn launches a step of the same rows one position on, and reads the
one before. Nothing is decided in it but where a row's next page comes from. Whoever knows how long the steps take can
find out how far this goes (`Engine.stretch`), let time pass, and make the engine what it would be (`Engine.leap`): the
same positions, pages, counters and step times, as a test holds against an engine that took every turn.

Here is what becomes of the requests; scheduler and loop move their own counters.
"""

from __future__ import annotations

import math
from array import array
from typing import NamedTuple

from longturn.config import PAGE_TOKENS
from longturn.engine.launched import Launched
from longturn.engine.lifecycle import Requests
from longturn.engine.records import StepPlan, decode_work
from longturn.engine.sequence import Sequence

_TOKEN_BYTES = array("i").itemsize


class Stretch(NamedTuple):
    """Turns that are alike."""

    plan: StepPlan
    """On its way now; the first turn reads it."""
    sequences: list[Sequence]
    """Whose rows decode, in the order of the plan's work."""
    turns: int
    """How many at most."""
    until_ns: float
    """A turn at or after this time may be another one: a turn that is held aside may be recalled."""

    @property
    def request_ids(self) -> list[str]:
        return [sequence.request_id for sequence in self.sequences]

    def plan_after(self, turns: int) -> StepPlan:
        """The step that is on its way after this many turns."""
        rows = [sequence.row for sequence in self.sequences]
        return StepPlan(self.plan.step_id + turns, tuple(decode_work(rows, [w.start + turns for w in self.plan.work])))


class Taken(NamedTuple):
    """What a turn of a stretch gives the executor beside the same work again."""

    number: int
    """Of the turn, from 0."""
    new_pages: tuple[tuple[int, tuple[int, ...]], ...]
    """As `StepPlan.new_pages`."""
    save_pages: tuple[tuple[int, int], ...]
    """As `StepPlan.save_pages`."""


def stretch_of(
    requests: Requests, plan: StepPlan, launched: Launched, blank_pages: int, busy_pages: int
) -> Stretch | None:
    """The turns that lie ahead if nobody calls the engine otherwise; None if the next one is not of that kind.

    Args:
        requests: of one scheduler.
        plan: the only step on its way; if all requests decode in it, they fit into the next one as well.
        launched: what the scheduler remembers of it.
        blank_pages: that a step should find, with a host tier.
        busy_pages: pages whose copy to host memory is on its way.

    No turn of a stretch makes a step wait for a copy: pages are taken that were blank before it.
    """
    running, pool = requests.running, requests.pool
    if not running or launched.prefill_tokens or launched.decodes != len(running) or launched.sequences != running:
        return None
    if requests.draining or requests.outputs or requests.freed_rows or requests.copied_pages or requests.may_admit():
        return None
    host = pool.host
    blank = pool.free - pool.cached
    if host is not None and (host.orders or host.loading or (blank < blank_pages and pool.cached)):
        return None
    turns = PAGE_TOKENS  # so that no row takes more than one page
    before_page = turns
    for sequence in running:
        if sequence.known - sequence.scheduled != 1 or sequence.in_flight != 1 or not sequence.generated:
            return None
        if sequence.stop_ids or sequence.arriving or sequence.request.sampling.logprobs is not None:
            return None
        turns = min(turns, sequence.limit - sequence.known)
        before_page = min(before_page, sequence.page_end - sequence.scheduled)
    takeable = pool.free if host is None else min(pool.free, blank - busy_pages)
    if len(running) > takeable:
        turns = min(turns, before_page)
    if turns < 1:
        return None
    return Stretch(plan, list(running), turns, _recall_ns(requests))


def move_on(requests: Requests, stretch: Stretch, turn_ns: list[int], blank_pages: int) -> list[Taken]:
    """Make the requests of a stretch what they are after turns at these times; what the executor is given in them.

    All rows sample token 0 in all of them.
    """
    turns = len(turn_ns)
    tokens = array("i", bytes(_TOKEN_BYTES * turns))
    for sequence in stretch.sequences:
        sequence.generated.extend(tokens)
    taken = _pages(requests, stretch.sequences, turn_ns, blank_pages)
    for sequence in stretch.sequences:
        sequence.scheduled += turns
        sequence.known += turns
        sequence.last_step = stretch.plan.step_id + turns
    return taken


def _pages(requests: Requests, sequences: list[Sequence], turn_ns: list[int], blank_pages: int) -> list[Taken]:
    """Take the pages that rows reach in turns at these times, and make findable those that are full.

    One turn after the other: what is evicted, and to where, depends on what was known before.
    """
    turns = len(turn_ns)
    short: dict[int, list[Sequence]] = {}
    full: dict[int, list[Sequence]] = {}
    for sequence in sequences:
        short.setdefault(sequence.page_end - sequence.scheduled, []).append(sequence)
        if requests.caching:
            full.setdefault(sequence.register_at - sequence.computed - 1, []).append(sequence)
    taken = []
    begun = [sequence.computed for sequence in sequences]
    for turn in sorted(number for number in {*short, *full} if number < turns):
        if turn in short:
            taken.append(_taken(requests, short[turn], turn, turn_ns[turn], blank_pages))
        for sequence in full.get(turn, ()):
            sequence.computed += turn + 1
            requests.register_pages(sequence)
    for sequence, computed in zip(sequences, begun, strict=True):
        sequence.computed = computed + turns
    return taken


def _taken(requests: Requests, sequences: list[Sequence], turn: int, now_ns: int, blank_pages: int) -> Taken:
    """A page for each of these requests."""
    new_pages = []
    for sequence in sequences:
        page = requests.grow(sequence, now_ns)
        if page is None:
            raise RuntimeError("a stretch of decode steps was promised pages that are not there")
        new_pages.append((sequence.row, (page.id,)))
    saves: tuple[tuple[int, int], ...] = ()
    pool = requests.pool
    if pool.host is not None:
        pool.keep_blank(blank_pages, now_ns)
        saves, _ = pool.host.take_orders()
    return Taken(turn, tuple(new_pages), saves)


def _recall_ns(requests: Requests) -> float:
    """When a turn that is held aside may be recalled at the earliest, if nothing else happens."""
    held = requests.waiting.aside() if requests.waiting.held else None
    if held is None or requests.returns.busy:
        return math.inf
    return requests.returns.recall_ns(held)
