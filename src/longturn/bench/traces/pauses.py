"""Pauses of recorded root agents made as long as others that are only described."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from longturn.bench.metrics import percentile
from longturn.bench.traces.tree import Conversation, SessionTree
from longturn.errors import ConfigError

_LEAST_S = 1e-3


def with_pauses(trees: Sequence[SessionTree], median_s: float, p90_s: float) -> list[SessionTree]:
    """Sessions whose root agents pause for `median_s` at the median and `p90_s` at the 90th percentile.

    Each pause becomes a power of itself, times a factor: so longer ones stay longer. Pauses in which subagents were
    waited for stay as they are, and so does everything about other agents but that they start when their parent does.

    Raises:
        ConfigError: not 0 < `median_s` < `p90_s`, or the recorded pauses are all alike.
    """
    if not 0 < median_s < p90_s < float("inf"):
        raise ConfigError(f"pauses must be above 0 and longer at the 90th percentile, not {median_s} and {p90_s} s")
    waits = [_waits(tree) for tree in trees]
    free = [
        max(_LEAST_S, request.gap_s)
        for tree, taken in zip(trees, waits, strict=True)
        for turn, request in enumerate(tree.root.requests)
        if turn and turn not in taken
    ]
    found = (percentile(free, 50), percentile(free, 90)) if free else (0.0, 0.0)
    if found[0] >= found[1]:
        raise ConfigError("the pauses of these sessions are all alike, or there are none")
    power = math.log(p90_s / median_s) / math.log(found[1] / found[0])
    factor = median_s / found[0] ** power
    return [_paused(tree, taken, factor, power) for tree, taken in zip(trees, waits, strict=True)]


def _waits(tree: SessionTree) -> set[int]:
    """Requests of the root that wait for other agents."""
    return {item.join_before for item in tree.conversations if item.parent == 0 and item.join_before is not None}


def _paused(tree: SessionTree, waits: set[int], factor: float, power: float) -> SessionTree:
    moved_s: list[float] = []
    root = []
    shift_s = 0.0
    for turn, request in enumerate(tree.root.requests):
        gap_s = request.gap_s
        if turn and turn not in waits:
            gap_s = factor * max(_LEAST_S, gap_s) ** power
            shift_s += gap_s - request.gap_s
        root.append(dataclasses.replace(request, gap_s=gap_s, start_s=request.start_s + shift_s))
        moved_s.append(shift_s)
    later_s = [0.0]
    others: list[Conversation] = []
    for item in tree.conversations[1:]:
        by_s = later_s[item.parent or 0]
        if item.parent == 0 and item.spawn_after is not None:
            by_s = moved_s[item.spawn_after]
        later_s.append(by_s)
        requests = tuple(dataclasses.replace(one, start_s=one.start_s + by_s) for one in item.requests)
        others.append(dataclasses.replace(item, requests=requests))
    return dataclasses.replace(tree, conversations=(dataclasses.replace(tree.root, requests=tuple(root)), *others))
