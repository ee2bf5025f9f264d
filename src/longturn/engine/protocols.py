"""What the engine needs from the outside: a clock and an executor. It knows no implementation of either."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from longturn.engine.records import SamplingParams, StepPlan, StepResult


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
    weights: str = "unknown"
    """How weights are computed with: `packed`, `fp32`."""
    quantisation: str = "unknown"
    """The weights' format as served: `q4_1`, `bf16`, `nvfp4`."""
    kv_cache: str = "unknown"
    """Data type of cached keys and values."""
    copies_pages: bool = False
    """It understands `StepPlan.copied_pages`. A prompt that is cached to its last page then computes its last token
    alone, in a copy of that page, instead of the whole page."""
    host_pages: int = 0
    """Pages that fit into the host memory beside the pool, slots 0 .. host_pages-1; 0: it understands neither
    `StepPlan.save_pages` nor `load_pages`."""
    scores_prompts: bool = False
    """It understands `RowWork.scores`: log-probabilities of prompts can be asked for."""


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


@runtime_checkable
class Preparing(Protocol):
    """What an executor may also be: one that needs time for some requests before their first step, without which the
    steps of others would have to wait for it."""

    def ready(self, sampling: SamplingParams) -> bool:
        """Whether a request that samples so can be launched now; starts to prepare for it in the background if not. It
        may be launched all the same: the step then waits."""
        ...


@runtime_checkable
class Idling(Protocol):
    """What an executor may also be: one with work of its own that is best done while there are no requests."""

    def idle(self) -> bool:
        """Do some of it, for about a tenth of a second at most; whether there is more."""
        ...
