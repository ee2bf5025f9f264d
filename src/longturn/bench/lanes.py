"""One session tree while it is replayed: which of its agents waits for what, and until when.

Times are nanoseconds on the clock of the measurement; nothing here reads a clock. A request is due a recorded pause
after the answer before it, or, where it joins subagents, when the last of them has ended, whichever is later. A timer
once set is moved only together with all others of its tree, so that their order and distances stay as recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

from longturn.bench.synth import RequestKey
from longturn.bench.traces.tree import SessionTree

NS_PER_S = 1_000_000_000


def to_ns(seconds: float) -> int:
    return round(seconds * NS_PER_S)


@dataclass(frozen=True, slots=True)
class Send:
    """One request that the schedule wants sent."""

    lane: int
    recycle: int
    """How many sessions the lane has finished before this one."""
    key: RequestKey
    due_ns: int
    """When."""


class LiveTree:
    """The replay of one session tree by one lane."""

    def __init__(self, tree: SessionTree, lane: int, recycle: int, marker: str, *, t_star_s: float | None) -> None:
        """
        Args:
            tree: the session.
            lane: number of the lane.
            recycle: how many sessions the lane has finished.
            marker: of all prompts of this replay.
            t_star_s: start point on the session's clock: requests before it count as answered, and timers are set as
                distances from it. None: the session starts with its first request, at 0.
        """
        self.tree = tree
        self.lane = lane
        self.recycle = recycle
        self.marker = marker
        self.t_star_s = t_star_s
        self.whole = t_star_s is None
        """Replayed from its first request."""
        self.abandoned = False
        starts = [item.requests[0].start_s for item in tree.conversations]
        origin_s = min(starts) if t_star_s is None else t_star_s
        self._next = [
            0 if t_star_s is None else sum(request.start_s < t_star_s for request in item.requests)
            for item in tree.conversations
        ]
        self._timers: dict[int, int] = {}
        """Conversation -> when its next request is due."""
        self._flying: set[int] = set()
        self._left = {number for number in range(len(self._next)) if not self._ended(number)}
        self._gates: dict[tuple[int, int], int] = {}
        """(conversation, request) -> how many subagents it still waits for."""
        for number in self._left:
            item = tree.conversations[number]
            if item.parent is not None and item.join_before is not None:
                gate = (item.parent, item.join_before)
                self._gates[gate] = self._gates.get(gate, 0) + 1
        for number in sorted(self._left):
            item = tree.conversations[number]
            if self._next[number] or item.parent is None or self._has_passed(item.parent, item.spawn_after):
                start_s = item.requests[self._next[number]].start_s
                self._timers[number] = max(0, to_ns(start_s - origin_s))

    def _ended(self, number: int) -> bool:
        return self._next[number] >= len(self.tree.conversations[number].requests)

    def _has_passed(self, parent: int, spawn_after: int | None) -> bool:
        return spawn_after is None or spawn_after < self._next[parent]

    @property
    def name(self) -> str:
        """Of this replay, in results."""
        return f"{self.tree.id}@{self.lane}.{self.recycle}"

    @property
    def done(self) -> bool:
        return not self._left

    @property
    def idle(self) -> bool:
        """Nothing is in flight."""
        return not self._flying

    @property
    def requests_left(self) -> int:
        """Requests that have not been sent."""
        return sum(
            len(item.requests) - at - (number in self._flying)
            for number, (item, at) in enumerate(zip(self.tree.conversations, self._next, strict=True))
            if number in self._left
        )

    def warm_up(self, extra: int) -> list[RequestKey]:
        """The requests that fill the server's cache as it was at t*, in recorded order.

        Args:
            extra: how many of the last requests before t* are sent beside the last one of each live agent.
        """
        if self.t_star_s is None:
            return []
        before = sorted(
            (request.start_s, number, index)
            for number, item in enumerate(self.tree.conversations)
            for index, request in enumerate(item.requests[: self._next[number]])
        )
        live = {(number, self._next[number] - 1) for number in self._left}
        first = max(0, len(before) - extra)
        return [
            RequestKey(self.tree.id, number, index)
            for place, (_, number, index) in enumerate(before)
            if place >= first or (number, index) in live
        ]

    def earliest_ns(self) -> int | None:
        """When the next request is due; None if none is until an answer comes."""
        return min((due for number, due in self._timers.items() if self._open(number)), default=None)

    def _open(self, number: int) -> bool:
        return not self._gates.get((number, self._next[number]), 0)

    def shift(self, by_ns: int) -> None:
        """Move every timer."""
        for number in self._timers:
            self._timers[number] += by_ns

    def pending(self) -> list[Send]:
        """What is due without another answer, soonest first."""
        found = [
            Send(self.lane, self.recycle, RequestKey(self.tree.id, number, self._next[number]), due)
            for number, due in self._timers.items()
            if self._open(number)
        ]
        return sorted(found, key=lambda send: (send.due_ns, send.key.conversation))

    def following(self) -> list[Send]:
        """What the answers in flight will make due, each with its recorded pause in place of a time; some of it may
        have to wait for subagents as well."""
        if self.abandoned:
            return []
        found = []
        for number in self._flying:
            after = [(number, self._next[number] + 1)]
            after += [
                (child, 0)
                for child in self.tree.children(number)
                if self.tree.conversations[child].spawn_after == self._next[number] and child in self._left
            ]
            for conversation, index in after:
                requests = self.tree.conversations[conversation].requests
                if index < len(requests):
                    key = RequestKey(self.tree.id, conversation, index)
                    found.append(Send(self.lane, self.recycle, key, to_ns(requests[index].gap_s)))
        return found

    def sent(self, number: int) -> None:
        """Conversation `number` sends its next request."""
        del self._timers[number]
        self._flying.add(number)

    def answered(self, number: int, now_ns: int) -> None:
        """The request in flight of conversation `number` has ended, well or not."""
        self._flying.remove(number)
        index = self._next[number]
        self._next[number] += 1
        conversation = self.tree.conversations[number]
        if self.abandoned:
            self._left.discard(number)
            return
        for child in self.tree.children(number):
            item = self.tree.conversations[child]
            if item.spawn_after == index and child in self._left and not self._next[child]:
                self._timers[child] = now_ns + to_ns(item.requests[0].gap_s)
        if not self._ended(number):
            self._timers[number] = now_ns + to_ns(conversation.requests[index + 1].gap_s)
            return
        self._left.discard(number)
        if conversation.parent is not None and conversation.join_before is not None:
            gate = (conversation.parent, conversation.join_before)
            self._gates[gate] -= 1
            parent = conversation.parent
            if parent in self._timers and self._next[parent] == conversation.join_before:
                self._timers[parent] = max(self._timers[parent], now_ns)

    def abandon(self) -> int:
        """Send nothing more; returns how many requests are left out. Those in flight may still end."""
        skipped = self.requests_left
        self.abandoned = True
        self._timers.clear()
        self._left &= self._flying
        return skipped
