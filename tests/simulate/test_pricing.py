"""Rounds of steps: with a drafter several engine steps stand for one verified step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longturn.engine.records import RowWork
from longturn.simulate.cost.options import KERNELS, CostOptions, HostTime
from longturn.simulate.cost.step import StepShape
from longturn.simulate.drafts import load_drafter
from longturn.simulate.pricing import PlatformModel, Pricer
from tests.simulate.helpers import EXACT, cost
from tests.simulate.sessions import PlainModel


def decode(rows: int, at: int = 100) -> list[RowWork]:
    return [RowWork(row, at, 1, True) for row in range(rows)]


def test_without_a_drafter_every_step_is_its_own_round() -> None:
    pricer = Pricer(PlainModel(fixed=100, row=10, token=1))
    assert pricer.price(decode(3), idle=False) == (130, 130)
    assert pricer.price([*decode(2), RowWork(5, 0, 64, True)], idle=False) == (184, 184)
    assert pricer.round == (StepShape(2, 2, 202, 0, ((0, 64),), 3), 184)


def test_an_idle_device_waits_for_the_host() -> None:
    pricer = Pricer(PlainModel(fixed=100, row=0, host=7))
    assert [pricer.price(decode(1), idle=idle).ns for idle in (True, False)] == [107, 100]


@pytest.mark.parametrize("accepted", [1.0, 1.78, 2.0, 2.78, 3.51])
def test_as_many_steps_as_tokens_are_accepted_cost_one_verified_step(accepted: float) -> None:
    pricer = Pricer(PlainModel(fixed=1000, row=0, tokens_per_row=4, accepted=accepted))
    steps = [pricer.price(decode(2), idle=False) for _ in range(1000)]
    rounds = 1000 / accepted
    assert sum(price.ns for price in steps) == pytest.approx(1000 * rounds, rel=0.01)
    assert {price.ns for price in steps} <= {0, 1000}, "tokens of a round come at once"
    assert sum(price.told_ns for price in steps) == pytest.approx(1000 * rounds, rel=0.01)
    assert max(price.told_ns for price in steps) == round(1000 / accepted), "the scheduler learns an even time"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 200)), min_size=1, max_size=40))
def test_a_round_costs_what_its_rows_and_chunks_cost_together(steps: list[tuple[int, int]]) -> None:
    model = PlainModel(fixed=1000, row=10, token=1, accepted=3.0)
    pricer = Pricer(model)
    spent, rows, chunks = 0, 0, 0
    for count, chunk in steps:
        if pricer.ends_round:
            spent = rows = chunks = 0
        work = decode(count) + ([RowWork(9, 128, chunk, False)] if chunk else [])
        spent += pricer.price(work, idle=False).ns
        rows, chunks = max(rows, count), chunks + chunk
        shape, paid = pricer.round
        assert (shape.rows, shape.chunk_tokens, paid) == (rows, chunks, spent)
        assert paid == model.step_ns(StepShape(rows=rows, chunks=((0, chunks),)))


def test_a_prompts_end_ends_the_round_and_gives_back_what_was_left_of_it() -> None:
    pricer = Pricer(PlainModel(fixed=1000, row=0, token=0, accepted=3.0))
    alone = [pricer.price([RowWork(0, 0, 64, True)], idle=True).ns]
    alone += [pricer.price(decode(1), idle=False).ns for _ in range(4)]
    assert alone == [1000, 1000, 0, 0, 1000], "the row's first tokens wait for a verified step"
    pricer = Pricer(PlainModel(fixed=1000, row=0, token=0, accepted=3.0))
    beside = [pricer.price([*decode(1), RowWork(1, 0, 64, True)], idle=False).ns]
    beside += [pricer.price(decode(2), idle=False).ns for _ in range(6)]
    assert beside == [1000, 1000, 0, 0, 0, 0, 1000], "six tokens for two verified steps, as without the prompt"


def test_the_scale_of_a_band_multiplies_steps() -> None:
    work = [*decode(3), RowWork(5, 0, 64, True)]
    one, other = (Pricer(PlainModel(), scale=scale).price(work, idle=False).ns for scale in (1.0, 1.5))
    assert other == round(1.5 * one)


def test_a_platforms_steps_are_the_cost_models() -> None:
    drafter = load_drafter("eagle3-gqa-m3", 3)
    built = cost(options=CostOptions(drafter=drafter, graphs=EXACT))
    model = PlatformModel(built)
    assert (model.tokens_per_row, model.accepted, model.attend_limit) == (4, 2.78, 2048)
    pricer = Pricer(model)
    price = pricer.price([RowWork(0, 9996, 1, True), RowWork(1, 96, 1, True), RowWork(2, 256, 512, True)], idle=False)
    shape = StepShape(2, 8, 10_100, 4 * (2048 + 100), ((256, 512),), 9)
    assert pricer.round == (shape, built.step_ns(shape)) and price.ns == built.step_ns(shape)
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
