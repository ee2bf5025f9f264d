"""Host time of the engine itself, in microseconds a decode step, with an executor that does nothing.

    python benchmarks/engine_host.py [--json] [--context TOKENS] [--steps N]

Prints the median and the 99th percentile of one turn of the loop (plan, launch, read, apply, outputs) at batch 1, 8
and 32, what the GPU executor's part of it takes that needs no GPU (packing a step, unpacking its results), and the time
to admit and finish one request, warm and cold.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np

from longturn.config import PAGE_TOKENS, CacheConfig, SchedulerConfig
from longturn.engine.clock import SystemClock
from longturn.engine.hashing import page_hashes
from longturn.engine.loop import Engine
from longturn.engine.protocols import ExecutorInfo
from longturn.engine.records import (
    EngineRequest,
    NewRow,
    RowResult,
    RowWork,
    SamplingParams,
    StepPlan,
    StepResult,
    pack_tokens,
)
from longturn.executor.gpu.buckets import Buckets
from longturn.executor.gpu.layout import HEADER_WORDS, StateLayout
from longturn.executor.gpu.packer import Packer
from longturn.executor.gpu.sampling import row_results


class NullHandle:
    """Answers with token 7 in every sampling row."""

    def __init__(self, plan: StepPlan) -> None:
        self._result = StepResult(plan.step_id, tuple(RowResult(w.row, (7,)) for w in plan.work if w.samples))

    def done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self._result


class NullExecutor:
    """Does no work. The time it takes to build results is measured apart and subtracted."""

    def __init__(self, pages: int, rows: int) -> None:
        self.info = ExecutorInfo(rows, pages, 1, 1 << 20, 1 << 17, "null")
        self.spent_ns = 0

    def launch(self, plan: StepPlan) -> NullHandle:
        begin = time.perf_counter_ns()
        handle = NullHandle(plan)
        self.spent_ns += time.perf_counter_ns() - begin
        return handle

    def close(self) -> None:
        pass


def make_request(name: str, tokens: list[int], max_tokens: int) -> EngineRequest:
    prompt = pack_tokens(tokens)
    key = b"k" * 32
    return EngineRequest(name, prompt, page_hashes(prompt, key), SamplingParams(max_tokens), name, hash_key=key)


def decode_step(batch: int, context: int, steps: int) -> dict[str, float]:
    """Host microseconds of a decode step of `batch` rows with `context` tokens each."""
    executor = NullExecutor(batch * (context + steps + 2 * PAGE_TOKENS) // PAGE_TOKENS + batch + 2, batch)
    config = SchedulerConfig(max_running=batch, step_tokens=1 << 20, target_itl_ms=0, expected_output_tokens=steps)
    engine = Engine(executor, config, CacheConfig(), SystemClock())
    for i in range(batch):
        engine.add(make_request(f"r{i}", [i + 1] * context, steps + 64))
    for _ in range(32):
        engine.step()
    times = []
    for _ in range(steps):
        executor.spent_ns = 0
        begin = time.perf_counter_ns()
        engine.step()
        times.append(time.perf_counter_ns() - begin - executor.spent_ns)
    return {
        "batch": batch,
        "context_tokens": context,
        "median_us": statistics.median(times) / 1e3,
        "p99_us": sorted(times)[int(0.99 * len(times))] / 1e3,
    }


def packing(batch: int, context: int, steps: int) -> dict[str, float]:
    """Median host microseconds to pack a decode step of `batch` rows for the GPU, and to read its results."""
    layout = StateLayout.of(batch, context + steps + PAGE_TOKENS, batch)
    packer = Packer(layout, Buckets.of(batch, batch, context + steps + PAGE_TOKENS), vocab_size=1000)
    buffer = np.zeros(HEADER_WORDS + 2 * layout.max_pairs, np.int32)
    words = np.full(layout.max_samples, 7, np.int32)
    pages, prompt = tuple(range(1, layout.page_table.width + 1)), pack_tokens([7] * context)
    rows = tuple(
        NewRow(n, str(n), prompt, context, pages, SamplingParams(steps, temperature=0.0)) for n in range(batch)
    )
    packs, reads = [], []
    for step in range(steps):
        work = tuple(RowWork(n, context - 1 + step, 1, True) for n in range(batch))
        plan = StepPlan(step, work, rows if step == 0 else ())
        begin = time.perf_counter_ns()
        packed = packer.pack(plan, buffer)
        between = time.perf_counter_ns()
        row_results(words, packed.samples, packed.plain)
        packs.append(between - begin)
        reads.append(time.perf_counter_ns() - between)
    return {"batch": batch, "pack_us": statistics.median(packs) / 1e3, "results_us": statistics.median(reads) / 1e3}


def one_token_request(context: int, warm: bool, repeats: int) -> float:
    """Median host microseconds from `add` to the end of a request for one token."""
    executor = NullExecutor(2 * context // PAGE_TOKENS + 8, 4)
    engine = Engine(executor, SchedulerConfig(step_tokens=1 << 20, target_itl_ms=0), CacheConfig(), SystemClock())
    times = []
    for i in range(repeats):
        request = make_request(f"r{i}", [1 if warm else i + 1] * context, 1)
        begin = time.perf_counter_ns()
        engine.add(request)
        while engine.has_work():
            engine.step()
        times.append(time.perf_counter_ns() - begin)
    return statistics.median(times[1:]) / 1e3


def without_gc(function: Callable[[], None]) -> None:
    gc.collect()
    gc.freeze()
    function()
    gc.unfreeze()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--context", type=int, default=4096, help="prompt tokens of each row")
    parser.add_argument("--steps", type=int, default=2000, help="decode steps measured at each batch size")
    args = parser.parse_args()
    result: dict[str, object] = {"python": platform.python_version(), "processor": platform.processor()}

    def measure() -> None:
        result["decode_step"] = [decode_step(batch, args.context, args.steps) for batch in (1, 8, 32)]
        result["packing"] = [packing(batch, args.context, args.steps) for batch in (1, 8, 32)]
        result["request_us"] = {
            f"{'warm' if warm else 'cold'}_{context}": one_token_request(context, warm, 12)
            for context in (4096, 142_000)
            for warm in (False, True)
        }

    without_gc(measure)
    if args.json:
        print(json.dumps(result))
        return
    print("decode step      median      p99")
    for row in result["decode_step"]:  # type: ignore[attr-defined]
        print(f"batch {row['batch']:>3}   {row['median_us']:>8.1f} µs {row['p99_us']:>8.1f} µs")
    print("GPU executor     pack  results")
    for row in result["packing"]:  # type: ignore[attr-defined]
        print(f"batch {row['batch']:>3}   {row['pack_us']:>8.1f} µs {row['results_us']:>5.1f} µs")
    print("one request, add to end")
    for name, us in result["request_us"].items():  # type: ignore[attr-defined]
        print(f"{name:>12} {us:>8.1f} µs")


if __name__ == "__main__":
    main()
