"""Sessions joined to longer ones and given recorded subagents: lists of ids are the twin of every prompt."""

from __future__ import annotations

import dataclasses
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.bench.hit_rate import hit_rate
from longturn.bench.metrics import percentile
from longturn.bench.traces.blocks import NO_BLOCKS, BlockTrie
from longturn.bench.traces.lengthen import lengthened
from longturn.bench.traces.load import load_traces
from longturn.bench.traces.pauses import with_pauses
from longturn.bench.traces.subagents import Group, finer, of_subagent, recorded_groups, with_subagents
from longturn.bench.traces.tree import SessionTree
from longturn.errors import ConfigError
from tests.bench.make_traces import row, session, shared
from tests.bench.test_traces_blocks import prompts

BLOCK = 4


def made(name: str, rows: list[dict[str, object]]) -> SessionTree:
    import json

    from longturn.bench.traces.weka import parse_weka

    data = {**session(rows, block=BLOCK), "id": name}
    return parse_weka(json.dumps(data).encode(), f"{name}.json", split=False)


def plain(name: str, turns: int, first: int = 3, step: int = 2) -> SessionTree:
    """A root agent that sends a request every 10 s, is answered in 1 s, and adds `step` blocks each time."""
    return made(name, [row(10.0 * n, list(range(first + step * n)), tail=1) for n in range(turns)])


def helper(agent: str, start: float, ids: list[list[int]]) -> dict[str, object]:
    """A subagent whose requests follow each other after 0.5 s."""
    rows = [row(start + 1.5 * n, blocks, out=5 + n) for n, blocks in enumerate(ids)]
    return {"t": start, "type": "subagent", "agent_id": agent, "requests": rows, "system_tokens": 2 * BLOCK}


def with_group(name: str = "donor") -> SessionTree:
    """Its second request starts two subagents, which share four blocks, two of them their tools; the third waits."""
    one = [[100, 101, 102, 103], [100, 101, 102, 103, 104, 105, 106, 107]]
    other = [[100, 101, 102, 103, 200], [100, 101, 102, 103, 200, 201], [100, 101, 102, 103, 200, 201, 202]]
    return made(
        name,
        [row(0, [0, 1]), row(10, [0, 1, 2]), helper("a", 11.2, one), helper("b", 11.7, other),
         row(20, [0, 1, 2, 3]), row(30, [0, 1, 2, 3, 4])],
    )  # fmt: skip


def ids(tree: SessionTree, conversation: int, index: int) -> list[int]:
    return tree.trie.ids(tree.conversations[conversation].requests[index].node)


def sound(tree: SessionTree) -> None:
    """Prompts are as long as their blocks say, and every agent is in the order of its times and of its parent's."""
    for item in tree.conversations:
        for request in item.requests:
            assert 0 <= request.input_tokens - tree.trie.depth(request.node) * tree.block_tokens < tree.block_tokens
        for before, after in zip(item.requests, item.requests[1:], strict=False):
            assert after.start_s >= before.end_s and after.gap_s == pytest.approx(after.start_s - before.end_s)
        if item.parent is None:
            continue
        parent = tree.conversations[item.parent].requests
        if item.spawn_after is not None:
            began = parent[item.spawn_after].end_s
            assert item.start_s >= began and item.requests[0].gap_s == pytest.approx(item.start_s - began)
        if item.join_before is not None:
            assert parent[item.join_before].start_s >= item.end_s - 1e-6


@given(prompts(), prompts())
def test_blocks_taken_from_another_trie_are_new_and_keep_what_they_share(
    here: list[list[int]], there: list[list[int]]
) -> None:
    trie, source = BlockTrie(), BlockTrie()
    nodes = [trie.add(one, "here") for one in here]
    others = [source.add(one, "there") for one in there]
    under, known = nodes[-1], dict[int, int]()
    before = len(trie)
    taken = [trie.take(source, node, known, under) for node in others]
    assert len(trie) == before + len(source) and [trie.ids(node) for node in nodes] == here
    for node, one in zip(taken, there, strict=True):
        assert trie.depth(node) == trie.depth(under) + len(one)
        for twin, other in zip(taken, there, strict=True):
            same = next((n for n, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), None)
            same = min(len(one), len(other)) if same is None else same
            assert trie.depth(trie.common(node, twin)) == trie.depth(under) + same
    alone = trie.take(source, others[-1], {})
    assert trie.common(alone, under) == NO_BLOCKS and trie.depth(alone) == len(there[-1])


