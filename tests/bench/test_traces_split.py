from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.bench.traces.tree import SessionTree
from tests.bench.make_traces import row, tree


def shape(found: SessionTree) -> list[tuple[str, int | None, list[float]]]:
    """(kind, parent, starts) of each conversation."""
    return [(item.kind, item.parent, [request.start_s for request in item.requests]) for item in found.conversations]


BASE = [1, 2, 3, 4]


def test_turns_that_extend_are_one_agent() -> None:
    found = tree([row(0, [1]), row(2, [1, 2]), row(4, [1, 2]), row(9, [1, 2, 3])])
    assert shape(found) == [("root", None, [0, 2, 4, 9])]


def test_compaction_is_the_same_agent_if_nobody_uses_the_dropped_part() -> None:
    found = tree([row(0, BASE), row(2, [1, 2, 9]), row(4, [1, 2, 9, 10])])
    assert shape(found) == [("root", None, [0, 2, 4])]


def test_a_return_to_the_dropped_part_shows_two_agents() -> None:
    found = tree([row(0, BASE), row(2, [1, 2, 9]), row(4, [*BASE, 5]), row(6, [*BASE, 5, 6])])
    assert shape(found) == [("root", None, [0, 4, 6]), ("solo", 0, [2])]
    child = found.conversations[1]
    assert (child.spawn_after, child.join_before) == (0, 1)


def test_a_request_during_an_answer_is_another_agent() -> None:
    found = tree([row(0, [1], api=5.0), row(3, [1, 2], api=9.0, out=99), row(6, [1, 7]), row(20, [1, 7, 8])])
    assert shape(found) == [("root", None, [0, 6, 20]), ("solo", 0, [3])]
    child = found.conversations[1]
    # The root's first answer was not complete when the child started, so that it starts with the session.
    assert (child.spawn_after, child.join_before, child.requests[0].gap_s) == (None, 2, 3.0)


def test_another_model_is_another_agent() -> None:
    found = tree([row(0, [1]), row(2, [1, 2]), row(4, [1, 2, 3], model="small"), row(6, [1, 2, 3, 4])])
    assert shape(found) == [("root", None, [0, 2, 6]), ("aux", 0, [4])]
    assert found.conversations[1].id == "s::aux:1"


def test_a_small_fresh_context_is_a_side_call_and_a_long_one_is_an_agent() -> None:
    fresh = [row(k, [50, *range(60, 61 + k)]) for k in range(1, 8)]
    main = [row(20 + k, list(range(1, 3 + k))) for k in range(8)]
    assert shape(tree([row(0, [1]), row(0.5, [9]), *main[:2]]))[1][0] == "aux"
    found = shape(tree([row(0, [1]), *fresh, *main]))
    assert [item[0] for item in found] == ["root", "solo"] and len(found[1][2]) == 7


def test_much_input_for_few_words_is_a_reduction() -> None:
    big = list(range(1, 2200))
    found = tree([row(0, big), row(2, [*big[:2100], 9000], out=100), row(4, [*big, 9001], out=100)])
    assert [item.kind for item in found.conversations] == ["root", "reduction"]
    assert found.conversations[1].id == "s::aux:red:1"


def test_workers_that_fork_at_one_block_are_a_group() -> None:
    work = [row(10 + k / 10, [*BASE, 20 + k], api=5.0, out=99) for k in range(3)]
    found = tree([row(0, BASE), *work, row(20, [*BASE, 20, 30]), row(25, [*BASE, 20, 30, 31])])
    # The first worker looks like the main agent's next turn; the others fork beside it.
    assert shape(found) == [("root", None, [0, 10, 20, 25]), ("worker", 0, [10.1]), ("worker", 0, [10.2])]
    assert [item.id for item in found.conversations[1:]] == ["s::wg:0_1", "s::wg:0_2"]
    assert [(item.spawn_after, item.join_before) for item in found.conversations[1:]] == [(0, 2), (0, 2)]


def test_two_at_once_are_no_group() -> None:
    work = [row(10 + k / 10, [*BASE, 20 + k], api=5.0, out=99) for k in range(2)]
    found = tree([row(0, BASE), *work, row(20, [*BASE, 20, 30])])
    assert [item.kind for item in found.conversations] == ["root", "solo"]


