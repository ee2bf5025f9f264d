"""Time steps of the engine that `longturn serve` would start on this machine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from longturn.assemble import build_engine
from longturn.config import PAGE_TOKENS, EngineConfig
from longturn.engine.loop import Engine
from longturn.engine.protocols import Executor, ExecutorInfo
from longturn.engine.records import EngineRequest, NewRow, RowWork, SamplingParams, StepPlan, pack_tokens
from longturn.simulate.cost.step import StepShape
from longturn.simulate.linear_fit import TimedStep

_GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)
_ALONE_TOKENS = 160


@dataclass(frozen=True, slots=True)
class MeasuredEngine:
    """What was found."""

    info: ExecutorInfo
    steps: list[TimedStep]
    host_ns: float
    """Between two steps of the engine's loop."""


def measure_engine(config: EngineConfig, say: Callable[[str], None], *, repeats: int = 5) -> MeasuredEngine:
    """Time decode rows, chunks and both together, each the median of some repetitions.

    Args:
        config: as for `longturn serve`.
        say: is told what was measured, one line each.
        repeats: of every step.

    Raises:
        LongturnError: the engine cannot be built.
    """
    engine = build_engine(config)
    try:
        bench = _StepBench(engine.executor)
        step_tokens = config.scheduler.step_tokens
        longest = min(engine.executor.info.max_context_tokens, (engine.executor.info.pages - 1) * PAGE_TOKENS)
        starts = [start for start in (0, 512, 1536, 3072, 6144) if start + step_tokens <= longest]
        counts = [count for count in (16, 64, 160, 320, 512, 1024) if count <= step_tokens]
        rows = [rows for rows in (1, 2, 4, 8, 16) if rows <= engine.executor.info.rows]
        steps: list[TimedStep] = []

        def add(shape: StepShape, ns: float) -> None:
            steps.append(TimedStep(shape, ns))
            chunk = "".join(f", chunk of {count} at {start}" for start, count in shape.chunks)
            say(f"{shape.rows} rows over {shape.context_tokens} tokens{chunk}: {ns / 1e6:.2f} ms")

        for start in starts:
            for count in counts:
                add(*bench.timed([], (start, count), repeats))
        for number in rows:
            for context in (128, 1024, 2048, 4096):
                if number * (context + PAGE_TOKENS) < longest:
                    add(*bench.timed([context] * number, None, repeats))
        for number in [number for number in rows[:4] if number < engine.executor.info.rows]:
            for count in counts[1:4]:
                add(*bench.timed([1024] * number, (1024, count), repeats))
        host_ns = _host_ns(engine, bench, repeats)
        say(f"between two steps: {host_ns / 1e3:.0f} us")
        return MeasuredEngine(engine.executor.info, steps, host_ns)
    finally:
        engine.close()


class _StepBench:
    """Plans for an executor, made by hand: pages are handed out anew for every step that is timed."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._step = 0

    def timed(self, contexts: list[int], chunk: tuple[int, int] | None, repeats: int) -> tuple[StepShape, float]:
        """The shape of a step with decode rows at these contexts and one chunk (start, count), and its time, ns.

        What lies in the pages of earlier positions does not change a step's time, so nothing fills them.
        """
        new_rows: list[NewRow] = []
        page = 1
        lengths = [*contexts, *([sum(chunk)] if chunk else [])]
        for row, length in enumerate(lengths):
            needed = -(-(length + repeats + 2) // PAGE_TOKENS)
            pages = tuple((page + index - 1) % (self._executor.info.pages - 1) + 1 for index in range(needed))
            page += needed
            tokens = pack_tokens([(7 * index + row) % 997 + 3 for index in range(length)])
            new_rows.append(NewRow(row, f"row-{row}", tokens, length, pages, _GREEDY))
        times: list[int] = []
        for repeat in range(repeats + 1):
            # A decode row works on the token before last again and again: equal work, and nothing to advance.
            work = [RowWork(row, length - 1, 1, True) for row, length in enumerate(contexts)]
            if chunk is not None:
                work.append(RowWork(len(contexts), chunk[0], chunk[1], False))
            self._step += 1
            plan = StepPlan(self._step, tuple(work), tuple(new_rows) if repeat == 0 else ())
            begin_ns = time.perf_counter_ns()
            self._executor.launch(plan).result()
            times.append(time.perf_counter_ns() - begin_ns)
        self._step += 1
        self._executor.launch(StepPlan(self._step, (), freed_rows=tuple(range(len(lengths))))).result()
        shape = StepShape(
            rows=len(contexts),
            row_tokens=len(contexts),
            context_tokens=sum(contexts),
            chunks=(chunk,) if chunk is not None else (),
            samples=len(contexts),
        )
        return shape, float(statistics.median(times[1:]))


def _host_ns(engine: Engine, bench: _StepBench, repeats: int) -> float:
    """By how much a step of a lone request takes longer in the engine's loop than such a step alone; 0 at least."""
    _, alone_ns = bench.timed([PAGE_TOKENS + _ALONE_TOKENS // 2], None, repeats)
    prompt = pack_tokens([index % 997 + 3 for index in range(PAGE_TOKENS)])
    engine.add(EngineRequest("alone", prompt, (), SamplingParams(max_tokens=_ALONE_TOKENS, temperature=0.0)))
    engine.step()
    times: list[int] = []
    while engine.has_work():
        begin_ns = time.perf_counter_ns()
        engine.step()
        times.append(time.perf_counter_ns() - begin_ns)
    return max(0.0, statistics.median(times) - alone_ns)
