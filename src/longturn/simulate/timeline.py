"""What happens to simulated engines, one thing after the other.

One heap orders arrivals, results and the ends of foreseen turns by time, then by kind, then by number, so equal inputs
give equal runs to the byte.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from longturn.engine.records import EngineRequest, StepOutputs
from longturn.errors import RequestError
from longturn.simulate.replicas import Replica

_STEP, _ARRIVAL = 0, 1
"""Kinds of events; at one time results come before requests."""


class Client(Protocol):
    """Who sends the requests. Called at the timeline's `now_ns`."""

    def answered(self, outputs: StepOutputs) -> None:
        """A step's results are there."""
        ...

    def gained(self, request_ids: Sequence[str], tokens: int) -> None:
        """Each of these requests has got so many tokens in foreseen turns, of which no results are handed out."""
        ...

    def refused(self, request_id: str, error: RequestError) -> None:
        """An engine does not take a request."""
        ...

    def next_send_ns(self) -> int | None:
        """When a request is sent next if nothing happens before, as far as is known."""
        ...


class _Event(NamedTuple):
    at_ns: int
    kind: int
    number: int
    """Counts up, so that no two events are equal."""
    replica: Replica
    outputs: StepOutputs | None
    request: EngineRequest | None


class Timeline:
    """Engines, what is on its way to them or from them, and what time it is."""

    __slots__ = ("_client", "_heap", "_number", "_replicas", "now_ns")

    def __init__(self, replicas: Sequence[Replica], client: Client) -> None:
        self._replicas = replicas
        self._client = client
        self._heap: list[_Event] = []
        self._number = 0
        self.now_ns = 0

    @property
    def next_ns(self) -> int | None:
        """When something happens next; None if nothing is on its way."""
        return self._heap[0].at_ns if self._heap else None

    def send(self, replica: Replica, request: EngineRequest, at_ns: int) -> None:
        """A request will reach an engine at this time."""
        self._push(at_ns, _ARRIVAL, replica, None, request)

    def happen(self) -> None:
        """Let the next thing happen."""
        event = heapq.heappop(self._heap)
        replica = event.replica
        if event.request is not None:
            self.now_ns = event.at_ns
            replica.arrive(event.request)
            if replica.busy:
                self._overtake(replica, event.at_ns)
                return
        elif event.outputs is not None:
            self.now_ns = event.at_ns
            self._client.answered(event.outputs)
        elif event.number == replica.wake:
            self.now_ns = event.at_ns
            self._take(replica, event.at_ns)
        else:
            return  # those turns have been taken: something came between
        self._goes_on(replica, replica.turn(event.at_ns, self._client.refused, self._quiet_ns()))

    def overtake(self, now_ns: int) -> None:
        """Whoever looks at the engines at `now_ns` sees what they are: foreseen turns are taken up to this one."""
        for replica in self._replicas:
            self._overtake(replica, now_ns)

    def _overtake(self, replica: Replica, now_ns: int) -> None:
        if replica.ahead is not None:
            self._take(replica, now_ns)
            self._goes_on(replica, replica.step())

    def _take(self, replica: Replica, now_ns: int) -> None:
        """Turns that were foreseen have been taken by `now_ns`."""
        self._client.gained(*replica.take(now_ns))

    def _goes_on(self, replica: Replica, found: tuple[int, StepOutputs | None] | None) -> None:
        if found is not None:
            self._push(found[0], _STEP, replica, found[1], None)
            replica.wake = self._number if found[1] is None else 0

    def _quiet_ns(self) -> float:
        """When something happens next to an only engine; of several, one is not told when it is its turn."""
        if len(self._replicas) > 1:
            return math.inf
        times = (self.next_ns, self._client.next_send_ns())
        return min((one for one in times if one is not None), default=math.inf)

    def _push(
        self, at_ns: int, kind: int, replica: Replica, outputs: StepOutputs | None, request: EngineRequest | None
    ) -> None:
        self._number += 1
        heapq.heappush(self._heap, _Event(at_ns, kind, self._number, replica, outputs, request))
