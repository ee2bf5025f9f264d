"""Prompts as JSON that is ready to be sent, made from what the prompt before left.

A prompt of 150,000 tokens is a megabyte, and almost all of it was in the prompt before. So each agent's last prompt is
kept as bytes with the place where each block ends; the next one copies what both share and encodes the new blocks
alone. The result is the JSON of what `TokenPrompts` and `ChatPrompts` make.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from longturn.bench.bodies import Bodies, ChatBodies, Prompt, RecordedBodies, TokenBodies
from longturn.bench.records import Answer
from longturn.bench.synth import BlockSymbols, RequestKey, Symbols, TokenPrompts, request_of, shared_blocks
from longturn.bench.synth_chat import ChatPrompts
from longturn.bench.synth_words import OPENER
from longturn.bench.traces.blocks import NO_BLOCKS, BlockTrie
from longturn.bench.traces.tree import SessionTree, TraceRequest

_MOST_BYTES = 512 << 20
"""Of kept prompts, all sessions together; the ones unused for longest go first."""
_SLICE_BLOCKS = 64
"""Made at a time, with a pause between: a thread that is always ready to run makes the event loop wait for the
interpreter up to its switch interval, five milliseconds."""
_PAUSE_S = 0.0001


def _numbers() -> array[int]:
    return array("q")


@dataclass(frozen=True, slots=True)
class _Blocks:
    """The encoded blocks of a prompt, from its start. The arrays have one number for each block."""

    node: int = NO_BLOCKS
    """The last block."""
    data: bytes = b""
    ends: array[int] = field(default_factory=_numbers)
    """Where the block ends in `data`."""
    symbols: array[int] = field(default_factory=_numbers)
    """Symbols in the blocks up to it."""
    template: array[int] = field(default_factory=_numbers)
    """Tokens that the template adds before and among the blocks up to it; 0 for token ids."""
    owed: array[int] = field(default_factory=_numbers)
    """How many of these have not been taken out of a block yet."""

    def head(self, count: int) -> _Blocks:
        """Copies of the first `count` blocks' numbers; `data` stays whole."""
        return _Blocks(
            self.node, self.data, self.ends[:count], self.symbols[:count], self.template[:count], self.owed[:count]
        )


