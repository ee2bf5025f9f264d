"""System prompts of captures that do not tell their length.

Newer captures declare 0 tokens of tools and system prompt. What agents of one session have in common at the start, and
part from, is then taken for it: the blocks of an agent's first prompt up to the first place where the session's prompts
part. That is an underestimate where agents share tools alone, and too much where a user edited a first message; a
session whose prompts never part tells nothing, and keeps none. Tried on 73 captures that do declare their prefix, of
some 230 blocks: 31 get one, 29 of them no longer than declared, the median 34 blocks shorter, two 57 and 114 longer.

The rules that others publish results by take such captures as they are, all of it the user's: derived prompts are
shared by the replays of a session, and make results something else.
"""

from __future__ import annotations

import dataclasses

from longturn.bench.traces.tree import Conversation, SessionTree

_TAIL_BLOCKS = 4
"""A turn may rewrite the end of the message before it: partings this close to the end of a first prompt are that."""


def derive_system(tree: SessionTree) -> SessionTree:
    """The session with a derived `system_tokens` for each conversation, where the capture declares none at all."""
    if any(item.system_tokens for item in tree.conversations):
        return tree
    parting = _partings(tree)
    conversations = tuple(
        dataclasses.replace(item, system_tokens=_shared_start(tree, item, parting) * tree.block_tokens)
        for item in tree.conversations
    )
    return dataclasses.replace(tree, conversations=conversations)


def _partings(tree: SessionTree) -> set[int]:
    """Blocks after which the prompts of this session go on in more than one way."""
    following: dict[int, int] = {}
    seen: set[int] = set()
    parting: set[int] = set()
    for request in tree.requests():
        node = request.node
        while node >= 0 and node not in seen:
            seen.add(node)
            parent = tree.trie.parent(node)
            if following.setdefault(parent, node) != node:
                parting.add(parent)
            node = parent
    return parting


def _shared_start(tree: SessionTree, conversation: Conversation, parting: set[int]) -> int:
    """Blocks of the first prompt up to the first parting; 0 if it has none before its last blocks, since the whole of
    a prompt is no system prompt."""
    path = tree.trie.path(conversation.requests[0].node)
    for count, node in enumerate(path[: max(0, len(path) - _TAIL_BLOCKS)], 1):
        if node in parting:
            return count
    return 0
