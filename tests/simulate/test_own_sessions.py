"""Our own measured runs: the sessions' rules, and points in one file."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import pytest

from longturn.bench.traces.load import load_traces
from longturn.errors import ConfigError
from longturn.simulate.cost.routing import UNIFORM
from longturn.simulate.own_replay import Done
from longturn.simulate.own_sessions import (
    FIGURES,
    MOST_GAP_S,
    MOST_OUTPUT,
    MOST_TOKENS,
    MOST_TURNS,
    SessionFigure,
    SessionPoint,
    figures_of,
    ordered,
    own_sessions,
    own_trees,
    run_residual,
    session_lines,
    step_scale,
)
from longturn.simulate.published import compare_own
from longturn.simulate.published_data import OWN_RUNS, Group, groups
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
    assert all(one.judged != one.fitted for one in found)
    assert all(abs(one.error) < 0.08 for one in found if one.judged)
    assert all(abs(one.error) < 0.05 for one in decode)
    for group in groups(path=OWN_RUNS):
        assert not (group.values.get("use") == "fitted" and group.judged), group.name


def test_the_routing_of_random_weights_is_even() -> None:
    for group in groups(path=OWN_RUNS):
        if group.values.get("family") == "longturn":
            assert group.routing == UNIFORM, group.name


def point(name: str, predicted: float, measured: float, *, band: float = 0.1, **more: Any) -> SessionPoint:
    """A point whose speed goes as steps do, to some power."""
    power = more.pop("power", 1.0)
    slow, fast = predicted / (1 + band) ** power, predicted / (1 - band) ** power
    figure = SessionFigure("p90_tok_s_user", predicted, slow, fast, measured)
    given = {"judged": True, "note": "", "sessions": 1, "requests": 9, "measured_requests": 9, **more}
    return SessionPoint(name, "h200", figures=(figure,), band=band, run_band=0.0, **given)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_how_much_longer_steps_would_be_as_measured(power: float) -> None:
    found = step_scale(point("one", 100.0, 100.0 / 1.07**power, power=power))
    assert found == pytest.approx(1.07)
    assert step_scale(point("none", 100.0, 90.0, band=0.0)) is None
    assert step_scale(dataclasses.replace(point("none", 100.0, 90.0), figures=())) is None


def test_runs_differ_by_the_mean_of_their_squares() -> None:
    found = [point("a", 100.0, 100.0 / 1.03), point("b", 100.0, 100.0 / 0.96)]
    assert run_residual(found) == pytest.approx(((0.03**2 + 0.04**2) / 2) ** 0.5, rel=1e-3)
    assert run_residual([]) == 0.0


def test_a_figure_is_inside_its_band_or_not() -> None:
    assert SessionFigure("total_tok_s", 10.0, 9.0, 11.0, 9.5).inside
    assert not SessionFigure("total_tok_s", 10.0, 9.0, 11.0, 11.5).inside
    # A chaotic run: both ends lie on one side.
    assert SessionFigure("total_tok_s", 10.0, 11.0, 12.0, 10.5).inside
    assert SessionFigure("total_tok_s", 12.0, 11.0, 11.5, 10.0).error == pytest.approx(0.2)


def test_figures_of_requests_by_hand() -> None:
    done = [
        Done(
            sent_ns=0, first_ns=10**6, end_ns=10**6 + 9 * 10**6, prompt_tokens=100, output_tokens=10, cached_tokens=90
        ),
        Done(
            sent_ns=10**8, first_ns=10**8 + 3 * 10**6, end_ns=10**9, prompt_tokens=300, output_tokens=1, cached_tokens=0
        ),
    ]
    found = figures_of(done)
    assert found["p90_tok_s_user"] == found["p50_tok_s_user"] == 1000.0
    assert found["ttft_p50_ms"] == found["ttft_p90_ms"] == 3.0
    assert found["total_tok_s"] == 411.0 and found["hit_rate"] == 90 / 400


def cut(group: Group, seconds: int) -> Group:
    """A group's first two points, shorter."""
    listed = {name: value[:2] for name, value in group.values.items() if name in ("sessions", "requests", *FIGURES)}
    return dataclasses.replace(group, values={**group.values, **listed, "seconds": seconds})


def test_measured_sessions_simulate_with_a_band() -> None:
    trees = load_traces([shared("weka")], split=False)
    assert len(own_trees(trees)) == 52, "as many as were measured"
    ours, _, peer = groups("sessions", path=OWN_RUNS)
    found = own_sessions([cut(ours, 13), cut(peer, 13)], trees)
    assert [(one.sessions, one.judged) for one in found] == [(1, True), (4, True), (1, False), (4, False)]
    one, four, *others = found
    for mine, its in ((one, four), (four, one)):
        # The run's share of the band is what the other point says, and never the point's own.
        scale = step_scale(its)
        assert scale is not None
        assert mine.run_band == pytest.approx(abs(scale - 1.0), abs=0.02)
        assert mine.band > mine.run_band > 0.0
    assert all(other.run_band == 0.0 for other in others), "other engines' runs say nothing of ours"
    for figure in (*one.figures, *four.figures):
        assert figure.predicted > 0 and figure.band[0] <= figure.predicted <= figure.band[1]
    lines = session_lines(found)
    assert any("(not judged: " in line for line in lines)
    inside = sum(figure.inside for figure in (*one.figures, *four.figures) if figure.name != "hit_rate")
    assert lines[-1] == f"h200 sessions: {inside} of 8 judged figures within their band"


def test_a_run_never_makes_its_own_band() -> None:
    """One session measured at half of its speed widens the band of four sessions, and not its own."""
    ours, *_ = groups("sessions", path=OWN_RUNS)
    short = cut(ours, 13)
    first, second = short.numbers("p90_tok_s_user")
    wrong = dataclasses.replace(short, values={**short.values, "p90_tok_s_user": [first / 2, second]})
    one, four = own_sessions([wrong], load_traces([shared("weka")], split=False))
    assert four.run_band > 0.5 > 0.2 > one.run_band


def test_the_measured_order_of_the_peers_sessions() -> None:
    """The medians of prompts and answers that were published with its points, from the turns that it had time for."""
    trees = load_traces([shared("weka")], split=False)
    *_, peer = groups("sessions", path=OWN_RUNS)
    turns = [tree.root.requests[1:] for tree in ordered(peer, own_trees(trees))[:4]]
    assert statistics.median(turn.input_tokens for turn in turns[0][:9]) == 110_044
    assert statistics.median(turn.output_tokens for turn in turns[0][:9]) == 473
    four = [turn for some, count in zip(turns, (8, 9, 10, 9), strict=True) for turn in some[:count]]
    assert statistics.median(turn.input_tokens for turn in four) == 101_203.5
    assert statistics.median(turn.output_tokens for turn in four) == 357


def test_our_sessions_are_those_of_the_peer() -> None:
    """Its order, and the medians that our run printed of the 13 turns that one session had time for."""
    trees = load_traces([shared("weka")], split=False)
    ours, _, peer = groups("sessions", path=OWN_RUNS)
    assert ours.number("order_seed") == peer.number("order_seed")
    first = ordered(ours, own_trees(trees))[0].root.requests[1:14]
    assert statistics.median(turn.input_tokens for turn in first) == 112_034
    assert statistics.median(turn.output_tokens for turn in first) == 473


def test_too_few_sessions_are_one_line() -> None:
    ours, *_ = groups("sessions", path=OWN_RUNS)
    few = [tree(f"t{number}", turns=12) for number in range(3)]
    with pytest.raises(ConfigError, match="4 sessions at once, 3 qualify in these traces"):
        own_sessions([ours], few)
