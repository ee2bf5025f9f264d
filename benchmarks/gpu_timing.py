"""Device times: of short launches, many in one graph so that the host's times are not in them, of a captured step, and
of each kernel; and turns between processes that time on one card."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from longturn.executor.gpu.compile import Kernel, noting_kernels


def graph_times_us(launches: Sequence[Callable[[], None]], rounds: int, replays: int) -> list[float]:
    """Mean time of one launch in each replay of a graph that runs all of them `rounds` times, microseconds."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    times = []
    for _ in range(replays):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (rounds * len(launches)))
    return times


def kernel_spans(work: Callable[[], None], repeats: int = 1) -> list[tuple[float, float, str]]:
    """Start, end and name of each kernel and copy of `work`, done `repeats` times, microseconds, in the order of their
    starts."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(repeats):
            work()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    return sorted(
        (e.time_range.start, e.time_range.end, e.name) for e in trace.events()
        if e.device_type == on_device and "Request" not in e.name and "Unrecognized" not in e.name
    )  # fmt: skip


def noted(step: Callable[[], None]) -> list[Kernel]:
    try:
        with noting_kernels() as kernels, torch.inference_mode():
            step()
    except Exception as error:  # a plan that cannot be launched is told when it is timed
        print(f"not noted: {error}", flush=True)
        return []
    return kernels


def captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        step()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            step()
    return graph


def time_ms(graph: torch.cuda.CUDAGraph, replays: int = 20, repeats: int = 3) -> float:
    """Median over `repeats` of the mean time of a replay."""
    times = []
    for _ in range(3):
        graph.replay()
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / replays)
    return sorted(times)[len(times) // 2]


def meet(file: str | None, parties: int) -> None:
    """Wait until as many processes with the same lock are here, but not for one that died."""
    if file is None:
        return
    latest = time.time() + 60
    Path(f"{file}.{os.getpid()}").touch()
    at = Path(file)
    while len(list(at.parent.glob(f"{at.name}.*"))) < parties and time.time() < latest:
        time.sleep(0.1)


@contextlib.contextmanager
def alone(file: str | None) -> Iterator[None]:
    """Nobody else with the same lock times anything inside."""
    if file is None:
        yield
        return
    with Path(file).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
