"""The planner, driven through virtual time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.bench.lanes import LiveTree, Send, to_ns
from longturn.bench.presets import PRESETS, Rules, rules_of
from longturn.bench.schedule import Schedule, start_point_s
from longturn.bench.synth import RequestKey
from longturn.bench.traces.load import load_shipped, shipped_traces
from longturn.bench.traces.tree import SessionTree
from longturn.errors import ConfigError
from tests.bench.make_traces import EXAMPLE, row, tree
from tests.bench.test_traces_split import histories

FREE = replace(rules_of("quick"), tree_idle_s=None, system_idle_s=None, window=(0.0, 0.0), duration_s=1000.0)
"""Nothing capped; t* is the session's start, so that nothing comes before it."""

Row = tuple[Send, int]
"""What was sent, and when it ended."""


def drive(schedule: Schedule, service_ns: Callable[[Send], int], check: Callable[[], None] | None = None) -> list[Row]:
    """Run to the end in virtual time: every send at its due time, every answer `service_ns` after it."""
    now, rows = 0, []
    flying: list[tuple[int, int, Send]] = []
    numbers = itertools.count()
    while True:
        for send in schedule.due(now):
            assert send.due_ns <= now
            assert send.due_ns == now, "virtual time skipped a due time"
            end = now + service_ns(send)
            heapq.heappush(flying, (end, next(numbers), send))
            rows.append((send, end))
        if check is not None:
            check()
        times = [at for at in (schedule.next_ns(), flying[0][0] if flying else None) if at is not None]
        if not times:
            return rows
        now = min(times)
        while flying and flying[0][0] == now:
            schedule.answered(heapq.heappop(flying)[2], now)


def named(rows: Sequence[Row]) -> list[tuple[int, int, float]]:
    """(conversation, request, due in seconds)."""
    return [(send.key.conversation, send.key.index, send.due_ns / 1e9) for send, _ in rows]


def example() -> SessionTree:
    return tree(EXAMPLE["requests"], block=64, tool_tokens=100, system_tokens=28)


def one_session(rules: Rules, found: SessionTree, service_s: float) -> list[tuple[int, int, float]]:
    rows = drive(Schedule([found], rules, 1, 1, "r"), lambda send: to_ns(service_s))
    return named([item for item in rows if item[0].recycle == 0])


def test_pauses_count_from_answers_and_joins_wait_for_their_subagents() -> None:
    # Root: 2 s of work, the subagent 0.5 s after it, the next turn 4.5 s after it and not before the subagent's end.
    assert one_session(FREE, example(), 1.0) == [(0, 0, 0.0), (1, 0, 1.5), (0, 1, 5.5)]
    assert one_session(FREE, example(), 10.0) == [(0, 0, 0.0), (1, 0, 10.5), (0, 1, 20.5)]


def test_a_lane_takes_the_next_session_when_the_whole_tree_has_ended() -> None:
    rows = drive(Schedule([example()], replace(FREE, duration_s=15.0), 1, 1, "r"), lambda send: to_ns(1.0))
    assert [(send.recycle, *rest) for (send, _), rest in zip(rows, named(rows), strict=True)] == [
        (0, 0, 0, 0.0),
        (0, 1, 0, 1.5),
        (0, 0, 1, 5.5),
        (1, 0, 0, 6.5),
        (1, 1, 0, 8.0),
        (1, 0, 1, 12.0),
        (2, 0, 0, 13.0),
        (2, 1, 0, 14.5),
    ], "nothing is sent from second 15 on"


