"""The warm-up of a replay: what each lane has behind it when the measurement begins, sent for its prompts alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from longturn.bench.client import TargetError
from longturn.bench.lanes import LiveTree
from longturn.bench.records import Answer
from longturn.bench.schedule import Schedule
from longturn.bench.synth import RequestKey


class WarmUp:
    """One warm-up, and how far it has come."""

    def __init__(self, schedule: Schedule, grace_s: float | None) -> None:
        """`grace_s`: the longest it may take; None: as long as it does."""
        self._schedule = schedule
        self._grace_s = grace_s
        self.requests = 0
        """Answered, well or not."""
        self.errors = 0
        """Of agents that are not their tree's root: those are tolerated."""

    async def run(
        self, send: Callable[[LiveTree, RequestKey], Awaitable[Answer]], told: Callable[[int, int], None]
    ) -> None:
        """Send all of it: lanes side by side, the requests of a lane one after the other.

        Args:
            send: one request, for a single token.
            told: gets the requests answered and planned, at the beginning and after each answer.

        Raises:
            TargetError: a request of a root agent failed, or it took too long.
        """
        plans = self._schedule.warm_up()
        total = sum(map(len, plans))
        told(0, total)

        async def lane(live: LiveTree, keys: Sequence[RequestKey]) -> None:
            for key in keys:
                answer = await send(live, key)
                self.requests += 1
                told(self.requests, total)
                if not answer.ok and key.conversation == 0:
                    raise TargetError(f"the warm-up of session {live.tree.id} failed: {answer.error}")
                self.errors += not answer.ok

        try:
            async with asyncio.timeout(self._grace_s), asyncio.TaskGroup() as group:
                for live, keys in zip(self._schedule.lanes, plans, strict=True):
                    group.create_task(lane(live, keys))
        except TimeoutError as error:
            raise TargetError(
                f"the warm-up took longer than {self._grace_s:g} s: {self.requests} of {total} requests were answered"
            ) from error
        except BaseExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
