"""The one form that every trace format is read into: a tree of the conversations of one session.

A conversation is a sequence of requests of one agent, each sent after the answer to the one before. Its first request
is sent after request `spawn_after` of its parent; the parent's request `join_before` waits until the child has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from longturn.bench.traces.blocks import BlockTrie

Kind = Literal["root", "subagent", "aux", "reduction", "worker", "solo"]
"""`root` and `subagent` are recorded as such; the others were found in a flattened capture (`traces.split`)."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request."""

    place: str
    """Where it lies in its file: `requests[16].requests[2]` or `line 12`."""
    start_s: float
    """When it was sent, seconds on the session's clock."""
    duration_s: float | None
    """Time that the recorded server took; None where the capture lacks it."""
    input_tokens: int
    output_tokens: int
    node: int
    """Last hashed block in the tree's `trie`; tokens after it are not hashed and never shared."""
    model: str = ""
    gap_s: float = 0.0
    """Recorded pause before it: from the end of the conversation's previous answer, of the answer that it was spawned
    after, or from the session's start. Where that end is unknown the pause is counted from the request's start."""

    @property
    def end_s(self) -> float:
        """When its answer was complete; its start where the capture lacks the duration."""
        return self.start_s + (self.duration_s or 0.0)


@dataclass(frozen=True, slots=True)
class Conversation:
    """The requests of one agent."""

    id: str
    kind: Kind
    requests: tuple[TraceRequest, ...]
    """At least one, in the order in which they were sent."""
    parent: int | None = None
    """Index of the parent in the tree's `conversations`; None for the root."""
    spawn_after: int | None = None
    """Index of the parent's request whose answer started this agent; None: it starts with the session."""
    join_before: int | None = None
    """Index of the parent's request that waits for this agent's end; None: nothing waits (a background agent)."""
    system_tokens: int = 0
    """Recorded length of tools and system prompt at the start of its prompts; 0 where the capture lacks it."""
    label: str = ""
    """The kind of subagent, as recorded (`Explore`)."""

    @property
    def start_s(self) -> float:
        return self.requests[0].start_s

    @property
    def end_s(self) -> float:
        return max(request.end_s for request in self.requests)


@dataclass(frozen=True, slots=True)
class SessionTree:
    """One recorded session: a root agent and everything it started."""

    id: str
    source: str
    """The file it was read from."""
    namespace: str
    """Block ids mean the same in trees of equal namespace; these share one `trie`."""
    block_tokens: int
    """Tokens in one hashed block."""
    trie: BlockTrie
    conversations: tuple[Conversation, ...]
    """The root first; a parent comes before its children."""
    arrival_s: float = 0.0
    """When the session started on the trace's clock; 0 where each session has a clock of its own."""

    @property
    def root(self) -> Conversation:
        return self.conversations[0]

    def requests(self) -> Iterator[TraceRequest]:
        """All requests, conversation by conversation."""
        for conversation in self.conversations:
            yield from conversation.requests

    def children(self, parent: int) -> list[int]:
        """Indices of the conversations that conversation `parent` started."""
        return [index for index, item in enumerate(self.conversations) if item.parent == parent]

    @property
    def span_s(self) -> float:
        """Seconds from the first request's start to the last answer's end."""
        return max(item.end_s for item in self.conversations) - min(item.start_s for item in self.conversations)
