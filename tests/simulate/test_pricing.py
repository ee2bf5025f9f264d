"""From plans to shapes and times."""

from __future__ import annotations

import pytest

from longturn.engine.records import RowWork
from longturn.simulate.cost.options import KERNELS, CostOptions, HostTime
from longturn.simulate.cost.step import StepShape, step_shape
from longturn.simulate.drafts import load_drafter
from longturn.simulate.pricing import PlatformModel, shape_of
from tests.simulate.helpers import EXACT, cost


def test_a_plans_work_is_rows_and_chunks() -> None:
    work = [RowWork(0, 9999, 1, True), RowWork(1, 99, 1, True), RowWork(2, 256, 512, True), RowWork(3, 0, 64, False)]
    assert shape_of(work, 1, 2048) == step_shape(
        [10_000, 100], [(256, 512), (0, 64)], attend_limit=2048, chunk_samples=1
    )
    assert shape_of([], 1, 2048) == StepShape()


def test_a_drafters_rows_compute_their_drafts_too() -> None:
    work = [RowWork(0, 9996, 1, True), RowWork(1, 96, 1, True), RowWork(2, 256, 512, True)]
    assert shape_of(work, 4, 2048) == StepShape(2, 8, 10_100, 4 * (2048 + 100), ((256, 512),), 9)


def test_a_platforms_steps_are_the_cost_models() -> None:
    built = cost(options=CostOptions(drafter=load_drafter("eagle3-gqa-m3", 3), graphs=EXACT))
    model = PlatformModel(built)
    assert (model.tokens_per_row, model.attend_limit) == (4, 2048)
    shape = StepShape(2, 8, 10_100, 4 * (2048 + 100), ((256, 512),), 9)
    assert model.step_ns(shape) == built.step_ns(shape)
    parts = model.parts_ns(shape)
    assert sum(parts.values()) == pytest.approx(built.step_ns(shape), abs=1)
    assert set(parts) == {*KERNELS, "host"}


def test_host_time_is_exposed_only_where_it_overlaps_otherwise() -> None:
    overlapped, serial = (
        PlatformModel(cost(options=CostOptions(host=HostTime(step_ns=500, row_ns=10, overlap=overlap))))
        for overlap in (True, False)
    )
    step = StepShape(rows=2, row_tokens=2, context_tokens=200, samples=2)
    assert (overlapped.exposed_ns(step), serial.exposed_ns(step)) == (520, 0)
