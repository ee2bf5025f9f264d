"""The two clocks: the machine's, and one that a test or a simulation moves by hand."""

from __future__ import annotations

import time


class SystemClock:
    """Monotonic time of this machine. The only place in the engine that reads real time."""

    __slots__ = ()

    def now_ns(self) -> int:
        return time.monotonic_ns()


class VirtualClock:
    """Time that stands still until `advance`: a run on it depends on its inputs alone."""

    __slots__ = ("_now_ns",)

    def __init__(self, now_ns: int = 0) -> None:
        self._now_ns = now_ns

    def now_ns(self) -> int:
        return self._now_ns

    def advance(self, delta_ns: int) -> None:
        """Move forward by `delta_ns` nanoseconds.

        Raises:
            ValueError: `delta_ns` is negative; time would run backwards.
        """
        if delta_ns < 0:
            raise ValueError(f"a clock cannot go back (delta_ns={delta_ns})")
        self._now_ns += delta_ns
