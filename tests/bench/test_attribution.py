from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longturn.bench.attribution import Combination, Effect, Verdict, attribute, needed


def on(*names: str) -> Combination:
    return frozenset(names)


THREE = {
    # a doubles, b triples, c does nothing alone; a and b together are worth 1.5 more, and c adds 1.25 to both.
    on(): [10.0],
    on("a"): [20.0],
    on("b"): [30.0],
    on("c"): [10.0],
    on("a", "b"): [90.0],
    on("a", "c"): [20.0],
    on("b", "c"): [30.0],
    on("a", "b", "c"): [112.5],
}


def test_three_switches_with_a_known_interaction() -> None:
    found = attribute(["a", "b", "c"], THREE)
    assert (found.a, found.b, found.total.ratio) == pytest.approx((10.0, 112.5, 11.25))
    a, b, c = found.switches
    assert [s.on_alone and s.on_alone.ratio for s in (a, b, c)] == pytest.approx([2.0, 3.0, 1.0])
    # B without a is 30, without b 20, without c 90.
    assert [s.off_alone and s.off_alone.ratio for s in (a, b, c)] == pytest.approx([3.75, 5.625, 1.25])
    # 10 -> 20 -> 90 -> 112.5
    assert [s.in_sequence and s.in_sequence.ratio for s in (a, b, c)] == pytest.approx([2.0, 4.5, 1.25])
    assert found.interaction is not None
    assert found.interaction.ratio == pytest.approx(1.875)  # 11.25 / (2 * 3 * 1)
    # Shares are of logarithms: log 2 / log 11.25.
    assert found.share(a.on_alone) == pytest.approx(0.28638, abs=1e-5)
    assert sum(found.share(s.in_sequence) or 0.0 for s in found.switches) == pytest.approx(1.0)
    # Mean over the six orders for c: 1.25 only when it comes last, twice in six.
    assert c.mean_of_orders is not None
    assert c.mean_of_orders.log == pytest.approx(math.log(1.25) / 3)
    assert found.run_spread is None
    assert found.total.verdict is Verdict.UNKNOWN


def test_the_order_changes_the_sequence_and_nothing_else() -> None:
    found = attribute(["c", "b", "a"], THREE)
    assert [s.name for s in found.switches] == ["c", "b", "a"]
    # 10 -> 10 -> 30 -> 112.5
    assert [s.in_sequence and s.in_sequence.ratio for s in found.switches] == pytest.approx([1.0, 3.0, 3.75])
    assert found.interaction is not None
    assert found.interaction.ratio == pytest.approx(1.875)


def test_a_share_smaller_than_the_spread_of_runs_is_noise() -> None:
    runs = {on(): [100.0, 102.0], on("x"): [101.0, 103.0], on("y"): [200.0, 204.0], on("x", "y"): [201.0, 207.0]}
    found = attribute(["x", "y"], runs)
    x, y = found.switches
    # By hand: spreads of each pair around its mean, in logs.
    squares = sum((math.log(high / low) / 2) ** 2 * 2 for low, high in runs.values())
    assert found.run_spread == pytest.approx(math.sqrt(squares / 4))
    assert found.degrees_of_freedom == 4
    assert x.on_alone is not None and y.on_alone is not None
    # A difference of two means of two runs each: variance s^2 / 2 + s^2 / 2. t of 4 degrees is 2.776.
    assert x.on_alone.margin == pytest.approx(2.776 * math.sqrt(squares / 4))
    assert x.on_alone.verdict is Verdict.NOISE
    assert y.on_alone.verdict is Verdict.REAL
    # The interaction adds four means with weight 1.
    assert found.interaction is not None
    assert found.interaction.margin == pytest.approx(2.776 * math.sqrt(squares / 4) * math.sqrt(2))
    assert found.interaction.verdict is Verdict.NOISE


def test_no_shares_of_a_whole_that_is_noise() -> None:
    found = attribute(["x"], {on(): [100.0, 103.0], on("x"): [101.0, 104.0]})
    assert found.total.verdict is Verdict.NOISE
    assert found.share(found.switches[0].on_alone) is None


