"""Timing steps of an engine: the plans are ones that an executor can run."""

from __future__ import annotations

from pathlib import Path

import pytest

from longturn.cli import simulate_measure
from longturn.cli.main import main
from longturn.config import PAGE_TOKENS, EngineConfig
from longturn.engine.clock import SystemClock
from longturn.engine.loop import Engine
from longturn.engine.protocols import ExecutorInfo
from longturn.engine.records import RowResult, StepPlan, StepResult
from longturn.simulate.linear import load_steps_platform

INFO = ExecutorInfo(rows=4, pages=40, page_bytes=64, max_context_tokens=4096, vocab_size=2000, device="fake",
                    weights="packed", quantisation="q4_1", kv_cache="fp16")  # fmt: skip


class Answered:
    def __init__(self, result: StepResult) -> None:
        self._result = result

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self._result


class CheckingExecutor:
    """Runs nothing, and refuses what could not be run."""

    info = INFO

    def __init__(self) -> None:
        self.rows: dict[int, tuple[int, ...]] = {}
        self.plans: list[StepPlan] = []
        self.closed = False

    def launch(self, plan: StepPlan) -> Answered:
        self.plans.append(plan)
        for row in plan.freed_rows:
            del self.rows[row]
        for new in plan.new_rows:
            assert new.row not in self.rows and 0 <= new.row < INFO.rows
            assert all(0 < page < INFO.pages for page in new.pages) and len(set(new.pages)) == len(new.pages)
            self.rows[new.row] = new.pages
        for row, pages in plan.new_pages:
            self.rows[row] += pages
        for work in plan.work:
            assert 0 < work.count and work.start + work.count <= len(self.rows[work.row]) * PAGE_TOKENS
        return Answered(StepResult(plan.step_id, tuple(RowResult(w.row, (5,)) for w in plan.work if w.samples)))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> CheckingExecutor:
    fake = CheckingExecutor()

    def build(config: EngineConfig) -> Engine:
        return Engine(fake, config.scheduler, config.cache, SystemClock())

    monkeypatch.setattr(simulate_measure, "build_engine", build)
    return fake


def test_steps_of_every_kind_are_timed(executor: CheckingExecutor) -> None:
    lines: list[str] = []
    found = simulate_measure.measure_engine(EngineConfig(), lines.append, repeats=2)
    shapes = [one.step for one in found.steps]
    assert any(s.rows and not s.chunks for s in shapes) and any(s.chunks and not s.rows for s in shapes)
    assert any(s.rows and s.chunks for s in shapes) and max(s.rows for s in shapes) == INFO.rows
    assert all(one.ns > 0 for one in found.steps) and len(lines) == len(shapes) + 1
    assert executor.closed and set(executor.rows) <= {0} and found.host_ns >= 0  # the last end is not told
    assert {s.context_tokens for s in shapes if s.rows == 2 and not s.chunks} == {256, 2048}


def test_fit_writes_a_platform(tmp_path: Path, executor: CheckingExecutor, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "here.toml"
    flags = ["--repeats", "2", "--set", "scheduler.step_tokens=512", "--set", "executor.threads=1"]
    assert main(["simulate", "fit", "--measure", str(path), *flags]) == 0
    assert "rms" in capsys.readouterr().out
    platform = load_steps_platform(path)
    assert platform.model.pages == INFO.pages and platform.model.quantisation == "q4_1"
    assert platform.settings == {"scheduler.step_tokens": 512} and platform.constants.steps > 20
