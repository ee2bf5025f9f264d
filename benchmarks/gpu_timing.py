"""Device times of short launches, many in one graph so that the host's launch times are not in them."""

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
