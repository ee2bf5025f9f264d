"""What the engine is told of a recorded prompt, without making the prompt: its length, and a name for every page.

The scheduler looks at lengths and page hashes alone. A page's content is settled by the block that its last token lies
in, since a block id stands for its place and all before it; so (replay, block, page) names it, and two prompts share a
page exactly where the prompts that `bench.synth` makes from the same ids share all of its tokens. Pages of a system
prompt are named by namespace instead of by replay, as the marker of a replay comes after it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from longturn.bench.lanes import LiveTree
from longturn.bench.synth import RequestKey, system_blocks
from longturn.bench.traces.tree import SessionTree
from longturn.config import PAGE_TOKENS
from longturn.engine.hashing import salt_key
from longturn.engine.records import EngineRequest, SamplingParams

_NAME = struct.Struct("<Iqi")
"""A page's name, 16 bytes like a real page hash: replay or namespace, block's node, page."""
_TAILS = 0xFFFFFFFF
"""In place of a replay in names of pages that hold tokens outside any block, which no other request has."""
_HASH_KEY = salt_key("simulated")
_TOKEN_BYTES = 4


class TracePrompts:
    """Engine requests of the replays of some sessions."""

    def __init__(self, trees: Sequence[SessionTree]) -> None:
        self._spaces: dict[str, int] = {}
        self._system: dict[str, set[int]] = {}
        for tree in trees:
            self._spaces.setdefault(tree.namespace, len(self._spaces))
            nodes = self._system.setdefault(tree.namespace, set())
            for number, conversation in enumerate(tree.conversations):
                if blocks := system_blocks(tree, number):
                    nodes.update(tree.trie.path(conversation.requests[0].node)[:blocks])
        self._replays: dict[str, int] = {}
        """Marker -> number; counted after the namespaces."""
        self._last: dict[str, dict[int, tuple[int, list[bytes]]]] = {}
        """Marker -> conversation -> (node, names of whole pages in blocks) of its last prompt."""
        self._zeros = bytes(_TOKEN_BYTES * PAGE_TOKENS)
        self._requests = 0

    def request(self, live: LiveTree, key: RequestKey, output_tokens: int) -> EngineRequest:
        """The next request of a session that is being replayed.

        Args:
            live: the replay.
            key: which request of it.
            output_tokens: asked for, at least 1; no stop token ends it earlier.
        """
        tree = live.tree
        recorded = tree.conversations[key.conversation].requests[key.index]
        tokens = recorded.input_tokens
        names = self._block_pages(live, key.conversation, recorded.node, tokens)
        number = self._requests
        self._requests += 1
        for page in range(len(names), tokens // PAGE_TOKENS):
            names.append(_NAME.pack(_TAILS, number, page))
        if len(self._zeros) < _TOKEN_BYTES * tokens:
            self._zeros = bytes(_TOKEN_BYTES * tokens)
        # The last token differs from request to request, so that pages which generated tokens fill never share a name.
        last = (number & 0x7FFFFFFF).to_bytes(_TOKEN_BYTES, "little")
        prompt = b"".join((memoryview(self._zeros)[: _TOKEN_BYTES * (tokens - 1)], last))
        return EngineRequest(
            request_id=f"{live.name}/{key.conversation}.{key.index}#{number}",
            prompt=prompt,
            page_hashes=tuple(names),
            sampling=SamplingParams(max_tokens=max(1, output_tokens), temperature=0.0),
            session_id=live.marker,
            hash_key=_HASH_KEY,
        )

    def forget(self, live: LiveTree) -> None:
        """A replay has ended; its prompts are not asked for again."""
        self._last.pop(live.marker, None)

    def _block_pages(self, live: LiveTree, conversation: int, node: int, tokens: int) -> list[bytes]:
        """Names of the whole pages of a prompt that lie within hashed blocks."""
        tree = live.tree
        trie, size = tree.trie, tree.block_tokens
        depth = trie.depth(node)
        total = min(depth * size, tokens) // PAGE_TOKENS
        mine = self._last.setdefault(live.marker, {})
        last = mine.get(conversation)
        known: list[bytes] = []
        if last is not None:
            shared = trie.depth(trie.common(last[0], node)) * size
            known = last[1][: min(shared // PAGE_TOKENS, total)]
        if len(known) < total:
            replay = self._replays.setdefault(live.marker, len(self._replays)) + len(self._spaces)
            space, system = self._spaces[tree.namespace], self._system[tree.namespace]
            first = -(-PAGE_TOKENS * (len(known) + 1) // size)
            path: list[int] = []
            at = node
            for _ in range(depth - first + 1):
                path.append(at)
                at = trie.parent(at)
            path.reverse()  # path[i] is the node of depth first + i
            pack = _NAME.pack
            for page in range(len(known), total):
                block = path[-(-PAGE_TOKENS * (page + 1) // size) - first]
                known.append(pack(space if block in system else replay, block, page))
        mine[conversation] = (node, known)
        return list(known)
