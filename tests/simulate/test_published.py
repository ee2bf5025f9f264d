"""The model beside published points: the stated targets, the held-out rule, and the closed form against stepping."""

from __future__ import annotations

import pytest

from longturn.simulate.cost.options import KERNELS, CostOptions
from longturn.simulate.cost.step import step_shape
from longturn.simulate.published import (
    Comparison,
    compare,
    fixed_length_tpot_ns,
    mean_absolute_error,
    not_modelled,
    report_lines,
)
from longturn.simulate.published_data import OWN_RUNS, groups
from tests.simulate.helpers import cost


@pytest.fixture(scope="module")
def points() -> tuple[Comparison, ...]:
    return compare()


def judged(points: tuple[Comparison, ...], kind: str) -> list[Comparison]:
    return [point for point in points if point.judged and point.kind == kind]


def test_fixed_length_points_are_within_ten_percent_on_average(points: tuple[Comparison, ...]) -> None:
    chosen = judged(points, "tpot")
    assert len(chosen) == 10
    assert mean_absolute_error(chosen) < 0.10


def test_measured_decode_steps_are_within_ten_percent_on_average(points: tuple[Comparison, ...]) -> None:
    chosen = judged(points, "decode")
    assert len(chosen) == 6
    assert mean_absolute_error(chosen) < 0.10


def test_held_out_rubin_experts_are_within_seven_percent_on_average(points: tuple[Comparison, ...]) -> None:
    chosen = judged(points, "experts")
    assert len(chosen) == 28
    assert mean_absolute_error(chosen) < 0.07


def test_slower_points_are_predicted_slower(points: tuple[Comparison, ...]) -> None:
    for name in {point.group for point in judged(points, "tpot")}:
        mine = [point for point in points if point.group == name]
        by_prediction = sorted(mine, key=lambda point: point.predicted)
        assert by_prediction == sorted(mine, key=lambda point: point.published)


def test_nothing_is_both_fitted_and_judged() -> None:
    for group in groups():
        assert not (group.values.get("use") == "fitted" and group.judged), group.name
        assert not (group.values.get("family") == "longturn" and group.judged), "fitted to the same steps"


def test_every_group_is_predicted_or_listed_with_a_reason(points: tuple[Comparison, ...]) -> None:
    listed = not_modelled()
    assert all(entry.reason and entry.source for entry in listed)
    ours = groups("listed", path=OWN_RUNS)
    assert {point.group for point in points} | {entry.group for entry in listed} == {
        group.name for group in (*groups(), *ours)
    }


def test_the_report_shows_each_point_and_each_mean(points: tuple[Comparison, ...]) -> None:
    lines = report_lines(points)
    assert sum("mean absolute error" in line for line in lines) >= len({point.group for point in points})
    assert len(lines) > len(points)


@pytest.mark.parametrize(("requests", "inputs"), [(1, 4096), (4, 1024), (16, 8192), (32, 8192)])
def test_the_closed_form_against_stepping_through_it(requests: int, inputs: int) -> None:
    """A loop that admits a prompt's chunks one step at a time, decodes everything else, and starts the next request
    when one ends. Its mean time per output token must come out as the closed form says."""
    model = cost("h200", "m3", "tp8", "mxfp8", CostOptions(family="vllm-0.24"))
    outputs, chunk_tokens, limit = 256, 8192, model.shape.attend_limit
    running = [[inputs + (outputs * i) // requests, 0, 0] for i in range(requests)]  # context, first seen, made
    for i, entry in enumerate(running):
        entry[2] = (outputs * i) // requests
    waiting: list[int] = []
    now, seen = 0, []
    for step in range(6 * outputs):
        pieces: list[tuple[int, int]] = []
        if waiting:
            done = waiting[0]
            count = min(chunk_tokens, inputs - done)
            pieces, waiting[0] = [(done, count)], done + count
        now += model.step_ns(step_shape([entry[0] for entry in running], pieces, attend_limit=limit))
        for entry in running:
            entry[0] += 1
            entry[2] += 1
        ended = [entry for entry in running if entry[2] >= outputs]
        running = [entry for entry in running if entry[2] < outputs]
        for entry in ended:
            if step > 2 * outputs:
                seen.append((now - entry[1]) / (outputs - 1))
            waiting.append(0)
        if waiting and waiting[0] >= inputs:
            waiting.pop(0)
            running.append([inputs + 1, now, 1])
    expected, _ = fixed_length_tpot_ns(model, requests, inputs, outputs, chunk_tokens)
    assert seen
    assert expected == pytest.approx(sum(seen) / len(seen), rel=0.06)


def test_concurrency_one_is_the_decode_step_alone() -> None:
    model = cost("h200", "m3", "tp8", "mxfp8", CostOptions(family="vllm-0.24"))
    ns, band = fixed_length_tpot_ns(model, 1, 1024, 1024, 8192)
    assert ns == model.step_ns(step_shape([1024 + 512], attend_limit=2048))
    assert 0 < band < 1


def test_kernels_have_names_once() -> None:
    assert len(set(KERNELS)) == len(KERNELS) == 14
