"""State of the server over the time of a measurement: queue and cache, from its Prometheus metrics.

A server need not have any. What it does not tell is absent from the samples, and why is told once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType

from longturn.bench.client import ChatClient
from longturn.errors import LongturnError

INTERVAL_S = 1.0
_MOST_SAMPLES = 600
"""Of one measurement; a page of many points has to stay small."""
_READ_S = 5.0
_GIVE_UP = 3
"""After this many failures in a row the server has no metrics, or is too busy to be asked."""

_RUNNING = ("longturn_requests_running", "vllm:num_requests_running", "sglang:num_running_reqs")
_WAITING = ("longturn_requests_waiting", "vllm:num_requests_waiting", "sglang:num_queue_reqs")
_USED = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
"""The same figure by several names: the first that is there counts."""


@dataclass(frozen=True, slots=True)
class ServerState:
    """One moment. None where the server does not tell."""

    at_ns: int
    """When it was read, `time.perf_counter_ns`."""
    running: int | None = None
    """Requests being computed."""
    waiting: int | None = None
    cache_used: float | None = None
    """Share of the pages that running requests hold, 0..1."""

    @property
    def empty(self) -> bool:
        return self.running is None and self.waiting is None and self.cache_used is None


ReadState = Callable[[], Awaitable[ServerState]]
"""Reads the state now; raises LongturnError where it cannot."""


@dataclass(frozen=True, slots=True)
class ServerHistory:
    """What was read during one measurement."""

    states: tuple[ServerState, ...] = ()
    interval_s: float = INTERVAL_S
    failed: int = 0
    """Readings that came to nothing."""
    reason: str | None = None
    """Of the last failure."""

    @property
    def summary(self) -> str:
        """For the result, one line."""
        text = f"{len(self.states)} samples, {self.interval_s:g} s apart"
        if self.reason is None:
            return text
        return f"none: {self.reason}" if not self.states else f"{text}, {self.failed} failed: {self.reason}"


class ServerWatch:
    """Reads the state again and again while the body of its `async with` runs."""

    def __init__(self, read: ReadState, interval_s: float) -> None:
        self._read = read
        self._interval_s = interval_s
        self._task: asyncio.Task[None]
        self._states: list[ServerState] = []
        self._failed = 0
        self._reason: str | None = None

    @property
    def history(self) -> ServerHistory:
        return ServerHistory(tuple(self._states), self._interval_s, self._failed, self._reason)

    async def run(self) -> None:
        """Until it is cancelled, or there is nothing to be read."""
        failures = 0
        while failures < _GIVE_UP:
            try:
                async with asyncio.timeout(_READ_S):
                    state = await self._read()
                if state.empty:
                    raise LongturnError("its /metrics have none of the known names")
            except (LongturnError, TimeoutError) as error:
                failures += 1
                self._failed += 1
                self._reason = "timed out" if isinstance(error, TimeoutError) else str(error)
            else:
                failures = 0
                self._states.append(state)
            await asyncio.sleep(self._interval_s)

    async def __aenter__(self) -> ServerWatch:
        self._task = asyncio.create_task(self.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        (outcome,) = await asyncio.gather(self._task, return_exceptions=True)
        if isinstance(outcome, Exception):  # a bug in reading must not cost the measurement; its result tells it
            self._failed += 1
            self._reason = f"{type(outcome).__name__}: {outcome}"


def interval_s(duration_s: float) -> float:
    """Between two readings in a measurement of `duration_s`."""
    return max(INTERVAL_S, duration_s / _MOST_SAMPLES)


def reader(client: ChatClient) -> ReadState:
    """Reads a server's `/metrics`."""

    async def read() -> ServerState:
        text = await client.get("/metrics", timeout_s=_READ_S)
        return state_of(text, time.perf_counter_ns())

    return read


def state_of(text: bytes, at_ns: int) -> ServerState:
    """The state from metrics in Prometheus' text format.

    A name may be there once for each of several engines: their requests add up, and their caches count alike.
    """
    text = b"\n" + text
    running, waiting = (_first(text, names) for names in (_RUNNING, _WAITING))
    pages, used = _values(text, "longturn_pages_total"), _values(text, "longturn_pages_used")
    if pages and used and sum(pages) > 0:
        share: float | None = sum(used) / sum(pages)
    else:
        shares = _first(text, _USED)
        share = sum(shares) / len(shares) if shares else None
    return ServerState(
        at_ns=at_ns,
        running=round(sum(running)) if running else None,
        waiting=round(sum(waiting)) if waiting else None,
        cache_used=None if share is None else min(1.0, max(0.0, share)),
    )


def _first(text: bytes, names: tuple[str, ...]) -> list[float]:
    return next((found for name in names if (found := _values(text, name))), [])


def _values(text: bytes, name: str) -> list[float]:
    """Values of all lines of one name: only these lines are looked at, of what may be thousands."""
    start, values = b"\n" + name.encode(), []
    at = text.find(start)
    while at >= 0:
        end = text.find(b"\n", at + 1)
        line = text[at + len(start) : end if end >= 0 else len(text)]
        at = text.find(start, at + 1)
        if line[:1] == b"{":
            # A label's value may hold spaces and braces, the value and a timestamp after it cannot.
            line = line[line.rfind(b"}") + 1 :]
        elif line[:1] not in (b" ", b"\t"):
            continue  # another name that starts alike
        with contextlib.suppress(ValueError, IndexError):
            value = float(line.split()[0])
            if abs(value) < float("inf"):
                values.append(value)
    return values
