from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longturn.bench.hit_rate import HitRate, hit_rate, prompt_hits, total
from longturn.bench.synth import RequestKey
from longturn.bench.traces.load import load_shipped, load_traces
from longturn.bench.traces.mooncake import parse_mooncake
from longturn.bench.traces.stat import trace_stat
from longturn.bench.traces.tree import SessionTree
from longturn.bench.traces.weka import parse_weka
from longturn.bench.tree_hits import replay_hit_rate
from tests.bench.make_traces import EXAMPLE, row, session, shared, tree


def by_hand(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Hit blocks of each prompt, by comparing it with every prompt before it."""
    found = []
    for number, prompt in enumerate(prompts):
        best = 0
        for earlier in prompts[:number]:
            same = 0
            while same < min(len(prompt), len(earlier)) and prompt[same] == earlier[same]:
                same += 1
            best = max(best, same)
        found.append(best)
    return found


def test_the_worked_example_of_the_format() -> None:
    found = parse_weka(json.dumps(EXAMPLE).encode(), "t.json")
    assert [(hit.conversation, hit.index, hit.hit_blocks, hit.blocks) for hit in prompt_hits([found])] == [
        (0, 0, 0, 4),
        (1, 0, 0, 3),
        (0, 1, 4, 7),
    ]
    assert hit_rate([found]).by_blocks == pytest.approx(4 / 14)
    assert hit_rate([found]).by_tokens == pytest.approx(4 * 64 / 960)


def test_nothing_hashed_has_no_rate() -> None:
    assert hit_rate([tree([row(0, [], tail=9)])]) == HitRate(0, 0, 0, 9)
    assert hit_rate([tree([row(0, [], tail=9)])]).by_blocks is None
    assert (total([]).by_blocks, total([]).by_tokens) == (None, 0.0)


@st.composite
def prompts(draw: st.DrawFn) -> list[list[int]]:
    """Block ids that are prefixes of one another as a format has them: an id stands for one prefix."""
    ids: dict[tuple[int, ...], int] = {}
    made = []
    for content in draw(st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=10)):
        paths = [tuple(content[: end + 1]) for end in range(len(content))]
        made.append([ids.setdefault(path, len(ids)) for path in paths])
    return made


@given(prompts())
def test_hits_equal_those_of_comparing_all_prompts(made: list[list[int]]) -> None:
    rows = [row(2.0 * number, ids, tail=1) for number, ids in enumerate(made)]
    found = tree(rows, split=False)
    assert [hit.hit_blocks for hit in prompt_hits([found])] == by_hand(made)
    # The same prompts as sessions of one namespace, which share a cache.
    lines = [
        {"timestamp": 1000 * number, "input_length": 512 * len(ids) + 1, "output_length": 1, "hash_ids": ids}
        for number, ids in enumerate(made)
    ]
    sessions = parse_mooncake("\n".join(map(json.dumps, lines)).encode(), "t.jsonl")
    assert [hit.hit_blocks for hit in prompt_hits(sessions[::-1])] == by_hand(made)
    assert [hit.cached_tokens for hit in prompt_hits(sessions)] == [512 * hit for hit in by_hand(made)]


def test_sessions_share_no_cache_unless_they_share_ids() -> None:
    data = session([row(0, [1, 2])])
    one, two = (parse_weka(json.dumps(data | {"id": name}).encode(), name) for name in "ab")
    assert hit_rate([one, two]).hit_blocks == 0
    mooncake = load_shipped("arrivals.jsonl")
    # By arrival: [0 1 2] 0, [0 3] 1, then the session's [0 1 4] 2, [0 1 5 6] 2, [0 1 5 7 8] 3, and [9] 0.
    assert hit_rate(mooncake).hit_blocks == 8
    assert hit_rate(mooncake[::-1]).hit_blocks == 8


def test_cached_tokens_stop_at_the_end_of_a_partial_block() -> None:
    first = load_shipped("arrivals.jsonl")[0]
    again = hit_rate([first, first])
    assert (again.hit_blocks, again.cached_tokens, again.input_tokens) == (3, 1300, 2600)


def _keys(found: SessionTree) -> list[RequestKey]:
    return [RequestKey(found.id, hit.conversation, hit.index) for hit in prompt_hits([found])]


def test_trace_statistics_and_a_replay_of_everything_say_the_same() -> None:
    (found,) = load_shipped("workshop.json")
    assert replay_hit_rate([found], _keys(found)) == trace_stat([found]).sessions[0].hit.by_blocks
    # Sent once more, everything counts once more; the cache is what was recorded, not what was sent.
    assert replay_hit_rate([found], _keys(found) * 2) == hit_rate([found]).by_blocks


def test_recorded_sessions_say_the_same_too() -> None:
    for found in load_traces(sorted(shared("weka").glob("*.json.gz"))[:3]):
        assert replay_hit_rate([found], _keys(found)) == hit_rate([found]).by_blocks
