from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longturn.bench.traces.blocks import NO_BLOCKS, BlockTrie
from longturn.bench.traces.errors import TraceError


@st.composite
def prompts(draw: st.DrawFn) -> list[list[int]]:
    """Lists of ids in which each id has one predecessor: each keeps a part of an earlier one and adds new ids."""
    made: list[list[int]] = [[]]
    fresh = draw(st.integers(0, 1 << 40))
    for _ in range(draw(st.integers(1, 12))):
        earlier = draw(st.sampled_from(made))
        added = draw(st.integers(0, 4))
        made.append(earlier[: draw(st.integers(0, len(earlier)))] + list(range(fresh, fresh + added)))
        fresh += added
    return made


@given(prompts())
def test_the_trie_agrees_with_lists(lists: list[list[int]]) -> None:
    trie = BlockTrie()
    nodes = [trie.add(ids, "x") for ids in lists]
    assert len(trie) == len({block for ids in lists for block in ids})
    for node, ids in zip(nodes, lists, strict=True):
        assert trie.ids(node) == ids and trie.depth(node) == len(ids)
        assert trie.add(tuple(ids), "again") == node
        for depth in range(len(ids) + 1):
            assert trie.ids(trie.ancestor(node, depth)) == ids[:depth]
    for (a, one), (b, other) in itertools.product(zip(nodes, lists, strict=True), repeat=2):
        shared = next(
            (n for n, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other))
        )
        assert trie.ids(trie.common(a, b)) == one[:shared]


@given(prompts(), st.data())
def test_an_id_with_two_predecessors_is_refused_and_named(lists: list[list[int]], data: st.DataObject) -> None:
    trie = BlockTrie()
    for ids in lists:
        trie.add(ids, "x")
    ids = data.draw(st.sampled_from(lists))
    if len(ids) < 2:
        return
    index = data.draw(st.integers(1, len(ids) - 1))
    broken = [*ids[: index - 1], *ids[index:]]
    with pytest.raises(TraceError, match=rf"^here\.hash_ids\[{index - 1}\] is {ids[index]}, here .* and elsewhere "):
        trie.add(broken, "here")
    assert trie.ids(trie.add(ids, "x")) == ids


def test_no_blocks() -> None:
    trie = BlockTrie()
    node = trie.add([7], "x")
    assert trie.add([], "x") == NO_BLOCKS == trie.common(node, NO_BLOCKS)
    assert (trie.depth(NO_BLOCKS), trie.path(NO_BLOCKS), trie.parent(node)) == (0, [], NO_BLOCKS)
    with pytest.raises(ValueError, match="depth 2 is not on a path of 1 blocks"):
        trie.ancestor(node, 2)
