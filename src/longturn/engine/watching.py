"""What the scheduler shows of itself: figures, and whether rows, pages and states add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from longturn.engine.lifecycle import Requests
from longturn.engine.records import EngineStats, StepPlan
from longturn.engine.sequence import Sequence, State


def stats_of(requests: Requests, *, steps: int, generated_tokens: int, busy_ns: int, leak_faults: int) -> EngineStats:
    """Gauges and counters now.

    Args:
        requests: whose figures.
        steps: results that were applied.
        generated_tokens: of all requests.
        busy_ns: time with a step on its way.
        leak_faults: how often something did not add up.
    """
    pool = requests.pool
    slots, held, offloaded, loaded = (0, 0, 0, 0) if pool.host is None else pool.host.counts
    return EngineStats(
        running=len(requests.running),
        waiting=len(requests.waiting),
        pages_total=pool.capacity,
        pages_used=pool.used,
        pages_cached=pool.cached,
        steps=steps,
        prompt_tokens=requests.prompt_tokens,
        cached_tokens=requests.cached_tokens,
        generated_tokens=generated_tokens,
        preemptions=requests.preemptions,
        evictions=pool.evictions,
        aborts=requests.aborts,
        leak_faults=leak_faults,
        busy_ns=busy_ns,
        host_pages_total=slots,
        host_pages_cached=held,
        offloaded_pages=offloaded,
        loaded_pages=loaded,
        host_hit_tokens=requests.host_hit_tokens,
    )


def plan_line(plan: StepPlan, now_ns: int) -> str:
    """What a listener for events is told of a plan that was made at `now_ns`."""
    rows = [(row.row, row.request_id, len(row.tokens) // 4, row.pages) for row in plan.new_rows]
    items = [(item.row, item.start, item.count, item.samples) for item in plan.work]
    copies = f" saves {plan.save_pages} loads {plan.load_pages}" if plan.save_pages or plan.load_pages else ""
    pages, freed = list(plan.new_pages), plan.freed_rows
    return f"{now_ns} plan {plan.step_id} {items} rows {rows} pages {pages} freed {freed}{copies}"


def check_requests(requests: Requests) -> None:
    """Compare rows, pages and states with each other. Raises RuntimeError, naming the first thing that is off."""
    holders = requests.running + requests.draining
    requests.pool.check(Counter(page.id for sequence in holders for page in sequence.pages))
    rows = [sequence.row for sequence in holders]
    if sorted(rows + requests.free_rows) != list(range(requests.rows)):
        raise RuntimeError(f"rows do not add up: held {sorted(rows)}, free {sorted(requests.free_rows)}")
    waiting = sum(sequence.state is State.WAITING for sequence in requests.by_id.values())
    if waiting != len(requests.waiting):
        raise RuntimeError(f"{waiting} requests wait, the queue counts {len(requests.waiting)}")
    never = sum(sequence.cached_tokens < 0 for sequence in requests.by_id.values())
    if never != requests.never_admitted:
        raise RuntimeError(f"{never} requests were never admitted, counted {requests.never_admitted}")
    if any(sequence.state is not State.RUNNING for sequence in requests.running):
        raise RuntimeError("a request that does not run is in the running list")
    if any(s.state < State.PREEMPTED or not (s.in_flight or s.arriving) for s in requests.draining):
        raise RuntimeError("a request drains though nothing refers to it")
    requests.arriving.check(holders, () if requests.pool.host is None else requests.pool.host.loading)
    if not holders and len(requests.order.computing):
        raise RuntimeError(f"{len(requests.order.computing)} pages are said to be computed by nobody")


def check_launched(requests: Requests, launched: Iterable[Iterable[Sequence]]) -> None:
    """Compare the requests with the steps on their way, each given by the requests that it refers to.

    Raises RuntimeError if a request counts other ones.
    """
    flying = Counter(sequence.number for sequences in launched for sequence in sequences)
    for sequence in requests.running + requests.draining:
        if sequence.in_flight != flying.pop(sequence.number, 0):
            raise RuntimeError(f"request {sequence.request_id} miscounts the launched steps that refer to it")
    if flying:
        raise RuntimeError(f"{len(flying)} requests were released while launched steps refer to them")
