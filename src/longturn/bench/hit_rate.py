"""The prefix-cache hit rate that a trace allows: the one definition, whatever is counted.

The cache forgets nothing and is full of what was recorded before: each prompt, in the order of the recorded starts,
hits its longest beginning of blocks that an earlier prompt had. Who shares the cache is the caller's to say. `blocks`
counts hashed blocks over hashed blocks, as the field does; `tokens` counts cached tokens over all input tokens, which
is what a server reports.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from longturn.bench.traces.blocks import NO_BLOCKS
from longturn.bench.traces.tree import SessionTree


@dataclass(frozen=True, slots=True)
class PromptHit:
    """One recorded prompt."""

    tree_id: str
    conversation: int
    """Index in the tree's `conversations`."""
    index: int
    """Index in the conversation's `requests`."""
    hit_blocks: int
    blocks: int
    """Hashed blocks; a partial last block counts only where the recording hashed it."""
    cached_tokens: int
    input_tokens: int


@dataclass(frozen=True, slots=True)
class HitRate:
    """Of some prompts together."""

    hit_blocks: int
    blocks: int
    cached_tokens: int
    input_tokens: int

    @property
    def by_blocks(self) -> float | None:
        """Hit blocks over hashed blocks; None if nothing is hashed."""
        return self.hit_blocks / self.blocks if self.blocks else None

    @property
    def by_tokens(self) -> float:
        """Cached tokens over input tokens; 0 if there are none."""
        return self.cached_tokens / self.input_tokens if self.input_tokens else 0.0


def prompt_hits(trees: Sequence[SessionTree]) -> Iterator[PromptHit]:
    """Every prompt of some sessions that share one cache, in recorded order, those of equal start in the order given.

    Blocks are shared within a namespace only: elsewhere the same id means another block.
    """
    seen: dict[str, set[int]] = {}
    order = sorted(
        (tree.arrival_s + request.start_s, place, number, index)
        for place, tree in enumerate(trees)
        for number, conversation in enumerate(tree.conversations)
        for index, request in enumerate(conversation.requests)
    )
    for _, place, number, index in order:
        tree = trees[place]
        request, trie = tree.conversations[number].requests[index], tree.trie
        known = seen.setdefault(tree.namespace, set())
        node, new = request.node, 0
        # A node stands for its block and all before it: whatever is before a known one is known.
        while node != NO_BLOCKS and node not in known:
            known.add(node)
            node = trie.parent(node)
            new += 1
        blocks = trie.depth(request.node)
        # A last block may be partial, so cached tokens end at the prompt's end at the latest.
        cached = min((blocks - new) * tree.block_tokens, request.input_tokens)
        yield PromptHit(tree.id, number, index, blocks - new, blocks, cached, request.input_tokens)


def total(hits: Iterable[PromptHit]) -> HitRate:
    """Sums over prompts; one that was sent twice is there twice."""
    hit_blocks = blocks = cached = tokens = 0
    for hit in hits:
        hit_blocks += hit.hit_blocks
        blocks += hit.blocks
        cached += hit.cached_tokens
        tokens += hit.input_tokens
    return HitRate(hit_blocks, blocks, cached, tokens)


def hit_rate(trees: Sequence[SessionTree]) -> HitRate:
    """Of all prompts of some sessions that share one cache."""
    return total(prompt_hits(trees))
