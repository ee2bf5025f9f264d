from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longturn.bench.hit_rate import hit_rate
from longturn.bench.traces.load import load_shipped, load_traces, shipped_traces
from longturn.bench.traces.shrink import drop_long, scale_tree
from longturn.errors import ConfigError
from tests.bench.make_traces import row, shared, tree


def test_a_quarter_of_the_context_keeps_the_structure() -> None:
    (found,) = load_shipped("workshop.json")
    small = scale_tree(found, 0.25)
    assert (small.block_tokens, small.root.system_tokens) == (16, 32)
    # 300 = 4 blocks and 44, of which a quarter is 11; 70 output tokens are 17.5, rounded up.
    assert [(r.input_tokens, r.output_tokens) for r in small.root.requests][:1] == [(4 * 16 + 11, 18)]
    assert hit_rate([small]).hit_blocks == hit_rate([found]).hit_blocks
    assert [(c.parent, c.spawn_after, c.join_before) for c in small.conversations] == [
        (c.parent, c.spawn_after, c.join_before) for c in found.conversations
    ]
    assert [r.gap_s for r in small.requests()] == [r.gap_s for r in found.requests()]


@given(st.sampled_from(shipped_traces()), st.floats(0.0001, 1))
def test_scaled_prompts_still_hold_their_blocks(name: str, factor: float) -> None:
    for found in load_shipped(name):
        small = scale_tree(found, factor)
        for request, before in zip(small.requests(), found.requests(), strict=True):
            depth = small.trie.depth(request.node)
            assert request.input_tokens > max(0, (depth - 1) * small.block_tokens)
            assert request.input_tokens <= before.input_tokens and 1 <= request.output_tokens <= before.output_tokens
            if depth * found.block_tokens <= before.input_tokens:
                assert depth * small.block_tokens <= request.input_tokens
    assert scale_tree(found, 1.0) == found


@pytest.mark.parametrize("factor", [0.0, -1.0, 1.5, float("nan")])
def test_factors_out_of_range(factor: float) -> None:
    with pytest.raises(ConfigError, match="--scale-context must be above 0 and at most 1"):
        scale_tree(tree([row(0, [1])]), factor)


def test_long_requests_are_dropped_and_what_hung_on_them_moves() -> None:
    rows = [
        row(0, [1], out=4, api=1.0),
        row(3, [1, 2], out=4, api=1.0),
        row(6, [1, 2, 3], out=90, api=1.0),
        {"t": 8, "type": "subagent", "agent_id": "x", "requests": [row(8, [50], out=4), row(10, [50, 51], out=4)]},
        row(13, [1, 2, 3, 4], out=90, api=1.0),
        row(15, [1, 2, 9], out=4, api=1.0),
    ]
    found = tree(rows)
    assert [(c.spawn_after, c.join_before) for c in found.conversations] == [(None, None), (2, 3)]
    (small,), dropped = drop_long([found], 16)
    root, child = small.conversations
    assert dropped == 2
    assert [(r.start_s, r.gap_s) for r in root.requests] == [(0, 0), (3, 2), (15, 11)]
    # The pause after the last turn that is kept: from 4 s, when it was answered, to 8 s.
    assert (child.spawn_after, child.join_before, child.requests[0].gap_s) == (1, 2, 4.0)
    assert drop_long([found], 1000) == ([found], 0)
    assert drop_long([found], 5) == ([], 7)


def test_children_of_a_dropped_agent_go_with_it() -> None:
    inner = [row(3, [50], out=90), row(5.5, [60], model="tiny", out=1), row(8, [50, 51], out=90)]
    found = tree(
        [row(0, [1], out=1), {"t": 3, "type": "subagent", "agent_id": "x", "requests": inner}, row(12, [1, 2], out=1)]
    )
    assert [c.kind for c in found.conversations] == ["root", "subagent", "aux"]
    (small,), dropped = drop_long([found], 50)
    assert [c.kind for c in small.conversations] == ["root"] and dropped == 3


def test_recorded_sessions_shrink_to_any_limit() -> None:
    found = load_traces([shared("weka")])
    every = sum(1 for item in found for _ in item.requests())
    for limit in (256_000, 8_192):
        small, dropped = drop_long(found, limit)
        fits = sum(r.input_tokens + r.output_tokens <= limit for item in found for r in item.requests())
        left = sum(1 for item in small for _ in item.requests())
        assert left + dropped == every and left <= fits
        for item in small:
            for number, part in enumerate(item.conversations):
                assert all(r.input_tokens + r.output_tokens <= limit for r in part.requests)
                if part.parent is not None:
                    count = len(item.conversations[part.parent].requests)
                    assert part.parent < number
                    assert part.spawn_after is None or part.spawn_after < count
                    assert part.join_before is None or (part.spawn_after or 0) <= part.join_before < count


def test_nothing_but_the_context_changes() -> None:
    (found,) = load_shipped("workshop.json")
    small = scale_tree(found, 0.5)
    back = dataclasses.replace(
        small,
        block_tokens=found.block_tokens,
        conversations=tuple(
            dataclasses.replace(
                new,
                system_tokens=old.system_tokens,
                requests=tuple(
                    dataclasses.replace(n, input_tokens=o.input_tokens, output_tokens=o.output_tokens)
                    for n, o in zip(new.requests, old.requests, strict=True)
                ),
            )
            for new, old in zip(small.conversations, found.conversations, strict=True)
        ),
    )
    assert back == found
