"""How much of a trace happens at once."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

from longturn.bench.traces.tree import SessionTree


def alive_over_time(spans: Iterable[tuple[float, float]]) -> list[tuple[float, int]]:
    """How many of the spans are alive, as steps.

    Args:
        spans: (start, end) each.

    Returns:
        (time, number alive from then on), by time; the last number is 0. Spans of no length leave no step.
    """
    changes: dict[float, int] = defaultdict(int)
    for start, end in spans:
        changes[start] += 1
        changes[end] -= 1
    steps: list[tuple[float, int]] = []
    alive = 0
    for at, change in sorted(changes.items()):
        alive += change
        if change or not steps:
            steps.append((at, alive))
    return steps


def levels(steps: Sequence[tuple[float, int]]) -> dict[int, float]:
    """Seconds at each number alive, between the first step and the last."""
    found: dict[int, float] = defaultdict(float)
    for (at, alive), (until, _) in itertools.pairwise(steps):
        found[alive] += until - at
    return dict(found)


def binned(steps: Sequence[tuple[float, int]], bins: int) -> list[float]:
    """Mean number alive in each of `bins` equal parts of the time between first and last step."""
    if len(steps) < 2:
        return [0.0] * bins
    begin, width = steps[0][0], (steps[-1][0] - steps[0][0]) / bins
    totals = [0.0] * bins
    for (at, alive), (until, _) in itertools.pairwise(steps):
        first = min(bins - 1, int((at - begin) / width))
        last = min(bins - 1, int((until - begin) / width))
        for index in range(first, last + 1):
            left, right = begin + index * width, begin + (index + 1) * width
            totals[index] += alive * max(0.0, min(until, right) - max(at, left))
    return [total / width for total in totals]


def arrivals(trees: Sequence[SessionTree], bins: int) -> list[int]:
    """Requests sent in each of `bins` equal parts of the trace's time; for traces with one clock for all sessions."""
    times = [tree.arrival_s + request.start_s for tree in trees for request in tree.requests()]
    begin, width = min(times), (max(times) - min(times)) / bins
    counts = [0] * bins
    for at in times:
        counts[min(bins - 1, int((at - begin) / width)) if width else 0] += 1
    return counts


def request_spans(tree: SessionTree) -> list[tuple[float, float]]:
    """(start, end) of each request with a recorded duration, seconds on the session's clock."""
    return [(item.start_s, item.end_s) for item in tree.requests() if item.duration_s is not None]


def agent_spans(tree: SessionTree) -> list[tuple[float, float]]:
    """(first request's start, last answer's end) of each conversation, seconds on the session's clock."""
    return [(item.start_s, item.end_s) for item in tree.conversations]
