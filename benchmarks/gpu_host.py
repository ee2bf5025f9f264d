"""Where the host's time of a decode step goes, waiting apart: microseconds of each stage, and of single calls.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_host.py [ROWSxCONTEXT ...] [--preset NAME] [--steps N]

Stages are stamped around methods and exclude the stages inside them; the stamps cost about a microsecond each, which
falls to whoever called. The first line of each point is without them. Calls are timed one by one on an idle device.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import gpu_required  # noqa: F401  (ends here without a GPU)
from longturn.cli.steps.harness import Stand, drain, pass_over, request
from longturn.cli.steps.points import Point
from longturn.cli.steps.run import prepare, size_of
from longturn.engine.loop import Engine
from longturn.engine.scheduler import Scheduler
from longturn.executor.gpu import executor as gpu_executor
from longturn.executor.gpu.executor import GpuExecutor, GpuHandle
from longturn.executor.gpu.packer import Packer
from longturn.executor.gpu.queue import DriverQueue, SlotRing

WAIT = "waiting"


class Stages:
    """Time spent in some methods, apart from that in others of them that they call."""

    def __init__(self) -> None:
        self.spent_ns: Counter[str] = Counter()
        self._inner: list[int] = []
        self.on = False

    def stamp(self, owner: Any, name: str, label: str) -> None:
        function = getattr(owner, name)

        def stamped(*args: Any, **more: Any) -> Any:
            if not self.on:
                return function(*args, **more)
            begin = time.perf_counter_ns()
            self._inner.append(0)
            try:
                return function(*args, **more)
            finally:
                spent = time.perf_counter_ns() - begin
                self.spent_ns[label] += spent - self._inner.pop()
                if self._inner:
                    self._inner[-1] += spent

        setattr(owner, name, stamped)

    def stamp_all(self) -> None:
        """Every stage of a step, in the order of the table."""
        self.stamp(Engine, "step", "the loop")
        self.stamp(Scheduler, "schedule", "schedule")
        self.stamp(GpuExecutor, "launch", "launch")
        self.stamp(SlotRing, "take", "a slot of the ring")
        self.stamp(Packer, "pack", "pack")
        for name in ("begin", "send", "replay", "end"):
            self.stamp(DriverQueue, name, f"driver: {name}")
        self.stamp(GpuHandle, "wait", WAIT)
        self.stamp(GpuHandle, "_read", "read")
        self.stamp(torch.cuda.Event, "elapsed_time", "elapsed time")
        self.stamp(gpu_executor, "row_results", "results of rows")
        self.stamp(Scheduler, "update", "update")
        self.stamp(Scheduler, "stats", "stats")


def measure(stand: Stand, stages: Stages, point: Point, steps: int) -> None:
    """Print a point's host time and its stages: medians over `steps` steps."""
    engine, watch = stand.engine()
    names = [f"d{i}" for i in range(point.rows)]
    pass_over(engine, watch, [request(name, stand.tokens(point.context), 2 * steps + 60) for name in names])
    for _ in range(20):
        engine.step()
    gc.collect()
    gc.freeze()
    hosts = []
    for _ in range(steps):
        watch.waited_ns = 0
        begin = time.perf_counter_ns()
        engine.step()
        hosts.append(time.perf_counter_ns() - begin - watch.waited_ns)
    device_us = statistics.median(watch.device_ns) / 1e3
    quartiles = [value / 1e3 for value in statistics.quantiles(hosts, n=4)]
    print(
        f"{point.name}: host {quartiles[1]:.0f} us [{quartiles[0]:.0f}-{quartiles[2]:.0f}], device {device_us:.0f} us",
        flush=True,
    )
    stages.on = True
    rows = []
    for _ in range(steps):
        stages.spent_ns.clear()
        engine.step()
        rows.append(dict(stages.spent_ns))
    stages.on = False
    found = {label: statistics.median(row.get(label, 0) for row in rows) / 1e3 for label in rows[0]}
    for label, us in sorted(found.items(), key=lambda item: -item[1]):
        if label != WAIT:
            print(f"  {label:<24} {us:>7.1f}")
    print(f"  {'all of them':<24} {sum(us for label, us in found.items() if label != WAIT):>7.1f}", flush=True)
    drain(engine, names)


def calls(stand: Stand) -> None:
    """Print what the calls of a step take on an idle device, and launches of graphs by their number of kernels."""

    def timed(name: str, call: Callable[[], object], repeats: int = 60) -> None:
        spent = []
        for _ in range(repeats):
            torch.cuda.synchronize()
            begin = time.perf_counter_ns()
            call()
            spent.append(time.perf_counter_ns() - begin)
        print(f"  {name:<36} {statistics.median(spent) / 1e3:>6.2f}")

    print("single calls")
    queue, slot = stand.executor._queue, stand.executor._ring._slots[0]
    timed("begin: enter, record", lambda: queue.begin(slot))
    timed("send 386 words", lambda: queue.send(slot, 386))
    timed("end: record", lambda: queue.end(slot))
    x = torch.zeros(64, device="cuda")
    for kernels in (10, 100, 400, 1000):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(kernels):
                x.add_(1)
        handle = ctypes.c_void_p(graph.raw_cuda_graph_exec())
        timed(f"replay a graph of {kernels} kernels", lambda handle=handle: queue.replay(handle))  # type: ignore[misc]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("points", nargs="*", default=["1x4096", "4x4096", "32x8192"], metavar="ROWSxCONTEXT")
    parser.add_argument("--preset", default="mini60")
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    points = tuple(Point("decode", *map(int, text.split("x"))) for text in args.points)
    stages = Stages()
    stages.stamp_all()
    stand = Stand(args.preset, **size_of(points, 8192))
    prepare(stand, points)
    for point in points:
        measure(stand, stages, point, args.steps)
    calls(stand)
    stand.close()


if __name__ == "__main__":
    main()
