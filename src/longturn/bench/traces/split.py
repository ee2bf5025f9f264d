"""Find the agents in a flattened capture.

Recorders that see only HTTP write parallel agents into one list. What tells them apart is the prompt: an agent's next
prompt starts with its last one. For every request, in the order in which they were sent:

- chain: it extends the whole last prompt of an agent, after that agent's answer, with the same model: its next turn;
- seam: it keeps only a first part of an agent's last prompt, and nobody ever uses the dropped part again: the agent
  compacted or edited its history, and goes on;
- otherwise it is the first request of a new agent, a child of the agent whose prompt it shares most with.

The rules are those of the field's agentic replay benchmark. Its numeric limits are not published; those here are ours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from longturn.bench.traces.blocks import NO_BLOCKS, BlockTrie
from longturn.bench.traces.tree import Kind, TraceRequest

AUX_MAX_REQUESTS = 3
"""A side call (a title, a check, a summary) has at most this many requests."""
AUX_MAX_INPUT_TOKENS = 8192
"""A fresh context of the same model is a side call up to this length."""
REDUCTION_MIN_INPUT_TOKENS = 8192
REDUCTION_INPUT_PER_OUTPUT = 16
"""A reduction reads at least this many tokens for each one that it writes."""
GROUP_MIN_OVERLAP = 3
"""Agents forked at the same block are a worker group where this many run at once."""


@dataclass(frozen=True, slots=True)
class Strand:
    """The requests of one agent among those of a flattened list."""

    requests: tuple[TraceRequest, ...]
    kind: Kind
    parent: int | None
    """Index among the strands; None for the main one, which is the first."""
    group: int | None = None
    """Number of the worker group, for `kind` worker."""


@dataclass(slots=True)
class _Open:
    """An agent while the list is read."""

    requests: list[TraceRequest]
    parent: int | None
    fork: int
    """Node up to which it shared its first prompt with its parent."""
    tail: TraceRequest = field(init=False)

    def __post_init__(self) -> None:
        self.tail = self.requests[-1]


def split_agents(requests: Sequence[TraceRequest], trie: BlockTrie) -> list[Strand]:
    """Agents of one flattened list, the main one first: that with the most requests.

    Args:
        requests: at least one, ordered by start.
    """
    touched = _last_touched(requests, trie)
    strands: list[_Open] = []
    for index, request in enumerate(requests):
        found = _continues(strands, request, index, trie, touched)
        if found is not None:
            found.requests.append(request)
            found.tail = request
            continue
        parent, fork = _most_shared(strands, request, trie)
        strands.append(_Open([request], parent, fork))
    return _finish(strands, trie)


def _last_touched(requests: Sequence[TraceRequest], trie: BlockTrie) -> dict[int, int]:
    """For each block, the last request that holds it."""
    touched: dict[int, int] = {}
    for index in range(len(requests) - 1, -1, -1):
        node = requests[index].node
        while node != NO_BLOCKS and node not in touched:  # what is before a touched block is touched
            touched[node] = index
            node = trie.parent(node)
    return touched


def _continues(
    strands: Sequence[_Open], request: TraceRequest, index: int, trie: BlockTrie, touched: dict[int, int]
) -> _Open | None:
    """The agent whose next turn this request is."""
    chain: tuple[int, float, _Open] | None = None
    seam: tuple[int, float, _Open] | None = None
    for strand in strands:
        tail = strand.tail
        if tail.model != request.model or tail.end_s > request.start_s:
            continue
        common = trie.common(tail.node, request.node)
        depth = trie.depth(common)
        rank = (depth, tail.end_s, strand)
        if common == tail.node:
            if chain is None or rank[:2] > chain[:2]:
                chain = rank
            continue
        if depth > 0 and touched[trie.ancestor(tail.node, depth + 1)] < index and (seam is None or rank[:2] > seam[:2]):
            seam = rank
    best = chain if chain is not None else seam
    return None if best is None else best[2]


def _most_shared(strands: Sequence[_Open], request: TraceRequest, trie: BlockTrie) -> tuple[int | None, int]:
    """The agent that shares the longest prompt with a new one, the earliest of equals, and up to which block."""
    parent: int | None = None
    fork = NO_BLOCKS
    for number, strand in enumerate(strands):
        # The fork may lie in an earlier prompt than the last one: the agent may have compacted since.
        for earlier in reversed(strand.requests):
            common = trie.common(earlier.node, request.node)
            if parent is None or trie.depth(common) > trie.depth(fork):
                parent, fork = number, common
            if common != NO_BLOCKS:
                break
    return parent, fork


def _finish(strands: list[_Open], trie: BlockTrie) -> list[Strand]:
    main = max(range(len(strands)), key=lambda number: (len(strands[number].requests), -number))
    order = [main, *(number for number in range(len(strands)) if number != main)]
    place = {number: index for index, number in enumerate(order)}
    groups = _groups(strands, main)
    made = []
    for number in order:
        strand = strands[number]
        if number == main:
            made.append(Strand(tuple(strand.requests), "root", None))
            continue
        # A call before the main agent's first (a title, say) has no parent in time: it hangs from the main agent.
        parent = main if strand.parent is None else strand.parent
        kind, group = _kind(strand, strands[parent], groups.get(number))
        made.append(Strand(tuple(strand.requests), kind, place[parent], group))
    return made


def _kind(strand: _Open, parent: _Open, group: int | None) -> tuple[Kind, int | None]:
    requests = strand.requests
    if len(requests) <= AUX_MAX_REQUESTS:
        fresh = strand.fork == NO_BLOCKS and max(item.input_tokens for item in requests) <= AUX_MAX_INPUT_TOKENS
        if fresh or requests[0].model != parent.requests[0].model:
            return "aux", None
        if (
            all(
                item.input_tokens >= max(REDUCTION_MIN_INPUT_TOKENS, REDUCTION_INPUT_PER_OUTPUT * item.output_tokens)
                for item in requests
            )
            and group is None
        ):
            return "reduction", None
    return ("solo", None) if group is None else ("worker", group)


def _groups(strands: Sequence[_Open], main: int) -> dict[int, int]:
    """Worker groups: number of the strand -> number of its group, from 0."""
    forks: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, strand in enumerate(strands):
        if number != main and strand.parent is not None and strand.fork != NO_BLOCKS:
            forks[strand.parent, strand.fork].append(number)
    found: dict[int, int] = {}
    count = 0
    for (parent, _), members in forks.items():
        spans = [(strands[number].requests[0].start_s, strands[number].tail.end_s) for number in members]
        # The first worker looks like the parent's own next turn, so the parent's request counts where it runs beside.
        begin, end = min(span[0] for span in spans), max(span[1] for span in spans)
        spans += [(r.start_s, r.end_s) for r in strands[parent].requests if r.start_s < end and r.end_s > begin]
        if _most_at_once(spans) >= GROUP_MIN_OVERLAP:
            found.update(dict.fromkeys(members, count))
            count += 1
    return found


def _most_at_once(spans: Sequence[tuple[float, float]]) -> int:
    edges = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    alive = most = 0
    for _, change in edges:  # at one time ends sort before starts
        alive += change
        most = max(most, alive)
    return most
