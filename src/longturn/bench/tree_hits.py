"""The hit rate that an unbounded cache of each session tree would reach on the requests of a replay."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from longturn.bench.hit_rate import PromptBlocks, hit_blocks
from longturn.bench.synth import RequestKey
from longturn.bench.traces.tree import SessionTree


def replay_hit_rate(trees: Sequence[SessionTree], keys: Iterable[RequestKey]) -> float | None:
    """Hit blocks over all whole blocks of the requests; None if they have none.

    What was recorded before a request in its tree counts as cached, whether or not this replay sent it: a session that
    starts in its middle is meant to find its past.

    Args:
        trees: the sessions.
        keys: the measured requests that succeeded; one for each time that it was sent.
    """
    by_id = {tree.id: tree for tree in trees}
    known: dict[str, dict[RequestKey, tuple[int, int]]] = {}
    hit = total = 0
    for key in keys:
        if key.tree_id not in known:
            known[key.tree_id] = _hits(by_id[key.tree_id])
        cached, blocks = known[key.tree_id][key]
        hit += cached
        total += blocks
    return hit / total if total else None


def _hits(tree: SessionTree) -> dict[RequestKey, tuple[int, int]]:
    """For each request (hit blocks, blocks)."""
    order = sorted(
        (request.start_s, number, index)
        for number, conversation in enumerate(tree.conversations)
        for index, request in enumerate(conversation.requests)
    )
    nodes = [tree.conversations[number].requests[index].node for _, number, index in order]
    hits = hit_blocks(PromptBlocks(tree.id, tree.trie.ids(node)) for node in nodes)
    return {
        RequestKey(tree.id, number, index): (cached, tree.trie.depth(node))
        for (_, number, index), cached, node in zip(order, hits, nodes, strict=True)
    }
