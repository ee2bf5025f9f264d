"""Small engines and sessions for tests of the virtual-time executor."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from longturn.bench.presets import Rules, rules_of
from longturn.bench.traces.load import parse_trace
from longturn.bench.traces.tree import SessionTree
from longturn.config import CacheConfig, SchedulerConfig
from longturn.engine.protocols import ExecutorInfo
from longturn.simulate.cost.step import StepShape
from longturn.simulate.replicas import EngineSpec
from longturn.simulate.runner import Run
from tests.bench.make_traces import row, session


class PlainModel:
    """A step model with round numbers: a step costs `fixed`, a row and a chunk's token something each."""

    attend_limit = 0

    def __init__(
        self, fixed: int = 1_000_000, row: int = 10_000, token: int = 1_000, *, host: int = 0,
        tokens_per_row: int = 1,
    ) -> None:  # fmt: skip
        self.fixed, self.row, self.token, self.host = fixed, row, token, host
        self.tokens_per_row = tokens_per_row

    def step_ns(self, step: StepShape) -> int:
        return self.fixed + self.row * step.rows + self.token * step.chunk_tokens

    def exposed_ns(self, step: StepShape) -> int:
        return self.host

    def parts_ns(self, step: StepShape) -> Mapping[str, float]:
        return {"fixed": float(self.fixed), "rest": float(self.step_ns(step) - self.fixed)}

    def band(self, step: StepShape) -> float:
        return 0.1


def spec(model: PlainModel | None = None, *, pages: int = 512, engines: int = 1, **more: Any) -> EngineSpec:
    """Engines with 128-token pages and 16 rows."""
    scheduler = {"max_running": 16, "step_tokens": 512, "target_itl_ms": 0.0, **more.pop("scheduler", {})}
    info = ExecutorInfo(
        rows=16, pages=pages, page_bytes=1, max_context_tokens=1 << 20, vocab_size=100, device="simulated"
    )
    return EngineSpec(
        info=info,
        model=PlainModel() if model is None else model,
        scheduler=SchedulerConfig(**scheduler),
        cache=CacheConfig(),
        engines=engines,
        **more,
    )


def tree(name: str, turns: int = 4, start: int = 10, step: int = 8, out: int = 20, pause: float = 1.0) -> SessionTree:
    """A session whose prompts grow by `step` blocks of 64 tokens a turn."""
    rows = [row(pause * n, list(range(start + step * n)), api=0.0, out=out) for n in range(turns)]
    return parse_trace(json.dumps({**session(rows), "id": name}).encode(), name)[0]


def rules(duration_s: float = 60.0, **more: Any) -> Rules:
    return dataclasses.replace(rules_of("quick"), duration_s=duration_s, **more)


def run(trees: list[SessionTree], lanes: int = 2, seed: int = 7, **more: Any) -> Run:
    return Run(trees, more.pop("rules", rules()), lanes, seed, **more)
