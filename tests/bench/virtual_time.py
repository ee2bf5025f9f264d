"""An event loop whose time is made up: it passes when nothing else is left to do, and a little with each turn."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")
TURN_S = 20e-6
"""What one turn of the loop takes."""


class _Selector(selectors.DefaultSelector):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise AssertionError("nothing will ever happen")
        # As epoll has it, a timeout is a whole number of milliseconds, rounded up.
        self.now_s += max(TURN_S, -(-max(0.0, timeout) * 1000 // 1) / 1000)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """Work for threads takes `thread_s` of made-up time, one piece after the other."""

    def __init__(self, thread_s: float) -> None:
        self._clock = _Selector()
        super().__init__(self._clock)
        self._thread_s = thread_s
        self._free_s = 0.0
        self.pieces = 0

    def time(self) -> float:
        return self._clock.now_s

    def now_ns(self) -> int:
        return round(self._clock.now_s * 1e9)

    def run_in_executor(self, executor: Any, func: Callable[..., Result], *args: Any) -> asyncio.Future[Result]:  # type: ignore[override]
        future: asyncio.Future[Result] = self.create_future()
        self._free_s = max(self._free_s, self.time()) + self._thread_s
        self.pieces += 1

        def finish() -> None:
            if not future.cancelled():
                future.set_result(func(*args))

        self.call_at(self._free_s, finish)
        return future


def run_virtually(thread_s: float, main: Callable[[VirtualLoop], Coroutine[Any, Any, Result]]) -> Result:
    """Run a coroutine function that is given the loop."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(thread_s)) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        return runner.run(main(loop))