def test_what_was_not_measured_is_not_told() -> None:
    runs = {key: value for key, value in THREE.items() if key not in (on("a"), on("a", "c"))}
    a, b, c = attribute(["a", "b", "c"], runs).switches
    assert (a.on_alone, a.in_sequence, b.off_alone, b.in_sequence) == (None, None, None, None)
    assert a.off_alone is not None and b.on_alone is not None and c.in_sequence is not None
    assert [s.mean_of_orders for s in (a, b, c)] == [None] * 3
    assert attribute(["a", "b", "c"], runs).interaction is None


def test_combinations_that_are_needed() -> None:
    assert needed(["x"]) == [on(), on("x")]
    assert set(needed(["a", "b", "c"])) == set(THREE)
    four = needed(["a", "b", "c", "d"])
    assert four[:2] == [on(), on("a", "b", "c", "d")]
    assert len(four) == len(set(four)) == 2 + 4 + 4 + 1  # only a+b is neither alone nor without one


@pytest.mark.parametrize(
    ("switches", "runs", "message"),
    [
        ([], {}, "switches must be there"),
        (["x", "x"], {}, "once each"),
        (["x"], {on(): [1.0]}, "B has no run"),
        (["x"], {on("x"): [1.0], on(): []}, "A has no run"),
        (["x"], {on(): [1.0], on("x"): [0.0]}, "more than 0"),
        (["x"], {on(): [1.0], on("x"): [math.nan]}, "finite"),
    ],
)
def test_bad_input(switches: list[str], runs: dict[Combination, Sequence[float]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attribute(switches, runs)


@given(st.integers(1, 4), st.data())
def test_identities_hold_and_independent_switches_have_no_interaction(count: int, data: st.DataObject) -> None:
    names = [f"s{number}" for number in range(count)]
    combinations = [frozenset(c) for size in range(count + 1) for c in itertools.combinations(names, size)]
    figures = {c: [data.draw(st.floats(0.1, 10.0))] for c in combinations}
    found = attribute(names, figures)
    for part in ("in_sequence", "mean_of_orders"):
        assert sum(getattr(s, part).log for s in found.switches) == pytest.approx(found.total.log, abs=1e-9)
    # The mean over all orders, order by order.
    first = found.switches[0]
    added = []
    for order in itertools.permutations(names):
        before = frozenset(order[: order.index(first.name)])
        added.append(math.log(figures[before | {first.name}][0] / figures[before][0]))
    assert first.mean_of_orders is not None
    assert first.mean_of_orders.log == pytest.approx(sum(added) / len(added), abs=1e-9)
    factors = {name: data.draw(st.floats(0.5, 2.0)) for name in names}
    product = {c: [7.0 * math.prod(factors[name] for name in c)] for c in combinations}
    plain = attribute(names, product)
    assert plain.interaction is not None
    assert plain.interaction.log == pytest.approx(0.0, abs=1e-9)
    for switch in plain.switches:
        for effect in (switch.on_alone, switch.off_alone, switch.in_sequence, switch.mean_of_orders):
            assert effect is not None
            assert effect.ratio == pytest.approx(factors[switch.name])


def test_a_loss_is_as_real_as_a_gain() -> None:
    found = attribute(["x"], {on(): [200.0, 204.0], on("x"): [100.0, 102.0]})
    assert found.total.ratio == pytest.approx(0.5)
    assert found.total.verdict is Verdict.REAL


@pytest.mark.parametrize(("runs", "quantile"), [(2, 4.303), (5, 2.306), (16, 2.042), (30, 2.0)])
def test_margins_use_students_t_of_the_pooled_degrees(runs: int, quantile: float) -> None:
    """Two configurations of so many runs: 2 * (runs - 1) degrees of freedom; from tables, 2.0 beyond 30."""
    figures = [math.exp(0.01 * (-1) ** n) for n in range(runs)]
    found = attribute(["x"], {on(): figures, on("x"): figures})
    assert found.degrees_of_freedom == 2 * (runs - 1) and found.run_spread is not None
    assert found.total.margin == pytest.approx(quantile * found.run_spread * math.sqrt(2 / runs))
    assert found.interaction == Effect(0.0, 0.0), "one switch has nothing to interact with"
    assert attribute(["x"], {on(): [1.0], on("x"): [2.0]}).interaction == Effect(0.0, None)
