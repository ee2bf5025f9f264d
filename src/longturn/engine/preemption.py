"""Which running request gives way when decodes need pages and none is free.

The least urgent, and of those the one that is cheapest to bring back: the fewest tokens to compute again, counting what
of it stays in the prefix cache. The request that arrived first is never chosen, so that some request always runs to its
end and every shortage passes. Why it does not thrash: a preempted request is admitted again only if its tokens *and*
the output expected of all running requests fit (`Requests.admit`), which is false in the shortage that it was preempted
for.
"""

from __future__ import annotations

from collections.abc import Iterable

from longturn.config import PAGE_TOKENS
from longturn.engine.lifecycle import Requests
from longturn.engine.sequence import Sequence


def private_pages(sequence: Sequence) -> int:
    """Pages that come free when `sequence` gives its pages back."""
    return sum(page.refs == 1 for page in sequence.pages)


def cost_to_resume(sequence: Sequence, taken_pages: int) -> int:
    """Tokens to compute again if `sequence` is preempted now and `taken_pages` of its pages are overwritten meanwhile.

    Pages that other requests hold stay. Of its own, those without a name in the cache are taken first, then the tail.
    """
    shared = named = nameless = 0
    for page in sequence.pages:
        if page.refs > 1:
            shared += 1
        elif page.hash is None:
            nameless += 1
        else:
            named += 1
    kept = shared + max(0, named - max(0, taken_pages - nameless))
    return max(0, sequence.known - kept * PAGE_TOKENS)


def choose_victim(running: Iterable[Sequence], taken_pages: int) -> Sequence | None:
    """The request to preempt, or None if nobody's pages would help.

    The least urgent ones by `EngineRequest.priority` come first. Among equals, the one preempted least often, then the
    youngest.

    Args:
        taken_pages: pages that the others are expected to take before the victim comes back.
    """
    candidates = sorted(running, key=lambda s: s.number)[1:]
    helpful = [s for s in candidates if private_pages(s) > 0]
    if not helpful:
        return None
    # One with a priority loses what it has computed only when nobody less urgent is left.
    return min(
        helpful,
        key=lambda s: (-s.request.priority, cost_to_resume(s, taken_pages), s.preemptions, -s.number),
    )


def make_room(requests: Requests, decodes: list[Sequence], prefills: list[Sequence], wanted: int, now_ns: int) -> None:
    """Preempt until `wanted` pages are free, or will be when launched steps have been read.

    Args:
        requests: all of them.
        decodes: running requests that are about to decode; those that are preempted are taken out.
        prefills: running requests that are about to compute more of a prompt; likewise.
        wanted: pages that `decodes` need.
        now_ns: the time.
    """
    coming = requests.pool.free + sum(map(private_pages, requests.draining))
    while wanted > coming:
        taken = wanted - coming + requests.expected.reserved(requests.running)
        victim = choose_victim(requests.running, taken)
        if victim is None:
            return
        coming += private_pages(victim)
        if victim in decodes:
            decodes.remove(victim)
            wanted -= victim.scheduled >= victim.page_end
        elif victim in prefills:
            prefills.remove(victim)
        requests.preempt(victim, now_ns)