def test_a_session_goes_on_as_the_nearest_on_top_of_its_last_prompt() -> None:
    trees = [plain("short", 3), plain("long", 9), plain("near", 4, first=5)]
    longer = lengthened(trees, 2 * 16 / 3, 10**9, 1)
    assert [one.id for one in longer] == ["short", "long", "near"]
    assert [len(one.root.requests) for one in longer] == [3 + 4, 9 + 4, 4 + 9]
    short, near = trees[0], trees[2]
    last, moved = short.root.requests[-1], longer[0].root.requests[3]
    assert ids(longer[0], 0, 3)[:7] == ids(longer[0], 0, 2) and len(ids(longer[0], 0, 3)) == 7 + 5
    assert moved.input_tokens == 7 * BLOCK + near.root.requests[0].input_tokens
    assert moved.gap_s == 9.0 and moved.start_s == last.end_s + 9.0, "all recorded pauses are 9 s"
    for one in longer:
        sound(one)
    # Only the joints are new: what each request adds stays, so the same tokens are missed.
    missed = [
        sum(hit.input_tokens - hit.cached_tokens for hit in [hit_rate([one])]) for one in (short, near, longer[0])
    ]
    assert missed[2] == missed[0] + missed[1]


def test_sessions_end_where_prompts_would_be_too_long_and_means_are_met() -> None:
    trees = [plain(f"t{n}", 4 + n) for n in range(20)]
    longer = lengthened(trees, 1.7 * statistics.mean(4 + n for n in range(20)), 10**9, 3)
    assert statistics.mean(len(one.root.requests) for one in longer) == pytest.approx(1.7 * 13.5, rel=0.1)
    assert lengthened(trees, 13.5, 10**9, 3) == trees and lengthened(trees, 1.0, 10**9, 3) == trees
    # The shortest session's last prompt has 9 blocks, the longest answered prompt that may follow 47 tokens.
    assert all(len(one.trie) == len(tree.trie) for one, tree in zip(lengthened(trees, 99, 82, 3), trees, strict=True))
    twins = [plain("a", 4), plain("b", 4)]
    assert [len(one.root.requests) for one in lengthened(twins, 8, 9 * BLOCK + 47, 3)] == [8, 8]
    assert [len(one.root.requests) for one in lengthened(twins, 8, 9 * BLOCK + 46, 3)] == [4, 4]
    with pytest.raises(ConfigError, match="more than 0"):
        lengthened(trees, 0.0, 82, 3)


def test_the_session_that_pauses_longest_comes_first() -> None:
    slow = made("slow", [row(50.0 * n, list(range(3 + n))) for n in range(4)])
    quick, other = lengthened([plain("quick", 4), slow], 8.0, 10**9, 1)
    for one in (quick, other):
        assert [request.gap_s for request in one.root.requests][1:4] == [49.0] * 3
        assert len(one.root.requests) == 8 and one.root.requests[3].input_tokens < one.root.requests[4].input_tokens
        sound(one)
    assert (quick.id, quick.namespace, quick.root.id) == ("quick", "quick", "quick") and other.id == "slow"


def test_agents_of_a_joined_session_come_along() -> None:
    longer = lengthened([plain("a", 4), with_group("b")], 8.0, 10**9, 1)[0]
    assert [item.spawn_after for item in longer.conversations] == [None, 5, 5]
    assert [item.join_before for item in longer.conversations] == [None, 6, 6]
    sound(longer)
    assert longer.trie.common(longer.conversations[1].requests[0].node, longer.root.requests[-1].node) == NO_BLOCKS


