"""The real engine over an executor that hangs at a word: alive, and silent."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from longturn.config import EngineConfig
from longturn.engine.clock import SystemClock
from longturn.engine.loop import Engine
from longturn.engine.records import StepPlan, unpack_tokens
from tests.server.engine_mock import DoneStep, LetterExecutor

HANG = list(b"@hang")
INFO = LetterExecutor.info


class HangingExecutor(LetterExecutor):
    """Its result never comes once a prompt has the word."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()

    def launch(self, plan: StepPlan) -> DoneStep:
        done = super().launch(plan)
        hangs = any(bytes(HANG) in bytes(unpack_tokens(row.tokens)) for row in plan.new_rows)
        return HangingStep(done.finished, self.goes_on) if hangs else done


@dataclass
class HangingStep(DoneStep):
    goes_on: threading.Event = field(default_factory=threading.Event)

    def done(self) -> bool:
        return False

    def result(self):  # type: ignore[no-untyped-def]
        self.goes_on.wait(3600)
        return self.finished


def build(config: EngineConfig) -> Engine:
    """Factory for the engine process."""
    return Engine(HangingExecutor(), config.scheduler, config.cache, SystemClock())
