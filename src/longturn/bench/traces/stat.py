"""What is in a trace, as pure functions over session trees."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from longturn.bench.hit_rate import HitRate, hit_rate
from longturn.bench.metrics import Distribution, distribution
from longturn.bench.traces.timeline import agent_spans, alive_over_time, levels, request_spans
from longturn.bench.traces.tree import SessionTree


@dataclass(frozen=True, slots=True)
class Level:
    """How long exactly `count` were alive at once."""

    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SessionStat:
    """One session tree."""

    id: str
    source: str
    turns: int
    """Requests of the root agent."""
    requests: int
    """Requests of all agents."""
    agents: dict[str, int]
    """Conversations by kind, root included."""
    input_tokens: int
    output_tokens: int
    max_context_tokens: int
    """Largest input and output of one request together."""
    span_s: float
    hit: HitRate
    """With a cache of its own, which starts empty."""
    most_agents: int
    """Most conversations alive at once, from first request to last answer."""
    most_requests: int
    """Most requests in flight at once."""


@dataclass(frozen=True, slots=True)
class TraceStat:
    """All sessions together."""

    sessions: tuple[SessionStat, ...]
    requests: int
    agents: dict[str, int]
    block_tokens: tuple[int, ...]
    """Block sizes that occur."""
    without_duration: int
    """Requests whose recorded server time is missing."""
    turns: Distribution
    """Requests of a root agent."""
    input_tokens: Distribution
    output_tokens: Distribution
    gap_s: Distribution | None
    """Pauses before requests, those that start a session left out; None if there are none."""
    span_s: Distribution
    hit: HitRate
    """Of one cache for all; sessions of one namespace share blocks, in order of arrival."""
    agents_alive: tuple[Level, ...]
    """Within sessions, summed over them: time with 0, 1, 2, ... agents alive."""
    requests_alive: tuple[Level, ...]
    """The same for requests in flight."""


def _spread(values: Sequence[float]) -> Distribution:
    found = distribution(values)
    if found is None:
        raise ValueError("a trace without requests has no distributions")
    return found


def session_stat(tree: SessionTree) -> SessionStat:
    """One session alone."""
    requests = list(tree.requests())
    return SessionStat(
        id=tree.id,
        source=tree.source,
        turns=len(tree.root.requests),
        requests=len(requests),
        agents=dict(Counter(item.kind for item in tree.conversations)),
        input_tokens=sum(item.input_tokens for item in requests),
        output_tokens=sum(item.output_tokens for item in requests),
        max_context_tokens=max(item.input_tokens + item.output_tokens for item in requests),
        span_s=tree.span_s,
        hit=hit_rate([tree]),
        most_agents=max((alive for _, alive in alive_over_time(agent_spans(tree))), default=0),
        most_requests=max((alive for _, alive in alive_over_time(request_spans(tree))), default=0),
    )


def trace_stat(trees: Sequence[SessionTree]) -> TraceStat:
    """Everything about some sessions.

    Args:
        trees: at least one.
    """
    requests = [request for tree in trees for request in tree.requests()]
    gaps = [
        request.gap_s
        for tree in trees
        for conversation in tree.conversations
        for request in conversation.requests[1 if conversation.spawn_after is None else 0 :]
    ]
    agents: dict[int, float] = defaultdict(float)
    flights: dict[int, float] = defaultdict(float)
    for tree in trees:
        for total, spans in ((agents, agent_spans(tree)), (flights, request_spans(tree))):
            for count, seconds in levels(alive_over_time(spans)).items():
                total[count] += seconds
    return TraceStat(
        sessions=tuple(session_stat(tree) for tree in trees),
        requests=len(requests),
        agents=dict(Counter(item.kind for tree in trees for item in tree.conversations)),
        block_tokens=tuple(sorted({tree.block_tokens for tree in trees})),
        without_duration=sum(item.duration_s is None for item in requests),
        turns=_spread([len(tree.root.requests) for tree in trees]),
        input_tokens=_spread([item.input_tokens for item in requests]),
        output_tokens=_spread([item.output_tokens for item in requests]),
        gap_s=distribution(gaps),
        span_s=_spread([tree.span_s for tree in trees]),
        hit=hit_rate(trees),
        agents_alive=_levels(agents),
        requests_alive=_levels(flights),
    )


def _levels(found: Mapping[int, float]) -> tuple[Level, ...]:
    return tuple(Level(count, seconds) for count, seconds in sorted(found.items()) if seconds > 0)