def test_an_agents_own_agents_stay_its_own() -> None:
    tree = with_group("b")
    root, first, second = tree.conversations
    nested = dataclasses.replace(second, parent=1, spawn_after=0, join_before=None)
    inner = dataclasses.replace(tree, conversations=(root, first, nested))
    longer = lengthened([with_group("a"), inner], 8.0, 10**9, 1)[0]
    parents = {
        item.id: longer.conversations[item.parent].id for item in longer.conversations[1:] if item.parent is not None
    }
    assert len(parents) == 4 and parents.pop(second.id) == first.id
    assert set(parents.values()) == {"a"}


def test_groups_are_recorded_with_their_times() -> None:
    (group,) = recorded_groups([plain("x", 3), with_group()])
    assert group.requests == 5 and [len(member.requests) for member in group.members] == [2, 3]
    assert group.begin_s == 11.0 and group.end_s == pytest.approx(11.7 + 4.0)
    assert group.join_s == pytest.approx(20 - group.end_s)
    background = made("bg", [row(0, [0]), helper("a", 1.5, [[9]] * 4), row(1.8, [0, 1]), row(9, [0, 1, 2])])
    assert recorded_groups([background]) == [], "the request after did not wait"


def test_given_groups_keep_their_shape_and_the_root_waits() -> None:
    (group,) = recorded_groups([with_group()])
    trees = [plain("a", 40), plain("b", 40)]
    found = with_subagents(trees, [group], 0.5, 0.5, 5)
    (with_some,) = [one for one in found if len(one.conversations) > 1]
    assert sum(one is tree for one, tree in zip(found, trees, strict=True)) == 1, "the other is left as it is"
    inner = sum(len(item.requests) for item in with_some.conversations[1:])
    assert inner == 40 == round(0.5 * 80), "eight groups of five requests"
    sound(with_some)
    for first in range(1, len(with_some.conversations), 2):
        pair = with_some.conversations[first : first + 2]
        turn = pair[0].spawn_after
        assert turn is not None and {(p.spawn_after, p.join_before, p.parent) for p in pair} == {(turn, turn + 1, 0)}
        since = with_some.root.requests[turn].end_s
        for item, member in zip(pair, group.members, strict=True):
            offsets = [request.start_s - since for request in item.requests]
            assert offsets == pytest.approx([request.start_s - group.begin_s for request in member.requests])
            shape = [(one.input_tokens, one.output_tokens, one.duration_s) for one in item.requests]
            assert shape == [(one.input_tokens, one.output_tokens, one.duration_s) for one in member.requests]
        follows = with_some.root.requests[turn + 1]
        assert follows.start_s - max(item.end_s for item in pair) >= group.join_s - 1e-6
    # Siblings share what they did, groups their tools and system prompt, and nobody anything with the root.
    trie = with_some.trie
    firsts = [item.requests[0].node for item in with_some.conversations[1:]]
    assert {trie.depth(trie.common(one, other)) for one, other in zip(firsts[::2], firsts[1::2], strict=True)} == {4}
    assert {trie.depth(trie.common(firsts[0], other)) for other in firsts[2:]} == {2}
    assert {trie.common(one, with_some.root.requests[-1].node) for one in firsts} == {NO_BLOCKS}
    assert with_subagents(trees, [group], 0.5, 0.5, 5)[0].conversations == found[0].conversations


def test_a_root_that_would_have_gone_on_sooner_waits_for_its_subagents() -> None:
    (group,) = recorded_groups([with_group()])
    quick = made("q", [row(1.5 * n, list(range(3 + n)), tail=1) for n in range(12)])
    (found,) = with_subagents([quick], [group], 1.0, 0.5, 5)
    waits = {item.join_before for item in found.conversations[1:]}
    assert waits
    sound(found)
    for before, (turn, after) in zip(quick.root.requests, enumerate(found.root.requests), strict=True):
        assert (after.gap_s > before.gap_s + 1) == (turn in waits)


def test_subagents_that_are_there_count_and_stay() -> None:
    trees = [with_group("own"), *(plain(f"p{n}", 30) for n in range(3))]
    groups = recorded_groups(trees)
    found = with_subagents(trees, groups, 0.5, 30 / 94, 2)
    having = [any(item.kind == "subagent" for item in one.conversations) for one in found]
    assert sum(having) == 2 and having[0], "two of four, and the one that had some is one of them"
    assert sum(len(i.requests) for one in found for n, i in enumerate(one.conversations) if of_subagent(one, n)) == 30
    for one in found:
        sound(one)
    own = [item for item in found[0].conversations if item.id.startswith("own::sa:")]
    assert [len(item.requests) for item in own] == [2, 3]


