"""Platforms known by their steps alone: fitting, the file, simulating."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from longturn.errors import ConfigError
from longturn.simulate.cost.step import StepShape
from longturn.simulate.linear import (
    LinearModel,
    ServedModel,
    StepConstants,
    StepsPlatform,
    is_steps_platform,
    linear_spec,
    load_steps_platform,
    steps_platform_text,
)
from longturn.simulate.linear_fit import TimedRequest, TimedStep, fit_request_ns, fit_run, fit_steps
from longturn.simulate.runner import simulate
from tests.simulate.sessions import run, tree

CONSTANTS = StepConstants(
    fixed_ns=3e6, row_ns=4e5, context_ns=90.0, chunk_ns=1e5, chunk_token_ns=2e5, pair_ns=30.0, host_ns=2e4,
    request_ns=1e6, rms=0.05, worst=0.1, steps=20,
)  # fmt: skip
PLATFORM = StepsPlatform(
    name="mine",
    title='A "small" machine',
    chip="abacus",
    source="measured",
    date="2026-11-29",
    model=ServedModel("tiny", "q4_1", "fp16", 200, 1024, 8, 8192, 1000),
    constants=CONSTANTS,
    settings={"scheduler.step_tokens": 256, "cache.prefix_caching": True},
)


def steps() -> list[StepShape]:
    found = [StepShape(rows=n, context_tokens=n * c, samples=n) for n in (1, 2, 4, 8) for c in (100, 1000, 4000)]
    found += [StepShape(chunks=((start, count),)) for start in (0, 1000, 4000) for count in (16, 64, 256)]
    return [*found, StepShape(rows=2, context_tokens=900, chunks=((512, 128),), samples=2)]


def test_a_step_by_hand() -> None:
    step = StepShape(rows=2, context_tokens=900, chunks=((4, 2),), samples=2)
    parts = LinearModel(CONSTANTS).parts_ns(step)
    # Positions 4 and 5 attend to 5 and 6 positions.
    assert parts == {"host": 2e4, "fixed": 3e6, "rows": 8e5, "contexts": 81_000.0, "chunks": 1e5 + 4e5 + 11 * 30.0}
    assert LinearModel(CONSTANTS).step_ns(step) == round(sum(parts.values()))


def test_the_fit_finds_the_constants_behind_noisy_steps() -> None:
    noise = random.Random(3)
    model = LinearModel(CONSTANTS)
    timed = [TimedStep(step, model.step_ns(step) * noise.uniform(0.99, 1.01)) for step in steps() * 3]
    found = fit_steps(timed, host_ns=2e4)
    assert found.rms < 0.01 and found.steps == len(timed)
    for step in steps():
        assert LinearModel(found).step_ns(step) == pytest.approx(model.step_ns(step), rel=0.02)


def test_too_few_steps_are_refused() -> None:
    some = [TimedStep(step, 1e6) for step in steps()]
    with pytest.raises(ConfigError, match="at least 12"):
        fit_steps(some[:5], 0.0)
    with pytest.raises(ConfigError, match="steps with chunks"):
        fit_steps([one for one in some if not one.step.chunks], 0.0)


def test_what_a_request_waits_beside_its_steps() -> None:
    model = LinearModel(CONSTANTS)
    ns = sum(model.step_ns(StepShape(chunks=(chunk,), samples=1)) for chunk in ((100, 256), (356, 44)))
    requests = [TimedRequest(100, 400, ns + 2e4 + extra) for extra in (3e6, 5e6, 90e6)]
    assert fit_request_ns(CONSTANTS, requests, 256) == pytest.approx(5e6)
    assert fit_request_ns(CONSTANTS, [TimedRequest(0, 100, 1.0)], 256) == 0.0
    with pytest.raises(ConfigError):
        fit_request_ns(CONSTANTS, [], 256)


def test_what_a_run_adds_joins_the_band_and_nothing_else() -> None:
    model = LinearModel(CONSTANTS)

    def request(prompt: int, output: int, factor: float) -> TimedRequest:
        each = model.step_ns(StepShape(rows=1, row_tokens=1, context_tokens=prompt + output // 2, samples=1))
        return TimedRequest(0, prompt, 1e6, output, factor * each * (output - 1))

    seen = [request(100, 40, 1.08), request(900, 7, 1.08), request(3000, 200, 5.0), request(10, 1, 1.0)]
    assert fit_run(CONSTANTS, seen) == pytest.approx(0.08, rel=1e-3), "the median, of those with two tokens"
    assert fit_run(CONSTANTS, [request(100, 40, 0.9)]) == pytest.approx(0.1, rel=1e-3)
    with pytest.raises(ConfigError, match="no measured request has two tokens"):
        fit_run(CONSTANTS, [request(10, 1, 1.0)])
    longer = LinearModel(dataclasses.replace(CONSTANTS, run=0.08))
    for step in steps():
        assert longer.band(step) == pytest.approx(model.band(step) + 0.08)
        assert longer.step_ns(step) == model.step_ns(step)


def test_a_file_without_the_optional_constant_reads_as_one_without_runs(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(steps_platform_text(PLATFORM).replace("run = 0.0\n", ""))
    assert load_steps_platform(path).constants.run == 0.0


def test_the_file_holds_the_platform(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(steps_platform_text(PLATFORM))
    assert is_steps_platform(path) and load_steps_platform(path) == PLATFORM
    assert not is_steps_platform(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("row_ns = 400000.0", "row_ns = -1.0", "row_ns"),
        ("row_ns = 400000.0\n", "", "missing 'row_ns'"),
        ("pages = 200", "pages = 1", "pages"),
        ('chip = "abacus"', 'chip = " "', "chip must be a text"),
        ('chip = "abacus"', 'chip = "abacus"\nspeed = 3', "unknown key 'speed'"),
        ("[settings]", "[settings", "cannot be read as TOML"),
    ],
)
def test_damaged_files_are_one_line(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    path = tmp_path / "mine.toml"
    text = steps_platform_text(PLATFORM)
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ConfigError, match=r"mine\.toml") as error:
        load_steps_platform(path)
    assert complaint in str(error.value) and "\n" not in str(error.value)


def test_the_engine_that_was_measured_is_simulated() -> None:
    spec = linear_spec(PLATFORM, {"scheduler.max_running": 4})
    assert (spec.info.pages, spec.scheduler.step_tokens, spec.scheduler.max_running) == (200, 256, 4)
    done = simulate(spec, run([tree("s", turns=3)], 1))
    assert done.measurement.turns and done.tally.band == pytest.approx(0.05)
    with pytest.raises(ConfigError, match=r"cache\.dtype"):
        linear_spec(PLATFORM, {"cache.dtype": "fp8"})
    with pytest.raises(ConfigError, match=r"model\.path"):
        linear_spec(dataclasses.replace(PLATFORM, settings={"model.path": "x"}), {})
