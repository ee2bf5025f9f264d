"""A request on its way through a simulation, and the measured turn that it becomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longturn.bench.agentx import AgentTurn
from longturn.bench.lanes import LiveTree, Send
from longturn.bench.records import Answer, Chunk, TurnRecord
from longturn.bench.synth import RequestKey
from longturn.bench.traces.tree import SessionTree
from longturn.bench.validity import Asked
from longturn.errors import ConfigError
from longturn.simulate.replicas import Replica


@dataclass(slots=True)
class Flight:
    """A request that has been sent."""

    send: Send | None
    """None during warm-up."""
    live: LiveTree
    key: RequestKey
    sent_ns: int
    replica: Replica
    progress: tuple[int, ...]
    """Output tokens after each step that samples for it."""
    first_ns: int = 0
    cached_tokens: int = 0
    steps: int = 0
    """Steps that have sampled for it."""

    @property
    def output_tokens(self) -> int:
        return self.progress[self.steps - 1] if self.steps else 0


def turn_of(flight: Flight, send: Send, origin_ns: int, now_ns: int, error: str | None) -> AgentTurn:
    """The turn of a request that ended at `now_ns`; `origin_ns` is the start of the measurement."""
    live, key = flight.live, flight.key
    conversation = live.tree.conversations[key.conversation]
    input_tokens = conversation.requests[key.index].input_tokens
    ok = error is None
    answer = Answer(
        intended_ns=origin_ns + send.due_ns,
        sent_ns=flight.sent_ns,
        end_ns=now_ns,
        chunks=(Chunk(flight.first_ns, flight.progress[0]),) if flight.steps else (),
        prompt_tokens=input_tokens if ok else None,
        cached_tokens=flight.cached_tokens if ok else None,
        output_tokens=flight.output_tokens if ok else None,
        finish="length" if ok else None,
        error=error,
    )
    record = TurnRecord(live.name, key.index, conversation.label or conversation.kind, send.lane, answer)
    return AgentTurn(record, conversation.id, send, live.marker, Asked(answer, input_tokens, flight.progress[-1]))


def check_timings(trees: Sequence[SessionTree]) -> None:
    """Raises ConfigError for a session whose requests all start at once: its recording has no times to replay."""
    for tree in trees:
        requests = list(tree.requests())
        if len(requests) > 1 and len({request.start_s for request in requests}) == 1:
            raise ConfigError(f"{tree.source}: session {tree.id} has {len(requests)} requests, all at one time")