class _Kept:
    """The last blocks of each agent. May be used from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: OrderedDict[tuple[str, str, int], _Blocks] = OrderedDict()
        self._bytes = 0

    def nearest(self, tree: SessionTree, marker: str, conversation: int, node: int) -> tuple[_Blocks, int]:
        """Blocks of the same replay, and how many of them lead to `node`: the agent's own if there are any, else those
        that share most."""
        with self._lock:
            own = self._items.get((tree.id, marker, conversation))
            known = [own] if own else [item for key, item in self._items.items() if key[:2] == (tree.id, marker)]
        shared = [(shared_blocks(tree.trie, item.node, node), item) for item in known]
        depth, item = max(shared, key=lambda pair: pair[0], default=(0, _Blocks()))
        return item, depth

    def put(self, tree: SessionTree, marker: str, conversation: int, blocks: _Blocks) -> None:
        key = (tree.id, marker, conversation)
        with self._lock:
            self._drop(key)
            self._items[key] = blocks
            self._bytes += len(blocks.data)
            while self._bytes > _MOST_BYTES and len(self._items) > 1:
                self._drop(next(iter(self._items)))

    def forget(self, marker: str) -> None:
        with self._lock:
            for key in [key for key in self._items if key[1] == marker]:
                self._drop(key)

    def _drop(self, key: tuple[str, str, int]) -> None:
        old = self._items.pop(key, None)
        if old is not None:
            self._bytes -= len(old.data)


class _Encoder(RecordedBodies, ABC):
    """What both forms of prompts share."""

    def __init__(self, symbols: BlockSymbols, table: Sequence[bytes]) -> None:
        self._symbols = symbols
        self._table = table
        """The bytes of each symbol."""
        self._kept = _Kept()

    def forget(self, marker: str) -> None:
        self._kept.forget(marker)

    @abstractmethod
    def _start(self, tree: SessionTree, before: _Blocks, node: int) -> tuple[bytes, int, int, int]:
        """What comes before a block's own symbols, how many of these it has, and its entries in `template` and `owed`.

        Args:
            tree: the session.
            before: numbers of the blocks before it.
            node: the block.
        """

    def _blocks(self, tree: SessionTree, key: RequestKey, node: int, marker: str) -> _Blocks:
        """The blocks up to `node`, kept for the agent's next prompt."""
        kept, shared = self._kept.nearest(tree, marker, key.conversation, node)
        blocks = kept.head(shared)
        at = blocks.ends[-1] if shared else 0
        pieces: list[bytes | memoryview] = [memoryview(kept.data)[:at]]
        count = blocks.symbols[-1] if shared else 0
        for block, row in self._rows(tree, node, shared, marker):
            head, width, template, owed = self._start(tree, blocks, block)
            piece = head + self._text(row[:width])
            pieces.append(piece)
            at += len(piece)
            count += width
            blocks.ends.append(at)
            blocks.symbols.append(count)
            blocks.template.append(template)
            blocks.owed.append(owed)
        made = _Blocks(node, b"".join(pieces), blocks.ends, blocks.symbols, blocks.template, blocks.owed)
        self._kept.put(tree, marker, key.conversation, made)
        return made

    def _rows(self, tree: SessionTree, node: int, skip: int, marker: str) -> Iterator[tuple[int, Symbols]]:
        """The blocks up to `node` without the first `skip`, with their symbols."""
        path = _below(tree.trie, node, skip)
        for start in range(0, len(path), _SLICE_BLOCKS):
            part = path[start : start + _SLICE_BLOCKS]
            # Symbols depend on the block before: so one more is asked for and dropped.
            if start:
                time.sleep(_PAUSE_S)
            before = path[start - 1] if start else tree.trie.parent(part[0])
            lead = [] if before == NO_BLOCKS else [before]
            yield from zip(part, self._symbols.blocks(tree, lead + part, marker)[len(lead) :], strict=True)

    def _text(self, symbols: Symbols) -> bytes:
        return b"".join(map(self._table.__getitem__, symbols.tolist()))


