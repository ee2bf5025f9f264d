"""A host tier for a page pool that is itself in host memory: lanes that copy at once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from longturn.executor.copy_lanes import Mark
from longturn.executor.offload import Offload

_BURST_BYTES = 32 << 20
"""Loaded after one step: some milliseconds of a processor that others wait for."""


class _Now:
    """The mark of a lane that does everything at once."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        """It is there already."""


class ImmediateLane:
    """Copies numpy arrays before it returns."""

    _mark = _Now()

    def copy(self, target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
        target[...] = source

    def mark(self) -> Mark:
        return self._mark

    def wait(self, mark: Mark) -> None:
        """Every mark is reached."""


def cpu_offload(pool: npt.NDArray[np.uint8], slots: int) -> Offload:
    """A host tier for a pool that is itself in host memory: right, and useful to test with.

    Args:
        pool: [pages, page_bytes], the pool's own memory.
        slots: pages that the tier holds; memory is taken as they are written.
    """
    host = np.empty((slots, pool.shape[1]), np.uint8)
    burst = max(1, _BURST_BYTES // pool.shape[1])
    steps, saves, loads = ImmediateLane(), ImmediateLane(), ImmediateLane()
    return Offload(pool, host, slots, steps=steps, saves=saves, loads=loads, burst_pages=burst)
