"""Turns that have lost their pages are held aside while others run, and called back when it is their time.

`returns` says whose time it is; this is where the waiting queue hears of it.
"""

from __future__ import annotations

from longturn.engine.lifecycle import Requests
from longturn.engine.sequence import Sequence


def hold(requests: Requests, sequence: Sequence, now_ns: int) -> bool:
    """Set the first waiting request aside if it has lost too much of what was cached of its session to be computed
    now, see `Returns`; whether it was."""
    returns = requests.returns
    if not requests.caching or returns.exempt(sequence):
        return False
    if (returns.open(now_ns) or not requests.running) and not returns.busy and requests.waiting.aside() is None:
        return False
    if not returns.missing(sequence, requests.pool.cached_prefix(sequence.hashes, sequence.hit_limit)):
        return False
    requests.log(now_ns, "hold", sequence)
    requests.waiting.set_aside()
    return True


def recall(requests: Requests, now_ns: int) -> None:
    """Let the first held turn go on if it is time, if nothing runs, or if it has waited for very long."""
    returns = requests.returns
    held = requests.waiting.aside()
    if held is None or returns.busy:
        return
    if returns.open(now_ns) or not requests.running or returns.overdue(held, now_ns):
        returns.recall(requests.waiting.take_back())
        requests.log(now_ns, "recall", held)
