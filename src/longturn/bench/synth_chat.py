"""Chat prompts made from a trace's block ids: the right number of tokens, cut into messages.

A block belongs to a role for good: the request that brought it decides. The first blocks of a conversation's first
prompt are the system prompt, as many as recorded. Of the new blocks of a later prompt the first are the answer before
it, as many as that answer filled, and the rest is the user's. Prompts that share blocks then share the messages.

What the template adds before a message is taken out of the block that starts it, and what it adds at the prompt's end
out of the tail, or out of the last blocks where the tail is shorter. So a prompt's tokens are exact. A shared prefix of
n blocks has all tokens of n blocks, except where a short tail gave way, and no more than the template's next tokens
after them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longturn.bench.synth import BlockSymbols, RequestKey, Symbols, request_of, system_blocks
from longturn.bench.synth_words import OPENER, ChatCosts, Words
from longturn.bench.traces.blocks import NO_BLOCKS
from longturn.bench.traces.tree import SessionTree


@dataclass(frozen=True, slots=True)
class ChatMessages:
    """The messages of one request."""

    messages: tuple[dict[str, str], ...]
    tokens: int
    """What the server will count: the recorded input, or more where not even empty messages would fit it."""


class ChatPrompts:
    """Chat prompts of some sessions."""

    def __init__(self, trees: Sequence[SessionTree], words: Words, costs: ChatCosts, seed: int) -> None:
        """
        Args:
            trees: the sessions that will be replayed, scaled and filtered already.
            words: from `find_words`.
            costs: from `measure_costs`.
            seed: see `BlockSymbols`.

        Raises:
            ConfigError: blocks too small for this many words.
        """
        self.words = words.words
        self.opener_tokens = words.opener_tokens
        self.costs = costs
        self.symbols = BlockSymbols(trees, len(words.words), seed)
        self._words = np.asarray(words.words, dtype=object)
        self._roles = {
            tree.id: _roles(tree, max(costs.system_to_user, costs.assistant_to_user) + costs.end) for tree in trees
        }

    def roles(self, tree: SessionTree) -> dict[int, str]:
        """The role of every block of a session, by its node."""
        return self._roles[tree.id]

    def prompt(self, tree: SessionTree, key: RequestKey, marker: str = "") -> ChatMessages:
        """The messages of one request."""
        return self._messages(*self.parts(tree, key, marker))

    def parts(self, tree: SessionTree, key: RequestKey, marker: str = "") -> tuple[list[tuple[str, Symbols]], int]:
        """(role, symbols) of each block and the tail of one request, and how many tokens the template adds."""
        request = request_of(tree, key)
        path = tree.trie.path(request.node)
        known = self._roles[tree.id]
        roles = [known[node] for node in path]
        tail = self.symbols.tail(tree, key, marker)
        costs, before = self.costs, "system" if roles[:1] == ["system"] else "user"
        changes = [costs.between(*pair) for pair in itertools.pairwise([before, *roles, "user"])]
        front = costs.front_with_system if before == "system" else costs.front
        fixed = front + sum(changes) + costs.end

        parts: list[tuple[str, Symbols]] = []
        least = self.symbols.digits(tree)
        left = request.input_tokens - fixed
        owed = front
        for role, block, change in zip(roles, self.symbols.blocks(tree, path, marker), changes, strict=False):
            owed += change
            count = max(least, len(block) - owed)
            owed -= len(block) - count
            count = min(count, max(0, left))
            parts.append((role, block[:count]))
            left -= count
        parts.append(("user", tail[: max(0, left)]))
        return parts, fixed

    def _messages(self, parts: Sequence[tuple[str, Symbols]], fixed: int) -> ChatMessages:
        messages, total = [], fixed
        for role, group in itertools.groupby(parts, key=lambda part: part[0]):
            symbols = np.concatenate([symbols for _, symbols in group])
            total += len(symbols)
            messages.append({"role": role, "content": " ".join([OPENER, *self._words[symbols]])})
        return ChatMessages(tuple(messages), total)


def _roles(tree: SessionTree, message_tokens: int) -> dict[int, str]:
    """The role of every block of a session, by the request that brought it.

    A prompt must end with the user. Where its tail has no more than `message_tokens`, and so cannot be a message, its
    last block is the user's, also in the prompts of others that hold it.
    """
    trie = tree.trie
    ends = {
        request.node
        for request in tree.requests()
        if request.input_tokens - trie.depth(request.node) * tree.block_tokens <= message_tokens
    }
    roles: dict[int, str] = {}
    order = sorted(
        (request.start_s, number, index)
        for number, conversation in enumerate(tree.conversations)
        for index, request in enumerate(conversation.requests)
    )
    for _, number, index in order:
        requests = tree.conversations[number].requests
        new, last = [], requests[index].node
        while last != NO_BLOCKS and last not in roles:  # what is before a known block is known
            new.append(last)
            last = trie.parent(last)
        new.reverse()
        before = "system" if last == NO_BLOCKS else roles[last]
        shared = trie.depth(last)
        if index == 0:
            role, count = "system", system_blocks(tree, number) - shared if before == "system" else 0
        else:
            answer = -(-requests[index - 1].output_tokens // tree.block_tokens)
            role, count = "assistant", answer if before == "user" else 0
        for place, node in enumerate(new):
            if node in ends:
                count = 0  # the user's, and what follows it too
            roles[node] = role if place < count else "user"
    return roles
