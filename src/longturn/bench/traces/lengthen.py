"""Longer sessions of recorded ones: one goes on as another, on top of all that its prompts hold by then.

Corpora that are only described may have sessions of more requests, and with them of longer prompts, than those at
hand. Making every block longer would make the new part of every prompt longer as well, which is what a server has to
compute. So sessions are joined instead: what a request adds to the one before, answers and pauses stay as recorded.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from longturn.bench.traces.blocks import NO_BLOCKS, BlockTrie
from longturn.bench.traces.tree import Conversation, SessionTree, TraceRequest
from longturn.errors import ConfigError


def lengthened(trees: Sequence[SessionTree], turns: float, limit_tokens: int, seed: int) -> list[SessionTree]:
    """Sessions whose root agents have `turns` requests on average.

    Each is joined with the sessions that are nearest to it in number of requests, so that short ones stay short and
    long ones get longest; the one that pauses longest comes first, as long work at a stretch is what makes prompts
    long. How many are joined is the ratio of the means, rounded up for some and down for others.

    Args:
        trees: at least one; a session goes on as those with blocks of its size only.
        turns: requests of a root agent on average; fewer than the sessions have leaves them as they are.
        limit_tokens: where a prompt and its answer would be longer, the session ends instead.
        seed: of who is rounded up, and of the pauses between what is joined.

    Raises:
        ConfigError: `turns` is not above 0.
    """
    if not 0 < turns < float("inf"):
        raise ConfigError(f"requests of a root agent must be more than 0, not {turns}")
    parts = turns * len(trees) / sum(len(tree.root.requests) for tree in trees)
    if parts <= 1:
        return list(trees)
    rng = random.Random(f"lengthen:{seed}")
    pauses = [request.gap_s for tree in trees for request in tree.root.requests[1:]] or [0.0]
    ranked = sorted(range(len(trees)), key=lambda index: (len(trees[index].root.requests), index))
    rank = {index: place for place, index in enumerate(ranked)}
    debt = rng.random()
    made = []
    for index, tree in enumerate(trees):
        debt += parts
        count = int(debt)
        debt -= count
        near = sorted(ranked, key=lambda other: (abs(rank[other] - rank[index]), -rank[other]))
        others = [trees[other] for other in near if other != index and trees[other].block_tokens == tree.block_tokens]
        joined = sorted([tree, *others[: max(0, count - 1)]], key=_mean_pause_s, reverse=True)
        made.append(_joined(tree, joined, pauses, limit_tokens, rng) if len(joined) > 1 else tree)
    return made


def _mean_pause_s(tree: SessionTree) -> float:
    pauses = [request.gap_s for request in tree.root.requests[1:]]
    return sum(pauses) / max(1, len(pauses))


def _joined(
    tree: SessionTree, parts: Sequence[SessionTree], pauses: Sequence[float], limit_tokens: int, rng: random.Random
) -> SessionTree:
    """Some sessions one after the other, under the name of one of them."""
    first = parts[0]
    trie = BlockTrie()
    known: dict[int, int] = {}
    root = [_moved(request, first.trie, trie, known) for request in first.root.requests]
    children = [
        dataclasses.replace(item, requests=tuple(_moved(request, first.trie, trie, known) for request in item.requests))
        for item in first.conversations[1:]
    ]
    for part in parts[1:]:
        under, block = root[-1].node, part.block_tokens
        longest = max(request.input_tokens + request.output_tokens for request in part.root.requests)
        if trie.depth(under) * block + longest > limit_tokens:
            break
        pause_s = rng.choice(pauses)
        shift_s = root[-1].end_s + pause_s - part.root.requests[0].start_s
        spawned, before, known = len(root), len(children), {}
        for request in part.root.requests:
            root.append(_moved(request, part.trie, trie, known, shift_s=shift_s, under=under, block=block))
        root[spawned] = dataclasses.replace(root[spawned], gap_s=pause_s)
        for item in part.conversations[1:]:
            requests = tuple(_moved(request, part.trie, trie, known, shift_s=shift_s) for request in item.requests)
            children.append(_follower(item, requests, root, spawned, before))
    conversations = (dataclasses.replace(first.root, id=tree.root.id, requests=tuple(root)), *children)
    return dataclasses.replace(tree, trie=trie, conversations=conversations)


def _moved(
    request: TraceRequest,
    source: BlockTrie,
    trie: BlockTrie,
    known: dict[int, int],
    *,
    shift_s: float = 0.0,
    under: int = NO_BLOCKS,
    block: int = 0,
) -> TraceRequest:
    """A request with its blocks in `trie`, later by `shift_s`, and behind the prompt that ends with `under`."""
    node = trie.take(source, request.node, known, under)
    behind = (trie.depth(node) - source.depth(request.node)) * block
    return dataclasses.replace(
        request, start_s=request.start_s + shift_s, node=node, input_tokens=request.input_tokens + behind
    )


def _follower(
    item: Conversation, requests: tuple[TraceRequest, ...], root: Sequence[TraceRequest], spawned: int, before: int
) -> Conversation:
    """An agent of a joined session: its parent has `spawned` requests before those that it was recorded with, and
    `before` agents beside the root."""
    if item.parent:
        return dataclasses.replace(item, requests=requests, parent=item.parent + before)
    spawn = item.spawn_after
    if spawn is None:  # it started with the session
        gap_s = max(0.0, requests[0].start_s - root[spawned - 1].end_s)
        requests = (dataclasses.replace(requests[0], gap_s=gap_s), *requests[1:])
    return dataclasses.replace(
        item,
        requests=requests,
        spawn_after=spawned - 1 if spawn is None else spawn + spawned,
        join_before=None if item.join_before is None else item.join_before + spawned,
    )