def test_the_main_agent_is_the_one_with_most_turns() -> None:
    found = tree([row(0, [9], model="small"), row(1, [1]), row(3, [1, 2])])
    assert shape(found) == [("root", None, [1, 3]), ("aux", 0, [0])]
    # The call before the main agent's first ends before that one starts, so the main agent waits for it.
    assert (found.conversations[1].spawn_after, found.conversations[1].join_before) == (None, 0)


def test_agents_inside_a_subagent_and_subagents_of_a_found_agent() -> None:
    inner = [row(3, [50]), row(5, [50, 51]), row(5.5, [60], model="tiny"), row(8, [50, 51, 52])]
    entry: dict[str, Any] = {"t": 3, "type": "subagent", "agent_id": "x", "requests": inner}
    found = tree([row(0, [1]), entry, row(12, [1, 2])])
    assert [(item.id, item.kind, item.parent) for item in found.conversations] == [
        ("s", "root", None),
        ("s::sa:x", "subagent", 0),
        ("s::sa:x::aux:1", "aux", 1),
    ]
    other = [row(20 + 2 * k, [70, *range(80, 81 + k)]) for k in range(5)]
    late = {"t": 30, "type": "subagent", "agent_id": "y", "requests": [row(30, [90])]}
    rows = [row(k, list(range(1, 2 + k)), api=0.5) for k in range(8)]
    found = tree([*rows, *other, late])
    assert [(item.kind, item.parent) for item in found.conversations] == [("root", None), ("solo", 0), ("subagent", 1)]


def test_switched_off_the_list_is_one_agent() -> None:
    found = tree([row(0, [1], api=9.0), row(2, [7], model="small"), row(4, [1, 2])], split=False)
    assert shape(found) == [("root", None, [0, 2, 4])]


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Requests that extend, cut or leave earlier prompts, with overlaps."""
    prompts: list[list[int]] = [[0]]
    rows, at, fresh = [row(0, [0])], 0.0, 1
    for _ in range(draw(st.integers(1, 14))):
        earlier = draw(st.sampled_from(prompts))
        keep = draw(st.integers(0, len(earlier)))
        added = draw(st.integers(0 if keep else 1, 3))
        ids = [*earlier[:keep], *range(fresh, fresh + added)]
        fresh += added
        at += draw(st.sampled_from([0.0, 0.5, 2.0]))
        prompts.append(ids)
        rows.append(row(at, ids, api=draw(st.sampled_from([None, 0.4, 3.0])), model=draw(st.sampled_from("mmn"))))
    return rows


@settings(max_examples=150, deadline=None)
@given(histories())
def test_every_request_is_in_one_agent_and_the_tree_can_be_replayed(rows: list[dict[str, Any]]) -> None:
    found = tree(rows)
    places = sorted(request.place for request in found.requests())
    assert places == sorted(f"requests[{index}]" for index in range(len(rows)))
    for number, item in enumerate(found.conversations):
        starts = [request.start_s for request in item.requests]
        assert starts == sorted(starts) and len({request.model for request in item.requests}) == 1
        assert all(a.end_s <= b.start_s for a, b in zip(item.requests, item.requests[1:], strict=False))
        if number == 0:
            assert (item.parent, item.spawn_after, item.join_before) == (None, None, None)
            continue
        assert item.parent is not None and item.parent < number
        # A child must not wait for a request that waits for the child.
        assert item.join_before is None or item.join_before > (-1 if item.spawn_after is None else item.spawn_after)
        if item.join_before is not None:
            waits = found.conversations[item.parent].requests[item.join_before]
            assert waits.start_s >= item.end_s - 1.0


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_seam_keeps_at_least_one_block(cut: int) -> None:
    found = tree([row(0, BASE), row(2, [*BASE[:cut], 9]), row(4, [*BASE[:cut], 9, 10])])
    assert len(found.conversations) == 1
    found = tree([row(0, BASE), row(2, [9]), row(4, [9, 10])])
    assert len(found.conversations) == 2
