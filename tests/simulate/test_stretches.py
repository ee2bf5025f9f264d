"""Turns that are taken together leave what turns taken one by one leave: the same lines, figures and engines."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

import pytest

from longturn.config import CacheConfig
from longturn.engine.loop import Engine
from longturn.simulate import replicas, stretches
from longturn.simulate.acceptance import Acceptance
from longturn.simulate.cost.step import StepShape
from longturn.simulate.pricing import shape_of, shapes_after
from longturn.simulate.replicas import EngineSpec
from longturn.simulate.runner import Outcome, Run, simulate
from tests.simulate.sessions import PlainModel, rules, run, spec, tree


class UnevenModel(PlainModel):
    """Steps whose time depends on everything in their shape, so that a wrong shape shows."""

    attend_limit = 700

    def step_ns(self, step: StepShape) -> int:
        seen = 17 * step.context_tokens + 29 * step.attended_tokens + 31 * step.samples + 37 * step.row_tokens
        return super().step_ns(step) + seen % 9_973 * 101

    def parts_ns(self, step: StepShape) -> Mapping[str, float]:
        return {"all": float(self.step_ns(step))}


def both(engines: EngineSpec, load: Run, monkeypatch: pytest.MonkeyPatch) -> tuple[Outcome, Outcome, list[int]]:
    """A run whose turns are taken one by one, since every engine's events are asked for, and one as usual. Their lines
    are compared; how often `Engine.step` was called in each, and how many turns were held."""
    calls: list[int] = []
    step = Engine.step

    def counted(self: Engine) -> Any:
        calls[-1] += 1
        return step(self)

    monkeypatch.setattr(Engine, "step", counted)
    taken = stretches.Ahead.take

    def checked(self: stretches.Ahead, now_ns: int) -> int:
        turns = taken(self, now_ns)
        self._engine.check_invariants()
        return turns

    monkeypatch.setattr(stretches.Ahead, "take", checked)
    outcomes, found, held = [], [], 0
    for one_by_one in (True, False):
        lines: list[str] = []
        calls.append(0)
        outcomes.append(simulate(engines, load, lines.append, engine_events=one_by_one))
        found.append([line for line in lines if not line.startswith("engine ")])
        held += sum(" hold " in line for line in lines)
    assert found[0] == found[1] and found[0]
    return outcomes[0], outcomes[1], [*calls, held]


def load_of(
    seed: int, lanes: int = 4, duration_s: float = 8.0, start: int = 800, step: int = 200, out: int = 900, **more: Any
) -> Run:
    """Sessions drawn by `seed`; start and step, in blocks of 4 tokens, and out are the most that they may have."""
    draw = random.Random(seed)
    trees = [
        tree(
            f"t{n}",
            turns=draw.randint(2, 6),
            start=draw.randint(2, start),
            step=draw.randint(1, step),
            out=draw.randint(1, out),
            pause=draw.choice([0.0, 0.3, 2.0]),
        )
        for n in range(6)
    ]
    return run(trees, lanes, seed=seed, rules=rules(duration_s), **more)


def hosted(engines: EngineSpec, slots: int, copy_ns: int) -> EngineSpec:
    return dataclasses.replace(engines, info=dataclasses.replace(engines.info, host_pages=slots), copy_ns=copy_ns)


SMALL = {"lanes": 6, "start": 300, "step": 60, "out": 400, "duration_s": 12.0}
CASES: dict[str, tuple[EngineSpec, dict[str, Any]]] = {
    "plain": (spec(UnevenModel()), {}),
    "pages run out": (spec(UnevenModel(), pages=100), {"lanes": 6}),
    "preemption": (
        spec(UnevenModel(), pages=30, scheduler={"expected_output_tokens": 1}),
        {"lanes": 8, "start": 100, "step": 30, "out": 1500, "duration_s": 8.0},
    ),
    "host memory": (hosted(spec(UnevenModel(), pages=60), 90, 400_000), SMALL),
    "slow host memory": (hosted(spec(UnevenModel(), pages=50), 60, 9_000_000), SMALL),
    "drafts": (dataclasses.replace(spec(UnevenModel(tokens_per_row=4)), acceptance=Acceptance((0.8, 0.5, 0.2), 3)), {}),
    "two engines": (spec(UnevenModel(), pages=80, engines=2), {"lanes": 5, "router": "least-loaded"}),
    "lockstep": (spec(UnevenModel(), pages=80, engines=2, lockstep=2), {}),
    "held turns": (
        spec(UnevenModel(), pages=60, scheduler={"recompute_share": 0.003}),
        {"lanes": 8, "step": 60, "out": 200},
    ),
    "target": (spec(UnevenModel(), scheduler={"target_itl_ms": 3.0}), {"lanes": 6}),
    "scaled": (dataclasses.replace(spec(UnevenModel()), scale=1.3), {"request_ns": 5_000_000}),
    "no run-ahead": (spec(UnevenModel(), scheduler={"run_ahead": False}), {}),
    "host time": (spec(UnevenModel(host=300_000)), {}),
    "no caching": (dataclasses.replace(spec(UnevenModel()), cache=CacheConfig(prefix_caching=False)), {}),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", CASES)
def test_turns_together_are_turns_one_by_one(name: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engines, more = CASES[name]
    one_by_one, together, calls = both(engines, load_of(seed, **more), monkeypatch)
    assert together == one_by_one
    if name in ("lockstep", "no run-ahead"):
        assert calls[0] == calls[1], "nothing is foreseen of these"
    elif name == "preemption":
        assert together.preemptions > 0 or seed
    elif name == "held turns":
        assert calls[2] > 10
    elif "host memory" in name:
        assert together.loaded_pages > 0 and together.evictions > 50
    elif name in ("plain", "drafts", "two engines"):
        assert calls[1] < calls[0] / 4, "most turns are taken together"


def test_a_run_that_is_given_up_counts_the_turns_up_to_then(monkeypatch: pytest.MonkeyPatch) -> None:
    trees = [tree(f"t{n}", turns=8, start=20, step=2, out=9000) for n in range(4)]
    load = run(trees, 4, rules=rules(10.0, drain_s=1.5))
    one_by_one, together, calls = both(spec(UnevenModel()), dataclasses.replace(load, seed=3), monkeypatch)
    assert one_by_one.measurement.conduct.undrained > 0
    assert together == one_by_one and calls[1] < calls[0] / 4


def test_turns_are_not_looked_at_before_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two engines whose stretches are overtaken by arrivals: each wakes only where it has something to do."""
    wakes = 0
    take = replicas.Replica.take

    def counted(self: replicas.Replica, now_ns: int) -> Any:
        nonlocal wakes
        wakes += 1
        return take(self, now_ns)

    monkeypatch.setattr(replicas.Replica, "take", counted)
    done = simulate(spec(UnevenModel(), engines=2), load_of(5))
    assert 0 < wakes < done.tally.steps / 4


def test_shapes_after_a_step_are_those_of_its_rows_further_on() -> None:
    from longturn.engine.records import decode_work

    starts = [5, 690, 697, 3000]
    work = decode_work(range(4), starts)
    for steps, found in enumerate(shapes_after(work, 12, 4, 700), 1):
        assert found == shape_of(decode_work(range(4), [start + steps for start in starts]), 4, 700)


def test_an_idle_engine_has_no_stretch() -> None:
    replica = replicas.make_replicas(spec())[0]
    assert replica.engine.stretch() is None
