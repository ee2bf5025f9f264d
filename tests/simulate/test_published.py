"""The model beside published points: the stated targets, the held-out rule, and the closed form against stepping."""

from __future__ import annotations

import math

import pytest

from longturn.simulate.cost.options import KERNELS, CostOptions
from longturn.simulate.cost.step import StepShape, step_shape
from longturn.simulate.published import (
    COOL_NS,
    Comparison,
    compare,
    fixed_length_tpot_ns,
    mean_absolute_error,
    not_modelled,
    prefill_steps,
    report_lines,
    steps_ns,
    sustained,
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


@pytest.mark.parametrize(("tokens", "prompts", "together"), [(4096, 1, 1), (4096, 5, 2), (8192, 3, 1), (20_000, 2, 1)])
def test_cold_prompts_are_computed_once_and_share_steps_only_with_others(
    tokens: int, prompts: int, together: int
) -> None:
    steps = prefill_steps(tokens, 8192, prompts)
    assert sum(step.chunk_tokens for step in steps) == tokens * prompts
    assert max(len(step.chunks) for step in steps) == min(together, prompts)
    assert all(step.chunk_tokens <= 8192 and step.samples == len(step.chunks) for step in steps)


def test_a_chip_at_its_power_limit_computes_slower_and_streams_as_before() -> None:
    model = cost("h200", "m3-slice8", "tp1", "bf16", CostOptions(family="vllm-0.24"))
    hot = sustained(model)
    chunk, decode = StepShape(chunks=((0, 8192),), samples=1), step_shape([131_072], attend_limit=2048)
    assert model.step_ns(chunk) < hot.step_ns(chunk) < model.step_ns(chunk) / 0.9
    assert hot.step_ns(decode) == pytest.approx(model.step_ns(decode), rel=0.01)
    # The first 0.1 s are not yet slow, all after them are.
    count = math.ceil(COOL_NS / model.step_ns(chunk))
    cool, _ = steps_ns(model, [chunk] * count)
    assert cool == count * model.step_ns(chunk)
    assert steps_ns(model, [chunk] * (count + 2))[0] == pytest.approx(cool + 2 * hot.step_ns(chunk), abs=1)
    other = cost("b200", "m3", "tp8", "nvfp4")
    assert sustained(other) is other, "no such figure is known of other chips"


def test_how_often_bands_hold_is_said(points: tuple[Comparison, ...]) -> None:
    lines = report_lines(points)
    for platform in ("h200", "vr-nvl72"):
        mine = [point for point in points if point.judged and point.platform == platform]
        inside = sum(abs(point.predicted - point.published) <= point.band * point.published for point in mine)
        assert f"{platform}: {inside} of {len(mine)} judged figures within their band" in lines


def test_concurrency_one_is_the_decode_step_alone() -> None:
    model = cost("h200", "m3", "tp8", "mxfp8", CostOptions(family="vllm-0.24"))
    ns, band = fixed_length_tpot_ns(model, 1, 1024, 1024, 8192)
    assert ns == model.step_ns(step_shape([1024 + 512], attend_limit=2048))
    assert 0 < band < 1


def test_kernels_have_names_once() -> None:
    assert len(set(KERNELS)) == len(KERNELS) == 15
