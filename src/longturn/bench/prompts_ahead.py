"""Prompts made before they are needed, on a thread: a long one takes tens of milliseconds that would otherwise be lag,
and the event loop must go on reading streams meanwhile, or the times of their events would be wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from longturn.bench.bodies import Bodies, Prompt, RecordedBodies
from longturn.bench.lanes import NS_PER_S, LiveTree, Send
from longturn.bench.schedule import Schedule
from longturn.bench.synth import RequestKey

_AHEAD_NS = 2 * NS_PER_S
"""Prompts are made this long before they are due; earlier, those of all lanes would fill the memory."""
_MOST_TOKENS = 100_000_000
"""Of prompts that wait to be sent, about half a gigabyte."""

_Place = tuple[int, int, RequestKey]
"""What tells sends apart, whenever they are due: lane, recycle, request."""


class PromptsAhead:
    """The prompts of one replay. One at a time is made: several threads would only wait for each other."""

    def __init__(self, bodies: Bodies, schedule: Schedule, on_change: Callable[[asyncio.Task[Prompt]], None]) -> None:
        """
        Args:
            bodies: makes the prompts.
            schedule: tells which ones are needed.
            on_change: is told when a prompt is there, or failed.
        """
        self._bodies = bodies
        self._schedule = schedule
        self._on_change = on_change
        self._pool = ThreadPoolExecutor(1, "prompts")
        self._made: dict[_Place, asyncio.Task[Prompt]] = {}
        """Made, or being made, and not sent yet."""

    def make_next(self, now_ns: int) -> asyncio.Task[Prompt] | None:
        """Start to make the first prompt that will soon be needed, unless one is being made; returns what was started.

        Where prompts do not depend on answers, those that follow an answer in flight are made before it has come: a
        recorded pause may be shorter than it takes to make one.
        """
        if self._schedule.closed or not all(task.done() for task in self._made.values()) or self._full:
            return None
        horizon_ns = min(now_ns + _AHEAD_NS, self._schedule.end_ns)
        for send in self._schedule.upcoming():
            if send.due_ns <= horizon_ns and _place(send) not in self._made:
                return self._start(send, self._schedule.lanes[send.lane])
        if isinstance(self._bodies, RecordedBodies):
            for live, send in self._schedule.following(_AHEAD_NS):
                if _place(send) not in self._made:
                    return self._start(send, live)
        return None

    @property
    def _full(self) -> bool:
        done = (task for task in self._made.values() if not task.cancelled() and task.exception() is None)
        return sum(task.result().tokens for task in done) > _MOST_TOKENS

    def take(self, send: Send, live: LiveTree) -> asyncio.Task[Prompt]:
        """The prompt of a request that is due: there already, or soon."""
        if _place(send) not in self._made:
            self._start(send, live)
        return self._made.pop(_place(send))

    def drop(self, lane: int, recycle: int) -> None:
        """Forget the prompts of a session that has ended."""
        for place in [place for place in self._made if place[:2] == (lane, recycle)]:
            self._made.pop(place).cancel()

    def _start(self, send: Send, live: LiveTree) -> asyncio.Task[Prompt]:
        task = asyncio.create_task(self.make(live, send.key))
        self._made[_place(send)] = task
        task.add_done_callback(self._on_change)
        return task

    async def make(self, live: LiveTree, key: RequestKey) -> Prompt:
        """One prompt, now."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._bodies.prompt, live.tree, key, live.marker)

    async def close(self) -> None:
        """Make no more."""
        for task in self._made.values():
            task.cancel()
        await asyncio.gather(*self._made.values(), return_exceptions=True)
        self._pool.shutdown(wait=False, cancel_futures=True)


def _place(send: Send) -> _Place:
    return send.lane, send.recycle, send.key
