"""Prompts made from a trace's block ids: as many tokens as recorded, and shared exactly as far as recorded.

The content of a block is a function of seed, namespace, id and (after the system prompt) the marker of this replay of
the session. Symbols are numbers below the vocabulary's size; here they become token ids, in `synth_chat` words.
Random blocks alone would not do: two that follow the same prefix may begin alike by chance, and share more than was
recorded. So the first symbols of a block spell its number among everything that follows its parent, tails included.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from longturn.bench.traces.blocks import NO_BLOCKS, BlockTrie
from longturn.bench.traces.tree import SessionTree, TraceRequest
from longturn.errors import ConfigError

Symbols = npt.NDArray[np.int64]
_Words64 = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio: SplitMix64's step (Steele, Lea, Flood, 2014)."""


def tree_marker(run: str, recycle: int, lane: int, tree_id: str) -> str:
    """The cache-bust marker of one replay of a session: 12 hex digits, the same for all requests of the tree.

    Args:
        run: name of the benchmark run.
        recycle: how many sessions the lane has finished.
        lane: number of the lane.
        tree_id: the session.
    """
    return hashlib.sha256(f"{run}:{recycle}:{lane}:{tree_id}".encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Which request of which session."""

    tree_id: str
    conversation: int
    """Index in the tree's `conversations`."""
    index: int
    """Index in the conversation's `requests`."""


@dataclass(frozen=True, slots=True)
class _Namespace:
    """What is known of all blocks of one namespace."""

    key: int
    ordinals: npt.NDArray[np.int64]
    """For each node its number among the nodes with the same parent."""
    system: frozenset[int]
    """Nodes of system prompts: their content does not depend on the marker."""
    digits: int
    """Symbols that spell an ordinal."""


class BlockSymbols:
    """Symbols of every request of some sessions."""

    def __init__(self, trees: Sequence[SessionTree], vocabulary: int, seed: int) -> None:
        """
        Args:
            trees: the sessions that will be replayed, all of them: what must differ depends on what is there.
            vocabulary: number of symbols.
            seed: another seed gives other content of the same structure.

        Raises:
            ConfigError: too few symbols, or blocks too small to tell what follows the same prefix apart.
        """
        if vocabulary < 2:
            raise ConfigError(f"prompts need at least 2 different tokens, not {vocabulary}")
        self.vocabulary = vocabulary
        self._tails: dict[RequestKey, int] = {}
        self._namespaces: dict[str, _Namespace] = {}
        groups: dict[str, list[SessionTree]] = {}
        for tree in trees:
            groups.setdefault(tree.namespace, []).append(tree)
        for name, group in groups.items():
            self._namespaces[name] = self._survey(name, group, seed)

    def _survey(self, name: str, trees: Sequence[SessionTree], seed: int) -> _Namespace:
        trie = trees[0].trie
        followers: dict[int, int] = {}
        ordinals = np.zeros(len(trie), np.int64)
        for node in range(len(trie)):
            parent = trie.parent(node)
            ordinals[node] = followers.get(parent, 0)
            followers[parent] = followers.get(parent, 0) + 1
        system: set[int] = set()
        for tree in trees:
            for number, conversation in enumerate(tree.conversations):
                blocks = system_blocks(tree, number)
                system.update(trie.path(conversation.requests[0].node)[:blocks])
                for index, request in enumerate(conversation.requests):
                    if request.input_tokens > trie.depth(request.node) * tree.block_tokens:
                        self._tails[RequestKey(tree.id, number, index)] = followers.get(request.node, 0)
                        followers[request.node] = followers.get(request.node, 0) + 1
        most, digits = max(followers.values(), default=1), 1
        while self.vocabulary**digits < most:
            digits += 1
        if digits > min(tree.block_tokens for tree in trees):
            raise ConfigError(
                f"blocks of {trees[0].block_tokens} tokens are too small: {most} different ones follow the same prefix "
                f"in {name}, and there are {self.vocabulary} different tokens"
            )
        return _Namespace(_hash64(f"{seed}:{name}"), ordinals, frozenset(system), digits)

    def digits(self, tree: SessionTree) -> int:
        """Symbols at a block's start that must be kept, so that blocks after one prefix differ."""
        return self._namespaces[tree.namespace].digits

    def blocks(self, tree: SessionTree, path: Sequence[int], marker: str) -> Symbols:
        """Symbols of some blocks.

        Args:
            tree: the session.
            path: nodes from a prompt's start to its last block.
            marker: of this replay; empty for none.

        Returns:
            [blocks, block_tokens] int64, each below the vocabulary's size.
        """
        space, trie = self._namespaces[tree.namespace], tree.trie
        nodes = np.asarray(path, np.int64)
        ids = np.fromiter((trie.block_id(node) for node in path), np.uint64, len(path))
        salts = np.full(len(path), _hash64(marker), np.uint64)
        salts[[node in space.system for node in path]] = 0
        plain = _mix(ids + np.uint64(space.key))
        parents = np.concatenate([np.asarray([space.key], np.uint64), plain])[: len(path)]
        return self._fill(plain ^ salts, parents, space.ordinals[nodes], tree.block_tokens, space.digits)

    def tail(self, tree: SessionTree, key: RequestKey, marker: str) -> Symbols:
        """Symbols after the last hashed block, which no other request has: [tokens] int64."""
        request = request_of(tree, key)
        count = request.input_tokens - tree.trie.depth(request.node) * tree.block_tokens
        if count <= 0:
            return np.zeros(0, np.int64)
        space = self._namespaces[tree.namespace]
        own = _hash64(f"{space.key}:{marker}:{key.tree_id}:{key.conversation}:{key.index}")
        parent = np.asarray([space.key], np.uint64)
        if request.node != NO_BLOCKS:
            parent = _mix(np.asarray([tree.trie.block_id(request.node)], np.uint64) + np.uint64(space.key))
        ordinal = np.asarray([self._tails[key]], np.int64)
        return self._fill(np.asarray([own], np.uint64), parent, ordinal, count, space.digits).reshape(-1)

    def _fill(
        self, keys: _Words64, parents: _Words64, ordinals: npt.NDArray[np.int64], width: int, digits: int
    ) -> Symbols:
        """Random symbols by key, the first `digits` of each row replaced by the ordinal, shifted by the parent."""
        size = np.uint64(self.vocabulary)
        steps = np.arange(1, width + 1, dtype=np.uint64) * _GOLDEN
        symbols = (_mix(keys[:, None] + steps[None, :]) % size).astype(np.int64)
        rest = ordinals
        for digit in range(min(digits, width)):
            base = (_mix(parents ^ np.uint64(digit + 1)) % size).astype(np.int64)
            symbols[:, digit] = (base + rest % self.vocabulary) % self.vocabulary
            rest = rest // self.vocabulary
        return symbols


class RequestSymbols:
    """Symbols that belong to one request alone, with its number among all requests at their start: so texts of two
    requests differ within the first `digits` symbols."""

    def __init__(self, name: str, key: RequestKey, vocabulary: int, *, number: int = 0, total: int = 1) -> None:
        """
        Args:
            name: of what the symbols are for; another name gives others.
            key: the request.
            vocabulary: number of symbols, at least 2.
            number: of the request, below `total`.
            total: how many requests there are.
        """
        self._key = _hash64(f"{name}:{key.tree_id}:{key.conversation}:{key.index}")
        self._vocabulary = vocabulary
        self._number = number
        self.digits = 1
        while vocabulary**self.digits < total:
            self.digits += 1

    def __call__(self, count: int) -> Symbols:
        """The first `count` of them, each below the vocabulary's size."""
        steps = np.arange(1, count + 1, dtype=np.uint64) * _GOLDEN
        symbols = (_mix(np.uint64(self._key) + steps) % np.uint64(self._vocabulary)).astype(np.int64)
        rest = self._number
        for digit in range(min(self.digits, count)):
            symbols[digit] = rest % self._vocabulary
            rest //= self._vocabulary
        return symbols


class TokenPrompts:
    """Prompts as token ids, for `/v1/completions`: exact for every tokenizer, because none is asked."""

    def __init__(self, trees: Sequence[SessionTree], token_ids: Sequence[int], seed: int) -> None:
        """
        Args:
            trees: the sessions that will be replayed, scaled and filtered already.
            token_ids: ids that may be used, no special ones among them.
            seed: see `BlockSymbols`.

        Raises:
            ConfigError: too few ids, or one is there twice.
        """
        self._ids = np.asarray(token_ids, np.int64)
        if len(np.unique(self._ids)) != len(self._ids):
            raise ConfigError("the token ids for prompts must all be different")
        self.symbols = BlockSymbols(trees, len(self._ids), seed)
        self.token_ids = tuple(token_ids)

    def prompt(self, tree: SessionTree, key: RequestKey, marker: str = "") -> list[int]:
        """The prompt of one request: exactly its `input_tokens` ids.

        Prompts of one tree and marker share the tokens of the blocks that they share, and none after them (where more
        blocks follow one prefix than there are ids, a few at the next block's start). With another marker they share
        the system prompt and the first one or two tokens after it.
        """
        request = request_of(tree, key)
        body = self.symbols.blocks(tree, tree.trie.path(request.node), marker).reshape(-1)[: request.input_tokens]
        symbols = np.concatenate([body, self.symbols.tail(tree, key, marker)])
        ids: list[int] = self._ids[symbols].tolist()
        return ids


def system_blocks(tree: SessionTree, conversation: int) -> int:
    """Blocks at the start of a conversation's prompts that hold tools and system prompt, rounded up."""
    return -(-tree.conversations[conversation].system_tokens // tree.block_tokens)


def request_keys(tree: SessionTree) -> list[RequestKey]:
    """Keys of all requests, conversation by conversation."""
    return [
        RequestKey(tree.id, number, index)
        for number, conversation in enumerate(tree.conversations)
        for index in range(len(conversation.requests))
    ]


def request_of(tree: SessionTree, key: RequestKey) -> TraceRequest:
    """The recorded request."""
    return tree.conversations[key.conversation].requests[key.index]


def shared_blocks(trie: BlockTrie, one: int, other: int) -> int:
    """Leading blocks that two prompts share, by their nodes."""
    return trie.depth(trie.common(one, other))


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mix(values: _Words64) -> _Words64:
    """SplitMix64's finaliser, element by element."""
    mixed: _Words64 = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
