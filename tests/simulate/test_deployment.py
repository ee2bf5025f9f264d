"""From platform, model and layout to engines; what does not fit says so in one line."""

from __future__ import annotations

import dataclasses

import pytest

from longturn.errors import ConfigError
from longturn.simulate.acceptance import Acceptance
from longturn.simulate.cost.memory import chip_memory, transfer_ns
from longturn.simulate.cost.options import CostOptions
from longturn.simulate.cost.step import StepShape
from longturn.simulate.deployment import Target, engine_spec, parse_deployment
from longturn.simulate.drafts import load_drafter
from longturn.simulate.formats import formats_named
from longturn.simulate.platform import load_platform
from longturn.simulate.shapes import load_shape
from longturn.simulate.sweep import candidates
from longturn.simulate.what_if import amdahl, parse_speedups, time_factors


def target(platform: str = "b300", **more: object) -> Target:
    found = Target(load_platform(platform), load_shape("m3"), formats_named("nvfp4"), CostOptions())
    return dataclasses.replace(found, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "name", "replicas", "chips"),
    [("tp4", "tp4", 1, 4), ("dp2tp4", "dp2tp4", 2, 8), ("dp2", "dp2tp1", 2, 2), ("dep4", "dep4", 1, 4),
     ("dp3ep2", "dp3ep2", 3, 6), ("tp8ep4", "tp8ep4", 1, 8)],
)  # fmt: skip
def test_deployments(text: str, name: str, replicas: int, chips: int) -> None:
    found = parse_deployment(text)
    assert (found.name, found.replicas, found.chips) == (name, replicas, chips)
    assert parse_deployment(found.name) == found


@pytest.mark.parametrize("text", ["dp0tp4", "dp2dp2", "xx4", "dp2tp", ""])
def test_bad_deployments(text: str) -> None:
    with pytest.raises(ConfigError, match="layout"):
        parse_deployment(text)


def test_pages_are_what_the_chips_hold() -> None:
    one = target()
    deployment = parse_deployment("tp4")
    memory = chip_memory(one.platform, one.shape, deployment.layout, one.formats)
    spec = engine_spec(one, deployment)
    assert (spec.info.pages, spec.info.page_bytes, spec.info.host_pages) == (memory.pages, memory.page_bytes, 0)
    assert (spec.engines, spec.lockstep, spec.scheduler.step_tokens) == (1, 1, 8192)
    two = engine_spec(dataclasses.replace(one, host_bytes=100 * 10**9), deployment)
    assert (two.info.pages, two.info.host_pages) == (memory.pages, 100 * 10**9 // memory.page_bytes)
    assert two.copy_ns == pytest.approx(transfer_ns(one.platform, memory.page_bytes, 16) / 16, abs=1)
    less = engine_spec(dataclasses.replace(one, memory_share=0.8), deployment)
    assert less.info.pages < memory.pages


def test_ranks_with_attention_of_their_own_are_engines_in_lockstep() -> None:
    spec = engine_spec(target(), parse_deployment("dp2dep4"))
    assert (spec.engines, spec.lockstep) == (8, 4)


def test_a_time_between_tokens_is_that_of_a_step_by_the_tokens_it_brings() -> None:
    acceptance = Acceptance((0.9, 0.6), 3)
    options = CostOptions(drafter=load_drafter("eagle3-gqa-m3", 2))
    drafted = target(options=options, acceptance=acceptance, settings={"scheduler.target_itl_ms": 8.0})
    spec = engine_spec(drafted, parse_deployment("tp4"))
    assert spec.scheduler.target_itl_ms == pytest.approx(8.0 * 2.5) and spec.acceptance is acceptance
    assert spec.scheduler.step_tokens == 8192 and spec.model.tokens_per_row == 3


def test_what_does_not_fit_says_by_how_much() -> None:
    with pytest.raises(ConfigError, match=r"m3 in layout tp1 does not fit on b300: .* short by [\d.]+ GiB"):
        engine_spec(target(), parse_deployment("tp1"))


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"scheduler.steps": 3}, "unknown setting 'scheduler.steps'"),
        ({"server.port": 3}, "scheduler.* and cache.*"),
        ({"cache.memory_bytes": 3}, "cache.memory_bytes"),
        ({"scheduler.step_tokens": 0}, "scheduler.step_tokens"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, object], complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        engine_spec(target(settings=settings), parse_deployment("tp4"))
    assert complaint in str(error.value)


def test_more_host_memory_than_there_is() -> None:
    with pytest.raises(ConfigError, match="403 GB of host memory a chip, 999 GB"):
        engine_spec(target(host_bytes=999 * 10**9), parse_deployment("tp4"))


def test_a_serial_loop_does_not_hide_host_time() -> None:
    spec = engine_spec(target(settings={"scheduler.run_ahead": False}), parse_deployment("tp4"))
    overlapped = engine_spec(target(), parse_deployment("tp4"))
    step = StepShape(rows=1, row_tokens=1, context_tokens=50_000, attended_tokens=2048, samples=1)
    assert spec.model.step_ns(step) > overlapped.model.step_ns(step)
    assert spec.model.exposed_ns(step) == 0 < overlapped.model.exposed_ns(step)


def test_candidates_have_every_layout_once_and_end_at_the_limit() -> None:
    names = [one.name for one in candidates(8)]
    assert len(names) == len(set(names)) and {"tp1", "tp2", "ep4", "dep8", "tp8ep4"} <= set(names)
    assert max(one.chips for one in candidates(7)) == 4


def test_speedups_and_amdahl_by_hand() -> None:
    assert parse_speedups(["attend=2", "experts=1.25"]) == {"sparse_attend": 2.0, "dense_attend": 2.0, "experts": 1.25}
    assert time_factors({"experts": 1.25}) == {"experts": 0.8}
    assert amdahl({"experts": 0.5, "host": 0.5}, {"experts": 2.0}) == pytest.approx(1 / 0.75)
    assert amdahl({}, {"experts": 2.0}) == 1.0


@pytest.mark.parametrize("text", ["attend", "attend=", "attend=0", "attend=-1", "attend=inf", "magic=2"])
def test_speedups_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match="kernel"):
        parse_speedups([text])
    with pytest.raises(ConfigError, match="has a factor already"):
        parse_speedups(["attend=2", "sparse_attend=3"])
