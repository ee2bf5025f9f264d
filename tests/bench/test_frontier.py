"""Frontiers against a brute-force twin and the textbook's formulae, written once more here."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longturn.bench.frontier import Place, frontier_of, non_dominated, ratios, shared_range

positive = st.floats(0.1, 1e6)
sweeps = st.lists(st.tuples(positive, positive), min_size=1, max_size=12)


def twin_non_dominated(points: list[tuple[float, float]]) -> set[tuple[float, float]]:
    return {
        (x, y)
        for x, y in points
        if not any(a >= x and b >= y and (a > x or b > y) for a, b in points)
    }  # fmt: skip


def twin_steffen(xs: np.ndarray, ys: np.ndarray, at: np.ndarray) -> np.ndarray:
    """Power form, after the paper's equations 2 to 5 and 11; ends as d3 draws them: second derivative zero.

    The paper: f(x) = a (x - x_i)^3 + b (x - x_i)^2 + c (x - x_i) + d with a = (y'_i + y'_{i+1} - 2 s_i) / h_i^2 and
    b = (3 s_i - 2 y'_i - y'_{i+1}) / h_i.
    """
    h = np.diff(xs)
    s = np.diff(ys) / h
    slope = np.zeros(len(xs))
    p = (s[:-1] * h[1:] + s[1:] * h[:-1]) / (h[:-1] + h[1:])
    same = np.sign(s[:-1]) == np.sign(s[1:])
    limit = 2 * np.minimum(np.abs(s[:-1]), np.abs(s[1:]))
    slope[1:-1] = np.where(same, np.sign(p) * np.minimum(np.abs(p), limit), 0.0)
    if len(xs) == 2:
        slope[:] = s[0]
    else:
        # f''(x_0) = 2 b_0 = 0 and f''(x_n) = 6 a h + 2 b = 0, each solved for the slope at that end.
        slope[0] = (3 * s[0] - slope[1]) / 2
        slope[-1] = (3 * s[-1] - slope[-2]) / 2
    i = np.clip(np.searchsorted(xs, at, side="right") - 1, 0, len(xs) - 2)
    a = (slope[i] + slope[i + 1] - 2 * s[i]) / h[i] ** 2
    b = (3 * s[i] - 2 * slope[i] - slope[i + 1]) / h[i]
    d = at - xs[i]
    result: np.ndarray = ((a * d + b) * d + slope[i]) * d + ys[i]
    return result


@given(sweeps)
def test_the_non_dominated_set_is_the_one_by_definition(points: list[tuple[float, float]]) -> None:
    kept = [points[index] for index in non_dominated(points)]
    assert set(kept) == twin_non_dominated(points)
    assert len(set(kept)) == len(kept), "of equal points one stays"
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
    assert [y for _, y in kept] == sorted((y for _, y in kept), reverse=True)


def test_a_frontier_by_hand() -> None:
    points = [(10.0, 100.0), (20.0, 80.0), (20.0, 90.0), (15.0, 85.0), (30.0, 10.0), (30.0, 10.0), (5.0, 100.0)]
    assert non_dominated(points) == [0, 2, 4]


def test_interpolation_equals_the_textbook_at_1000_points() -> None:
    draw = random.Random(4)
    compared = 0
    for _ in range(40):
        count = draw.randint(2, 9)
        xs = np.cumsum([draw.uniform(0.5, 40) for _ in range(count)])
        ys = np.cumsum([draw.uniform(1, 9000) for _ in range(count)])[::-1].copy()
        frontier = frontier_of(list(zip(xs.tolist(), ys.tolist(), strict=True)))
        assert frontier is not None
        at = np.array([draw.uniform(xs[0], xs[-1]) for _ in range(25)])
        for x, expected in zip(at.tolist(), twin_steffen(xs, ys, at).tolist(), strict=True):
            value = frontier.at(x)
            assert value.throughput == pytest.approx(expected, rel=1e-12)
            assert value.place is Place.INSIDE
            compared += 1
    assert compared == 1000


def test_one_piece_worked_out_on_paper() -> None:
    # x 0.. would be refused, so 1, 2, 4 with y 9, 8, 2: s = -1, -3; h = 1, 2; p = (-1*2 - 3*1)/3 = -5/3, so
    # m_1 = -min(1, 3, 5/6) * 2 = -5/3, m_0 = (3*-1 + 5/3)/2 = -2/3, m_2 = (3*-3 + 5/3)/2 = -11/3.
    frontier = frontier_of([(1.0, 9.0), (2.0, 8.0), (4.0, 2.0)])
    assert frontier is not None
    assert frontier.slopes == pytest.approx((-2 / 3, -5 / 3, -11 / 3))
    # In the middle of a Hermite piece: mean of the ends + h * (m_left - m_right) / 8.
    assert frontier.at(1.5).throughput == pytest.approx(8.5 + 1 * (-2 / 3 + 5 / 3) / 8)
    assert frontier.at(3.0).throughput == pytest.approx(5.0 + 2 * (-5 / 3 + 11 / 3) / 8)


@given(sweeps, st.floats(0, 1), st.floats(0, 1))
def test_the_curve_never_rises_and_stays_between_its_points(
    points: list[tuple[float, float]], one: float, other: float
) -> None:
    frontier = frontier_of(points)
    assert frontier is not None
    low, high = frontier.range
    a, b = sorted((low + one * (high - low), low + other * (high - low)))
    left, right = frontier.at(min(a, high)).throughput, frontier.at(min(b, high)).throughput
    assert frontier.throughput[-1] <= right <= left * (1 + 1e-9)
    assert left <= frontier.throughput[0]
    for x, y in zip(frontier.interactivity, frontier.throughput, strict=True):
        assert frontier.at(x).throughput == pytest.approx(y, rel=1e-9)


def test_outside_the_range_is_clamped_and_marked() -> None:
    frontier = frontier_of([(10.0, 100.0), (20.0, 50.0)])
    assert frontier is not None
    below, inside, above = frontier.at(9.99), frontier.at(15.0), frontier.at(20.01)
    assert (below.throughput, below.place, below.clamped) == (100.0, Place.BELOW, True)
    assert (inside.throughput, inside.place, inside.clamped) == (75.0, Place.INSIDE, False)
    assert (above.throughput, above.place, above.clamped) == (50.0, Place.ABOVE, True)
    assert not frontier.at(10.0).clamped
    assert not frontier.at(20.0).clamped


def test_one_point_is_a_frontier_without_width() -> None:
    frontier = frontier_of([(10.0, 100.0)])
    assert frontier is not None
    assert frontier.at(10.0).throughput == 100.0
    assert frontier.at(10.0).place is Place.INSIDE
    assert frontier.at(10.1).place is Place.ABOVE
    assert frontier_of([]) is None


def test_ratios_carry_the_marks_of_both_frontiers() -> None:
    value = frontier_of([(20.0, 120.0), (40.0, 60.0)])
    base = frontier_of([(10.0, 40.0), (30.0, 20.0)])
    assert value is not None
    assert base is not None
    inside, left, right = ratios(value, base, [25.0, 15.0, 35.0])
    assert inside.ratio == pytest.approx(105 / 25)
    assert not inside.clamped
    assert left.ratio == pytest.approx(120 / 35)
    assert (left.value.place, left.baseline.place, left.clamped) == (Place.BELOW, Place.INSIDE, True)
    assert (right.value.place, right.baseline.place, right.clamped) == (Place.INSIDE, Place.ABOVE, True)
    assert shared_range([value, base]) == (20.0, 30.0)
    assert shared_range([value]) == (20.0, 40.0)
    far = frontier_of([(100.0, 1.0)])
    assert far is not None
    assert shared_range([value, far]) is None
    assert shared_range([]) is None


@pytest.mark.parametrize("bad", [(0.0, 1.0), (1.0, -1.0), (math.nan, 1.0), (1.0, math.inf)])
def test_nonsense_is_refused(bad: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="finite and more than 0"):
        frontier_of([(1.0, 1.0), bad])
    frontier = frontier_of([(1.0, 1.0)])
    assert frontier is not None
    with pytest.raises(ValueError, match="not a number"):
        frontier.at(math.nan)