def test_a_background_agent_keeps_its_tree_alive() -> None:
    late = {
        "t": 2.0, "type": "subagent", "agent_id": "a", "requests": [row(2.0, [9, 10], api=1.0), row(60.0, [9, 10, 11])],
    }  # fmt: skip
    found = tree([row(0.0, [0, 1], api=1.0), late, row(5.0, [0, 1, 2], api=1.0)])
    assert found.conversations[1].join_before is None
    rows = drive(Schedule([found], replace(FREE, duration_s=70.0), 1, 1, "r"), lambda send: to_ns(1.0))
    assert [(s.recycle, s.key.conversation, s.key.index) for s, _ in rows][:5] == [
        (0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (1, 0, 0),
    ]  # fmt: skip
    assert rows[4][0].due_ns == rows[3][1]


def test_an_idle_cap_moves_all_timers_by_the_same_time() -> None:
    side = {"t": 101.0, "type": "subagent", "agent_id": "a", "requests": [row(101.0, [9, 10], api=40.0)]}
    found = tree([row(0.0, [0, 1], api=1.0), side, row(130.0, [0, 1, 2], api=1.0)])
    assert (found.conversations[1].spawn_after, found.conversations[1].join_before) == (0, None)
    plain = one_session(FREE, found, 1.0)
    assert plain == [(0, 0, 0.0), (1, 0, 101.0), (0, 1, 130.0)]
    # 100 s of pause become 7 s; the root stays 29 s behind the subagent, until the pause after that is cut too.
    for rules in (replace(FREE, tree_idle_s=7.0), replace(FREE, system_idle_s=7.0)):
        assert one_session(rules, found, 1.0) == [(0, 0, 0.0), (1, 0, 8.0), (0, 1, 16.0)]
    assert one_session(replace(FREE, tree_idle_s=40.0), found, 1.0) == [(0, 0, 0.0), (1, 0, 41.0), (0, 1, 70.0)]


def test_the_system_is_idle_only_when_no_lane_works() -> None:
    found = [tree([row(0.0, [0, 1], api=1.0), row(31.0, [0, 1, 2])]), tree([row(0.0, [0, 1], api=1.0)])]
    other = replace(found[1], id="long", namespace="long")
    rules = replace(FREE, system_idle_s=2.0, duration_s=50.0)

    def service(send: Send) -> int:
        return to_ns(20.0 if send.key.tree_id == "long" else 1.0)

    rows = drive(Schedule([found[0], other], rules, 2, 1, "r"), service)
    second = next(send for send, _ in rows if send.key.tree_id == "s" and send.key.index == 1)
    assert second.due_ns == to_ns(31.0), "the other lane never rests"


def test_start_points_are_in_the_window_and_differ_by_lane() -> None:
    found = tree([row(10.0 * n, list(range(n + 2))) for n in range(11)])
    points = [start_point_s(found, lane, 42, (0.25, 0.75)) for lane in range(50)]
    assert all(25.0 <= at <= 75.0 for at in points)
    assert len(set(points)) == 50 and max(points) - min(points) > 30
    assert points == [start_point_s(found, lane, 42, (0.25, 0.75)) for lane in range(50)]
    assert points[0] != start_point_s(found, 0, 43, (0.25, 0.75))
    assert start_point_s(found, 0, 1, (1.0, 1.0)) == 100.0


def test_a_session_starts_in_its_middle_with_its_past_warmed() -> None:
    found = example()
    keys = [RequestKey(found.id, number, index) for number, index in ((0, 0), (1, 0))]
    live = LiveTree(found, 0, 0, "m", t_star_s=6.0)  # the subagent is done, the root's second turn to come
    assert live.warm_up(0) == keys[:1]
    assert live.warm_up(1) == keys and live.warm_up(10) == keys
    assert [(send.key.conversation, send.key.index, send.due_ns) for send in live.pending()] == [(0, 1, to_ns(0.5))]
    live = LiveTree(found, 0, 0, "m", t_star_s=1.0)  # the subagent is to come, 1.5 s from here
    assert live.warm_up(0) == keys[:1]
    assert [(send.key.conversation, send.due_ns) for send in live.pending()] == [(1, to_ns(1.5))]
    assert LiveTree(found, 0, 0, "m", t_star_s=0.0).warm_up(10) == []


def test_lanes_are_aligned_and_the_first_request_goes_at_once() -> None:
    rows = [row(10.0 * n, list(range(n + 2)), api=1.0) for n in range(11)]
    trees = [replace(tree(rows), id=f"t{n}", namespace=f"t{n}") for n in range(3)]
    rules = replace(FREE, window=(0.25, 0.75))
    schedule = Schedule(trees, rules, 3, 7, "r")
    waits = {}
    for live in schedule.lanes:
        assert live.t_star_s == start_point_s(live.tree, live.lane, 7, (0.25, 0.75))
        waits[live.lane] = -live.t_star_s % 10.0
    first = min(waits.values())
    found = {send.lane: send.due_ns / 1e9 for send in schedule.upcoming()}
    assert found == pytest.approx({lane: wait - first for lane, wait in waits.items()}, abs=1e-6)
    assert schedule.upcoming()[0].due_ns == 0


def test_sessions_are_spread_evenly_and_by_the_seed_alone() -> None:
    trees = [replace(tree([row(0.0, [0, 1])]), id=f"t{n}", namespace=f"t{n}") for n in range(5)]

    def taken(seed: int, service: Callable[[Send], int]) -> dict[int, list[str]]:
        rows = drive(Schedule(trees, replace(FREE, duration_s=20.0), 2, seed, "r"), service)
        lanes: dict[int, list[str]] = {0: [], 1: []}
        for send, _ in rows:
            lanes[send.lane].append(send.key.tree_id)
        return lanes

    even = taken(1, lambda send: to_ns(1.0))
    uneven = taken(1, lambda send: to_ns(0.7 if send.lane else 1.3))
    order = [name for pair in zip(even[0], even[1], strict=True) for name in pair]
    assert all(sorted(order[n : n + 5]) == [f"t{k}" for k in range(5)] for n in range(0, 40, 5))
    for lane in (0, 1):
        assert all(a == b for a, b in zip(even[lane], uneven[lane], strict=False)), "a slow server changes no choice"
    assert even != taken(2, lambda send: to_ns(1.0))


def test_markers_are_new_for_each_replay_and_run() -> None:
    def markers(run: str) -> list[str]:
        schedule = Schedule([example()], replace(FREE, duration_s=30.0), 2, 1, run)
        found = [live.marker for live in schedule.lanes]
        drive(schedule, lambda send: to_ns(1.0))
        return found + [live.marker for live in schedule.finished[2:] + schedule.lanes]

    first = markers("a")
    assert len(set(first)) == len(first) > 5
    assert first == markers("a") and not set(first) & set(markers("b"))


def test_an_overflow_ends_its_session_and_counts_what_it_skips() -> None:
    found = tree([row(float(n), list(range(n + 2)), api=0.5) for n in range(6)])
    schedule = Schedule([found], replace(FREE, duration_s=100.0), 1, 1, "r")
    for _ in range(2):
        (send,) = schedule.due(schedule.next_ns() or 0)
        schedule.answered(send, send.due_ns + 1)
    (send,) = schedule.due(schedule.next_ns() or 0)
    schedule.answered(send, send.due_ns + 1, overflow=True)
    assert (send.key.index, schedule.skipped) == (2, 3)
    assert [live.abandoned for live in schedule.finished] == [True]
    assert schedule.upcoming()[0].key.index == 0 and schedule.lanes[0].recycle == 1


def test_an_overflow_waits_for_what_is_in_flight() -> None:
    side = {"t": 0.0, "type": "subagent", "agent_id": "a", "requests": [row(0.0, [9, 10]), row(5.0, [9, 10, 11])]}
    found = tree([row(0.0, [0, 1], api=3.0), side, row(4.0, [0, 1, 2])])
    schedule = Schedule([found], FREE, 1, 1, "r")
    sends = schedule.due(0)
    assert [send.key.conversation for send in sends] == [0, 1]
    schedule.answered(sends[0], 10, overflow=True)
    assert schedule.skipped == 2 and schedule.next_ns() is None and schedule.lanes[0].recycle == 0
    schedule.answered(sends[1], 20)
    assert schedule.lanes[0].recycle == 1 and schedule.next_ns() == 20


@settings(max_examples=40, deadline=None)
@given(
    st.lists(histories(), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 3),
    st.sampled_from([None, 0.5, 3.0]),
    st.sampled_from([None, 0.2]),
    st.integers(300, 3000),
)
def test_any_replay_keeps_the_rules(
    sessions: list[list[dict[str, Any]]],
    lanes: int,
    seed: int,
    tree_idle_s: float | None,
    system_idle_s: float | None,
    service_ms: int,
) -> None:
    trees = [replace(tree(rows), id=f"t{n}", namespace=f"t{n}") for n, rows in enumerate(sessions)]
    rules = replace(FREE, window=(0.0, 1.0), tree_idle_s=tree_idle_s, system_idle_s=system_idle_s, duration_s=40.0)

    def service(send: Send) -> int:
        return service_ms * 1_000_000 + send.key.conversation + 7 * send.key.index

    def make() -> Schedule:
        return Schedule(trees, rules, lanes, seed, "r")

    schedule = make()

    def check() -> None:
        assert len(schedule.lanes) == lanes
        if not schedule.closed:
            assert all(not live.done for live in schedule.lanes), "a lane without a tree"
            assert schedule.in_flight or schedule.upcoming(), "nothing will ever happen again"

    rows = drive(schedule, service, check)
    assert rows == drive(make(), service), "same seed, same schedule"
    assert all(send.due_ns < schedule.end_ns for send, _ in rows)
    ends = {(send.lane, send.recycle, send.key): end for send, end in rows}
    assert len(ends) == len(rows), "a request was sent twice"
    by_id = {found.id: found for found in trees}
    for send, _ in rows:
        found = by_id[send.key.tree_id]
        conversation = found.conversations[send.key.conversation]
        waits = []
        if send.key.index:
            waits.append(RequestKey(found.id, send.key.conversation, send.key.index - 1))
        elif conversation.parent is not None and conversation.spawn_after is not None:
            waits.append(RequestKey(found.id, conversation.parent, conversation.spawn_after))
        for number, child in enumerate(found.conversations):
            if child.parent == send.key.conversation and child.join_before == send.key.index:
                waits.append(RequestKey(found.id, number, len(child.requests) - 1))
        for key in waits:
            end = ends.get((send.lane, send.recycle, key))
            if end is None:
                assert send.recycle == 0, "only what lies before t* is not sent"
            else:
                assert send.due_ns >= end
        trees_before = [end for (lane, recycle, _), end in ends.items() if lane == send.lane and recycle < send.recycle]
        assert all(send.due_ns >= end for end in trees_before), "a lane holds one tree at a time"


@pytest.mark.parametrize("name", shipped_traces())
def test_every_request_of_a_whole_session_is_sent_once(name: str) -> None:
    trees = load_shipped(name)
    rules = replace(FREE, tree_idle_s=1.0, system_idle_s=1.0, duration_s=500.0)
    rows = drive(Schedule(trees, rules, 1, 3, "r"), lambda send: to_ns(0.1))
    by_id = {found.id: found for found in trees}
    last = max(send.recycle for send, _ in rows)
    assert last > len(trees)
    for recycle in range(last):
        keys = [send.key for send, _ in rows if send.recycle == recycle]
        assert len(keys) == len(set(keys)) == sum(1 for _ in by_id[keys[0].tree_id].requests())


def test_presets() -> None:
    assert [rules.preset for rules in PRESETS] == ["agentx", "agentx-mvp", "quick"]
    assert rules_of("agentx").duration_s == 3600 and rules_of("agentx", 60.0).duration_s == 60
    with pytest.raises(ConfigError, match="unknown preset 'fast'"):
        rules_of("fast")
    with pytest.raises(ConfigError, match="--duration"):
        rules_of("quick", 0)
    with pytest.raises(ConfigError, match="no session"):
        Schedule([], FREE, 1, 1, "r")
    with pytest.raises(ConfigError, match="at least 1"):
        Schedule([example()], FREE, 0, 1, "r")