def test_finer_subagents_add_the_same_in_more_requests() -> None:
    groups = recorded_groups([with_group()])
    (group,) = finer(groups, 5.5)
    assert [len(member.requests) for member in group.members] == [4, 7], "three requests after a first became nine"
    source = group.source
    for member, before in zip(group.members, groups[0].members, strict=True):
        lengths = [request.input_tokens for request in member.requests]
        assert lengths == sorted(lengths) and lengths[-1] == before.requests[-1].input_tokens
        assert {one.input_tokens for one in before.requests} <= set(lengths)
        for one, other in zip(member.requests, member.requests[1:], strict=False):
            shared = source.trie.depth(source.trie.common(one.node, other.node))
            assert shared == source.trie.depth(one.node), "each goes on from the one before"
            assert other.start_s == pytest.approx(one.end_s + other.gap_s)
    assert group.end_s == max(member.end_s for member in group.members) and finer(groups, 2.5) == groups
    with pytest.raises(ConfigError, match="more than 0"):
        finer(groups, 0)


def test_pauses_become_those_described_and_agents_start_with_their_parents() -> None:
    times = [0.0]
    for n in range(60):
        times.append(times[-1] + 1.0 + 0.2 * 1.15**n)
    tree = made("p", [row(at, list(range(2 + n))) for n, at in enumerate(times)])
    (found,) = with_pauses([tree], 3.0, 50.0)
    pauses = [request.gap_s for request in found.root.requests[1:]]
    assert percentile(pauses, 50) == pytest.approx(3.0, rel=0.01) and percentile(pauses, 90) == pytest.approx(
        50.0, rel=0.02
    )
    assert pauses == sorted(pauses), "longer ones stay longer"
    sound(found)
    parent = with_group()
    (apart,) = with_pauses([parent, *(plain(f"t{n}", 3 + 2 * n) for n in range(3)), tree], 4.0, 90.0)[:1]
    sound(apart)
    assert apart.root.requests[2].gap_s == parent.root.requests[2].gap_s, "subagents were waited for in it"
    assert apart.root.requests[3].gap_s != parent.root.requests[3].gap_s
    for item, before in zip(apart.conversations[1:], parent.conversations[1:], strict=True):
        assert [one.gap_s for one in item.requests] == [one.gap_s for one in before.requests]
    with pytest.raises(ConfigError, match="all alike"):
        with_pauses([plain("a", 5)], 3.0, 50.0)
    with pytest.raises(ConfigError, match="longer at the 90th"):
        with_pauses([tree], 3.0, 3.0)


@pytest.mark.parametrize(
    ("share", "ratio", "groups", "complaint"),
    [(1.5, 0.5, True, "between 0 and 1"), (0.5, -1.0, True, "at least 0"), (0.5, 0.5, False, "none to give")],
)
def test_subagents_that_cannot_be(share: float, ratio: float, groups: bool, complaint: str) -> None:
    found: list[Group] = recorded_groups([with_group()]) if groups else []
    with pytest.raises(ConfigError, match=complaint):
        with_subagents([plain("a", 9), plain("b", 9)], found, share, ratio, 1)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(2, 12), min_size=1, max_size=5), st.floats(0, 1), st.floats(0, 2), st.integers(0, 99))
def test_whatever_is_asked_for_sessions_stay_sound(turns: list[int], share: float, ratio: float, seed: int) -> None:
    trees = [*(plain(f"p{n}", count) for n, count in enumerate(turns)), with_group("own")]
    longer = lengthened(trees, 20.0, 10**9, seed)
    for one in with_subagents(longer, finer(recorded_groups(trees), 4.0), share, ratio, seed):
        sound(one)


def test_recorded_groups_of_public_sessions() -> None:
    groups = recorded_groups(load_traces([shared("weka")], split=False))
    assert [(len(group.members), group.requests) for group in groups] == [(1, 2), (3, 17), (2, 23), (3, 48), (2, 12)]
