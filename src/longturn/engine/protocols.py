"""What the engine needs from the outside: a clock and an executor. It knows no implementation of either."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from longturn.engine.records import StepPlan, StepResult


class Clock(Protocol):
    """The engine's only source of time."""

    def now_ns(self) -> int:
        """Monotonic nanoseconds."""
        ...


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """What an executor can hold."""

    rows: int
    """Requests computed at once."""
    pages: int
    """Pages in the pool, ids 0 .. pages-1; page 0 is the null page that padding points at and is never handed out."""
    page_bytes: int
    max_context_tokens: int
    vocab_size: int
    device: str
    """Short name for people, such as `cpu (2 threads, avx512-vnni)`."""


class StepHandle(Protocol):
    """A step in flight."""

    def done(self) -> bool:
        """True once `result` will not block."""
        ...

    def result(self) -> StepResult:
        """Wait for the step. Raises what the executor raised."""
        ...


class Executor(Protocol):
    """Runs steps, in the order of their launch."""

    @property
    def info(self) -> ExecutorInfo: ...

    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step and return at once; a plan may refer to tokens that an earlier, unread step samples."""
        ...

    def close(self) -> None:
        """Free threads and memory. Steps in flight are waited for."""
        ...
