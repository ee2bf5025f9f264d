"""Our own measured runs: the sessions' rules, and points in one file."""

from __future__ import annotations

import pytest

from longturn.bench.traces.load import load_traces
from longturn.errors import ConfigError
from longturn.simulate.own_sessions import MOST_GAP_S, MOST_OUTPUT, MOST_TOKENS, MOST_TURNS, own_sessions, own_trees
from longturn.simulate.published import compare_own
from longturn.simulate.published_data import OWN_RUNS, groups
from tests.bench.make_traces import shared
from tests.simulate.sessions import tree


def test_the_rules_cut_a_session_where_they_say() -> None:
    long = tree("long", turns=30, start=100, step=10, out=5000, pause=9.0)
    (cut,) = own_trees([long, tree("short", turns=9)])
    turns = cut.root.requests
    assert len(cut.conversations) == 1 and len(turns) == 19
    assert turns[0].input_tokens == long.root.requests[11].input_tokens, "40 % of 30 turns, and the turn before"
    assert all(turn.input_tokens <= MOST_TOKENS and turn.output_tokens == MOST_OUTPUT for turn in turns)
    assert {turn.gap_s for turn in turns[1:]} == {MOST_GAP_S}
    assert [turn.start_s for turn in turns[:3]] == [0.0, 3.0, 6.0]
    (most,) = own_trees([tree("longer", turns=80, start=100, step=1)])
    assert len(most.root.requests) == MOST_TURNS


def test_nothing_that_qualifies_is_one_line() -> None:
    with pytest.raises(ConfigError, match="no session has 10 turns within 120,000 tokens"):
        own_trees([tree("short", turns=3)])


def test_our_measured_steps_are_predicted_one_for_one() -> None:
    found = compare_own()
    assert {one.kind for one in found} == {"decode", "turn", "mixed", "prefill"}
    assert all(one.predicted > 0 for one in found)
    decode = [one for one in found if one.kind == "decode"]
    assert not any(one.judged for one in decode), "constants are fitted to such steps"
    assert all(one.judged for one in found if one.kind != "decode")
    assert all(abs(one.error) < 0.15 for one in decode)
    for group in groups(path=OWN_RUNS):
        assert not (group.values.get("use") == "fitted" and group.judged), group.name


def test_our_sessions_simulate_with_a_band() -> None:
    trees = load_traces([shared("weka")], split=False)
    assert len(own_trees(trees)) == 52, "as many as were measured"
    (group,) = groups("sessions", path=OWN_RUNS)
    for one in own_sessions(group, trees):
        value, slow, fast = one.p90_tok_s_user
        assert slow < value < fast and one.requests > 2
        assert one.measured_p90_tok_s_user == pytest.approx(value, rel=0.5)