class EncodedTokenBodies(_Encoder):
    """Prompts as token ids; `fields` holds `prompt` as raw JSON."""

    path = "/v1/completions"

    def __init__(self, prompts: TokenPrompts) -> None:
        super().__init__(prompts.symbols, [b"%d," % token for token in prompts.token_ids])

    def prompt(self, tree: SessionTree, key: RequestKey, marker: str) -> Prompt:
        request = request_of(tree, key)
        # A prompt may end within its last block: that one is not what others would share.
        whole = min(tree.trie.depth(request.node), request.input_tokens // tree.block_tokens)
        blocks = self._blocks(tree, key, tree.trie.ancestor(request.node, whole) if whole else NO_BLOCKS, marker)
        rest = [row for _, row in self._rows(tree, request.node, whole, marker)]
        rest = [np.concatenate(rest)[: request.input_tokens - whole * tree.block_tokens]] if rest else []
        tail = self._text(np.concatenate([*rest, self._symbols.tail(tree, key, marker)]))
        ids = blocks.data + tail
        return Prompt({"prompt": msgspec.Raw(b"".join((b"[", memoryview(ids)[:-1], b"]")))}, request.input_tokens)

    def _start(self, tree: SessionTree, before: _Blocks, node: int) -> tuple[bytes, int, int, int]:
        return b"", tree.block_tokens, 0, 0


class EncodedChatBodies(_Encoder):
    """Prompts as messages of whole words; `fields` holds `messages` as raw JSON."""

    path = "/v1/chat/completions"

    def __init__(self, prompts: ChatPrompts) -> None:
        super().__init__(prompts.symbols, [_inside(f" {word}") for word in prompts.words])
        self._prompts = prompts
        self._opener = _inside(OPENER)

    def prompt(self, tree: SessionTree, key: RequestKey, marker: str) -> Prompt:
        request = request_of(tree, key)
        costs = self._prompts.costs
        blocks = self._blocks(tree, key, request.node, marker)
        if request.node == NO_BLOCKS:
            role, fixed, words = "", costs.front + costs.end, 0
        else:
            role = self._prompts.roles(tree)[request.node]
            fixed, words = blocks.template[-1] + costs.between(role, "user") + costs.end, blocks.symbols[-1]
        left = max(0, request.input_tokens - fixed)
        data, tail = blocks.data, self._symbols.tail(tree, key, marker)[: max(0, left - words)]
        if words > left:
            data, words = self._cut(tree, blocks, request, left, marker), left
        head = b"" if role == "user" else self._message("user", first=not role)
        messages = b"".join([b"[", data, head, self._text(tail), b'"}]'])
        return Prompt({"messages": msgspec.Raw(messages)}, fixed + words + len(tail))

    def _start(self, tree: SessionTree, before: _Blocks, node: int) -> tuple[bytes, int, int, int]:
        costs, roles = self._prompts.costs, self._prompts.roles(tree)
        parent, role = tree.trie.parent(node), roles[node]
        if parent == NO_BLOCKS:
            added = costs.front_with_system if role == "system" else costs.front
            head, template, owed = self._message(role, first=True), added, added
        else:
            added = costs.between(roles[parent], role)
            head = b"" if roles[parent] == role else self._message(role, first=False)
            template, owed = before.template[-1] + added, before.owed[-1] + added
        width = max(self._symbols.digits(tree), tree.block_tokens - owed)
        return head, width, template, owed - (tree.block_tokens - width)

    def _cut(self, tree: SessionTree, blocks: _Blocks, request: TraceRequest, left: int, marker: str) -> bytes:
        """The blocks with `left` words, where the template leaves room for no more."""
        whole = next(n for n, count in enumerate(blocks.symbols) if count > left)
        pieces = [blocks.data[: blocks.ends[whole - 1] if whole else 0]]
        left -= blocks.symbols[whole - 1] if whole else 0
        for index, (block, row) in enumerate(self._rows(tree, request.node, whole, marker), whole):
            head, width, _, _ = self._start(tree, blocks.head(index), block)
            width = min(width, left)
            left -= width
            pieces.append(head + self._text(row[:width]))
        return b"".join(pieces)

    def _message(self, role: str, *, first: bool) -> bytes:
        """The end of the message before, if any, and the start of one."""
        return b'%b{"role":"%b","content":"%b' % (b"" if first else b'"},', role.encode(), self._opener)


class RawBodies:
    """Prompts of any kind as raw JSON: encoded where they are made, which is not the event loop."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies

    @property
    def path(self) -> str:
        return self._bodies.path

    def prompt(self, tree: SessionTree, key: RequestKey, marker: str) -> Prompt:
        made = self._bodies.prompt(tree, key, marker)
        raw = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in made.fields.items()}
        return dataclasses.replace(made, fields=raw)

    def answered(self, tree: SessionTree, key: RequestKey, marker: str, answer: Answer) -> None:
        self._bodies.answered(tree, key, marker, answer)

    def forget(self, marker: str) -> None:
        self._bodies.forget(marker)


def _inside(text: str) -> bytes:
    """JSON of a text, without the quotes."""
    return msgspec.json.encode(text)[1:-1]


def _below(trie: BlockTrie, node: int, depth: int) -> list[int]:
    """The blocks on the way to `node`, without the first `depth`."""
    nodes = []
    for _ in range(trie.depth(node) - depth):
        nodes.append(node)
        node = trie.parent(node)
    nodes.reverse()
    return nodes


def encoded(bodies: Bodies) -> Bodies:
    """The same prompts as raw JSON, for a target that sends them over HTTP."""
    if isinstance(bodies, TokenBodies):
        return EncodedTokenBodies(bodies.prompts)
    if isinstance(bodies, ChatBodies):
        return EncodedChatBodies(bodies.prompts)
    return RawBodies(bodies)
