"""Smaller sessions of the same structure, for servers that cannot hold the recorded ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from longturn.bench.traces.tree import Conversation, SessionTree, TraceRequest
from longturn.errors import ConfigError


def scale_tree(tree: SessionTree, factor: float) -> SessionTree:
    """The session with blocks of `round(block_tokens * factor)` tokens, at least 1.

    Which blocks prompts share stays as it was, and so does the hit rate. Tails and outputs shrink in the ratio that the
    blocks really shrank in. Times stay.

    Raises:
        ConfigError: `factor` is not above 0 and at most 1.
    """
    if not 0 < factor <= 1:
        raise ConfigError(f"--scale-context must be above 0 and at most 1, not {factor}")
    old, new = tree.block_tokens, max(1, round(tree.block_tokens * factor))

    def scaled(request: TraceRequest) -> TraceRequest:
        full, rest = divmod(request.input_tokens, old)
        tail = rest * new // old
        if tree.trie.depth(request.node) > full or not full:
            tail = max(1, tail)  # a partial block with an id, or a prompt without blocks: a token must be left
        return dataclasses.replace(
            request,
            input_tokens=full * new + tail,
            output_tokens=-(-request.output_tokens * new // old),
        )

    conversations = tuple(
        dataclasses.replace(
            item,
            requests=tuple(map(scaled, item.requests)),
            system_tokens=-(-item.system_tokens * new // old),
        )
        for item in tree.conversations
    )
    return dataclasses.replace(tree, block_tokens=new, conversations=conversations)


def drop_long(trees: Sequence[SessionTree], max_context_tokens: int) -> tuple[list[SessionTree], int]:
    """Leave out requests whose input and output are together more than `max_context_tokens`.

    A pause after a request that is left out runs from the last one that is kept. What was spawned after, or joined
    before, a request that is left out moves to the nearest one kept. A session whose root has nothing left is left
    out whole.

    Returns:
        The sessions that are left, and how many requests are not in them.
    """
    kept = [made for tree in trees if (made := _without_long(tree, max_context_tokens)) is not None]
    before = sum(1 for tree in trees for _ in tree.requests())
    return kept, before - sum(1 for tree in kept for _ in tree.requests())


def _without_long(tree: SessionTree, limit: int) -> SessionTree | None:
    fits = [
        [item.input_tokens + item.output_tokens <= limit for item in conversation.requests]
        for conversation in tree.conversations
    ]
    if all(map(all, fits)):
        return tree
    numbers: dict[int, int] = {}
    made: list[Conversation] = []
    for index, conversation in enumerate(tree.conversations):
        parent = conversation.parent
        if not any(fits[index]) or (parent is not None and parent not in numbers):
            # The children of an agent that is gone go too: nothing is left that would start them.
            continue
        spawn = join = None
        lost_s = 0.0
        if parent is not None:
            spawn, join, lost_s = _anchors(tree.conversations[parent], conversation, fits[parent])
        numbers[index] = len(made)
        made.append(
            dataclasses.replace(
                conversation,
                requests=_closed_up(conversation.requests, fits[index], lost_s),
                parent=None if parent is None else numbers[parent],
                spawn_after=spawn,
                join_before=join,
            )
        )
    return dataclasses.replace(tree, conversations=tuple(made)) if made else None


def _closed_up(requests: Sequence[TraceRequest], fits: Sequence[bool], lost_s: float) -> tuple[TraceRequest, ...]:
    """The requests that fit, each with the time of those before it that don't added to its pause."""
    made = []
    for request, kept in zip(requests, fits, strict=True):
        if kept:
            made.append(dataclasses.replace(request, gap_s=request.gap_s + lost_s))
            lost_s = 0.0
        else:
            lost_s += request.gap_s + (request.duration_s or 0.0)
    return tuple(made)


def _anchors(parent: Conversation, child: Conversation, fits: Sequence[bool]) -> tuple[int | None, int | None, float]:
    """Spawn and join among the parent's requests that fit, and the time by which the spawn moved back, in seconds."""
    spawn = join = None
    lost_s = 0.0
    if child.spawn_after is not None:
        earlier = [index for index in range(child.spawn_after + 1) if fits[index]]
        if earlier:
            spawn = sum(fits[: earlier[-1]])
            lost_s = parent.requests[child.spawn_after].end_s - parent.requests[earlier[-1]].end_s
        else:
            lost_s = parent.requests[child.spawn_after].end_s
    if child.join_before is not None and any(fits[child.join_before :]):
        join = sum(fits[: child.join_before])
    return spawn, join, max(0.0, lost_s)
