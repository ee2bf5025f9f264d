"""Device times: of short launches, many in one graph so that the host's times are not in them, and of each kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


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
