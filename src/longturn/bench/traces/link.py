"""Who waits for whom: from agents with recorded times to conversations with pauses, spawns and joins.

The recorded times decide. A child starts after the last answer of its parent that was complete when it started, and the
first request that the parent sent after the child's end waits for it. So what overlapped in the recording may overlap
in a replay, and what was ordered stays ordered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from longturn.bench.traces.tree import Conversation, Kind, TraceRequest

CLOCK_SLACK_S = 1.0
"""Captures write start times in whole seconds beside durations in hundredths, so that an order is known to this."""


@dataclass(frozen=True, slots=True)
class Agent:
    """A conversation before its place among the others is known."""

    id: str
    kind: Kind
    requests: tuple[TraceRequest, ...]
    parent: int | None = None
    """Index in the list of agents."""
    system_tokens: int = 0
    label: str = ""


def link(agents: Sequence[Agent]) -> tuple[Conversation, ...]:
    """Conversations of one session, with pauses and joins.

    Args:
        agents: the root first, parents before their children, each with at least one request in sending order.
    """
    made: list[Conversation] = []
    for agent in agents:
        requests = agent.requests
        spawn = join = None
        since_s = 0.0
        if agent.parent is not None:
            parent = agents[agent.parent].requests
            spawn = _spawn(parent, requests[0].start_s)
            join = _join(parent, spawn, max(request.end_s for request in requests))
            since_s = 0.0 if spawn is None else parent[spawn].end_s
        timed = []
        for request in requests:
            timed.append(dataclasses.replace(request, gap_s=max(0.0, request.start_s - since_s)))
            since_s = request.end_s
        made.append(
            Conversation(
                agent.id, agent.kind, tuple(timed), agent.parent, spawn, join, agent.system_tokens, agent.label
            )
        )
    return tuple(made)


def _spawn(parent: Sequence[TraceRequest], start_s: float) -> int | None:
    """The parent's last request that had been answered when the child started."""
    found = None
    for index, request in enumerate(parent):
        if request.start_s > start_s:
            break
        if request.end_s <= start_s + CLOCK_SLACK_S:
            found = index
    return found


def _join(parent: Sequence[TraceRequest], spawn: int | None, end_s: float) -> int | None:
    """The parent's first request that was sent after the child's end."""
    first = 0 if spawn is None else spawn + 1
    for index in range(first, len(parent)):
        if parent[index].start_s >= end_s - CLOCK_SLACK_S:
            return index
    return None
