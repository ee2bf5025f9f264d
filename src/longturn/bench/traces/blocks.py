"""Block hash ids as a tree of prefixes.

In both public formats an id stands for a block of tokens *at its place*: it implies every block before it. So each id
has one predecessor, the ids of a trace form a forest, and a prompt is one node of it: its last block. A turn of a long
session then costs its new blocks and not its whole list, about 1/28 of the ids of recorded coding sessions.
An id with two predecessors breaks the format, and reading it as anything else would invent or lose cache hits.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from longturn.bench.traces.errors import TraceError

NO_BLOCKS = -1
"""The node of a prompt that has no hashed block."""


class BlockTrie:
    """The blocks of one namespace. Filled while a trace is read, not changed afterwards."""

    def __init__(self) -> None:
        self._nodes: dict[int, int] = {}
        self._ids = array("q")
        self._parents = array("q")
        self._depths = array("q")
        self._roots = array("q")
        self._last_ids: Sequence[int] = ()
        self._last_node = NO_BLOCKS
        self._largest_id = -1

    def __len__(self) -> int:
        """Different blocks."""
        return len(self._ids)

    def add(self, ids: Sequence[int], place: str) -> int:
        """The node of a prompt with these block ids, in prompt order.

        Args:
            ids: hash ids, 0 or more each.
            place: what errors call the prompt, such as `trace.json: requests[3]`.

        Raises:
            TraceError: an id is negative, or it followed another block elsewhere.
        """
        node, start = self._known_prefix(ids)
        for index in range(start, len(ids)):
            node = self._step(node, ids[index], place, index)
        if ids:
            self._last_ids, self._last_node = ids, node
        return node

    def _known_prefix(self, ids: Sequence[int]) -> tuple[int, int]:
        """The node and length of what `ids` shares with the list before it: comparing slices is a hundred times faster
        than stepping, and nearly every prompt extends the one before."""
        last = self._last_ids
        low, high = 0, min(len(ids), len(last))
        if high and ids[:high] == last[:high]:
            low = high
        while high - low > 1:  # ids[:low] is shared, ids[:high] is not
            middle = (low + high) // 2
            if ids[low:middle] == last[low:middle]:
                low = middle
            else:
                high = middle
        node = self._last_node
        for _ in range(len(last) - low):
            node = self._parents[node]
        return (node, low) if low else (NO_BLOCKS, 0)

    def _step(self, parent: int, block_id: int, place: str, index: int) -> int:
        node = self._nodes.get(block_id)
        if node is None:
            if block_id < 0:
                raise TraceError(f"{place}.hash_ids[{index}] must be 0 or more, not {block_id}")
            node = self._grow(parent, block_id)
        elif self._parents[node] != parent:
            raise TraceError(
                f"{place}.hash_ids[{index}] is {block_id}, here {self._after(parent)} and elsewhere "
                f"{self._after(self._parents[node])}: an id stands for one prefix"
            )
        return node

    def _after(self, parent: int) -> str:
        return "the first block" if parent == NO_BLOCKS else f"after block {self._ids[parent]}"

    def take(self, source: BlockTrie, node: int, known: dict[int, int], under: int = NO_BLOCKS) -> int:
        """The node here of a prompt of another namespace; blocks that are not here yet are made, as new ones.

        Args:
            source: where the prompt is from.
            node: its last block there, or NO_BLOCKS.
            known: blocks of `source` and what they became here; gets those that are made.
            under: what the prompt follows here, or NO_BLOCKS.
        """
        path = []
        while node != NO_BLOCKS and node not in known:
            path.append(node)
            node = source.parent(node)
        at = under if node == NO_BLOCKS else known[node]
        for node in reversed(path):
            at = known[node] = self._grow(at, self._largest_id + 1)
        return at

    def _grow(self, parent: int, block_id: int) -> int:
        """A new block after another, or the first of a prompt."""
        node = len(self._ids)
        self._nodes[block_id] = node
        self._ids.append(block_id)
        self._parents.append(parent)
        self._depths.append(1 if parent == NO_BLOCKS else self._depths[parent] + 1)
        self._roots.append(node if parent == NO_BLOCKS else self._roots[parent])
        self._largest_id = max(self._largest_id, block_id)
        return node

    def block_id(self, node: int) -> int:
        """The recorded id of a node."""
        return self._ids[node]

    def parent(self, node: int) -> int:
        """The node of the block before, or NO_BLOCKS."""
        return self._parents[node]

    def depth(self, node: int) -> int:
        """Blocks from the prompt's start up to this one; 0 for NO_BLOCKS."""
        return 0 if node == NO_BLOCKS else self._depths[node]

    def path(self, node: int) -> list[int]:
        """Nodes from the prompt's first block to this one."""
        nodes = []
        while node != NO_BLOCKS:
            nodes.append(node)
            node = self._parents[node]
        nodes.reverse()
        return nodes

    def ids(self, node: int) -> list[int]:
        """The hash ids of a prompt, as they were recorded."""
        return [self._ids[item] for item in self.path(node)]

    def ancestor(self, node: int, depth: int) -> int:
        """The node `depth` blocks from the start on the way to `node`.

        Raises:
            ValueError: `node` is not that deep.
        """
        if not 0 <= depth <= self.depth(node):
            raise ValueError(f"depth {depth} is not on a path of {self.depth(node)} blocks")
        for _ in range(self.depth(node) - depth):
            node = self._parents[node]
        return node

    def common(self, one: int, other: int) -> int:
        """The deepest node that both prompts start with, or NO_BLOCKS."""
        if one == NO_BLOCKS or other == NO_BLOCKS or self._roots[one] != self._roots[other]:
            return NO_BLOCKS
        depth = min(self._depths[one], self._depths[other])
        one, other = self.ancestor(one, depth), self.ancestor(other, depth)
        while one != other:
            one, other = self._parents[one], self._parents[other]
        return one
