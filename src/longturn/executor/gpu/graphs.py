"""Steps as CUDA graphs: one for each shape of a step and each size of the sampling after it.

All graphs share one memory pool: their scratch is the same memory, since they run one after the other. A shape runs
eagerly once before it is captured, over nothing but padding: kernels are compiled and loaded then, which capture
forbids.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable

import torch


class StepGraphs:
    """Captured pieces of steps by key. Without CUDA, or with `enabled` off, pieces run as they are."""

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self._enabled = enabled and device.type == "cuda"
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._handles: dict[Hashable, ctypes.c_void_p] = {}
        """The driver's, of the same graphs."""
        self._pool = torch.cuda.graph_pool_handle() if self._enabled else None

    def __len__(self) -> int:
        return len(self._graphs)

    def get(self, key: Hashable) -> ctypes.c_void_p | None:
        """The driver's handle of the piece's graph; None if its kernels must be launched one by one."""
        return self._handles.get(key)

    def capture(self, key: Hashable, launch: Callable[[], None]) -> None:
        """Record `launch`, which must have run once before, under the current stream (not the default one)."""
        if not self._enabled or key in self._graphs:
            return
        # torch.cuda.graph() would collect garbage and empty the cache each time: a tenth of a second a graph.
        graph = torch.cuda.CUDAGraph()
        # Only this thread must keep to what a capture allows; a step may be in flight on the same stream.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            launch()
        finally:
            graph.capture_end()
        self._graphs[key] = graph
        self._handles[key] = ctypes.c_void_p(graph.raw_cuda_graph_exec())

    def close(self) -> None:
        """Drop all graphs and their memory."""
        self._handles.clear()
        self._graphs.clear()
