"""What a step's result says of copies between device and host memory, and whose turn it is for it."""

from __future__ import annotations

from longturn.engine.launched import ResultMismatch
from longturn.engine.lifecycle import Requests
from longturn.engine.records import StepResult
from longturn.engine.sequence import State


def apply_copies(
    requests: Requests, step_id: int, awaited: tuple[int, bytes] | None, result: StepResult, now_ns: int
) -> None:
    """Apply what the result of a step says of copies; `awaited` as in `Launched`.

    Raises:
        ResultMismatch: it reports a copy that was not ordered, or none though it was to; the others have been applied.
    """
    host = requests.pool.host
    loading = {} if host is None else host.loading  # of later plans too, of which this result may know nothing
    waited = awaited is not None and loading.get(awaited[0]) == awaited[1]
    ended = bool(result.loaded_pages or result.lost_pages)
    if (ended or result.lost_slots) and not _copies_ended(requests, result, now_ns):
        raise ResultMismatch(f"step {step_id} was answered with copies that were not ordered")
    if waited and not ended:
        raise ResultMismatch(f"step {step_id} waited for copies and was answered without one")


def _copies_ended(requests: Requests, result: StepResult, now_ns: int) -> bool:
    """Copies between the tiers that an executor reports; False if it reports one that was not ordered."""
    pool = requests.pool
    host = pool.host
    if host is None:
        return False
    right = True
    for slot in result.lost_slots:
        host.lost(slot)
    for page_id in (*result.loaded_pages, *result.lost_pages):
        if page_id not in host.loading:
            right = False
            continue
        lost = page_id in result.lost_pages
        if lost:
            pool.lose(pool.pages[page_id])
        else:
            del host.loading[page_id]
            host.loaded_pages += 1
        for sequence in requests.arriving.arrived(page_id):
            if lost and sequence.state is State.RUNNING:
                # Nothing of it has been computed: it looks again for what is cached, as if it had just come.
                requests.log(now_ns, "lost", sequence)
                requests.drain(sequence, State.PREEMPTED)
            requests.settle(sequence, now_ns)
    return right
