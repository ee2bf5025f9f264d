"""The hit rate that an unbounded cache of each session tree would reach on the requests of a replay."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace

from longturn.bench.hit_rate import PromptHit, prompt_hits, total
from longturn.bench.synth import RequestKey
from longturn.bench.traces.tree import SessionTree


def replay_hit_rate(
    trees: Sequence[SessionTree], keys: Iterable[RequestKey], prefixes: Iterable[int] = ()
) -> float | None:
    """Hit blocks over all whole blocks of the requests; None if they have none.

    Each tree has a cache of its own, as the markers of a replay have it. What was recorded before a request in its
    tree counts as cached, whether or not this replay sent it: a session that starts in its middle is meant to find
    its past.

    Args:
        trees: the sessions.
        keys: the measured requests that succeeded; one for each time that it was sent.
        prefixes: for each of them how many tokens at its start the server had computed or written, where answers are
            carried over (`bodies.Prompt.prefix_tokens`): whole blocks of them count if they are more than recorded.
    """
    by_id = {tree.id: tree for tree in trees}
    known: dict[str, dict[RequestKey, PromptHit]] = {}

    def hit(key: RequestKey, prefix_tokens: int) -> PromptHit:
        if key.tree_id not in known:
            hits = prompt_hits([by_id[key.tree_id]])
            known[key.tree_id] = {RequestKey(one.tree_id, one.conversation, one.index): one for one in hits}
        found = known[key.tree_id][key]
        live = min(found.blocks, prefix_tokens // by_id[key.tree_id].block_tokens)
        return replace(found, hit_blocks=max(found.hit_blocks, live))

    return total(map(hit, keys, itertools.chain(prefixes, itertools.repeat(0)))).by_blocks
