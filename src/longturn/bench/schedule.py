"""What N lanes send when: a closed loop over live session trees, as a pure state machine over a clock of its caller.

A lane replays one tree at a time. Its first starts at a point t* inside the session, since a server meets sessions in
the middle of their lives; when a tree has ended, agents in the background too, the lane takes the next one from its
start. Which tree a lane takes as its k-th, and every t*, follow from the seed alone and not from how fast the server
answers. So the same seed and the same answer times give the same schedule, to the nanosecond.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from longturn.bench.lanes import LiveTree, Send, to_ns
from longturn.bench.presets import Rules
from longturn.bench.synth import RequestKey, tree_marker
from longturn.bench.traces.tree import SessionTree
from longturn.errors import ConfigError


def start_point_s(tree: SessionTree, lane: int, seed: int, window: tuple[float, float]) -> float:
    """t* of a lane's first session, seconds on the session's clock: uniform in the window's share of the time from the
    first to the last request of any agent."""
    digest = hashlib.sha256(f"{seed}:{tree.id}:{lane}".encode()).digest()
    share = int.from_bytes(digest[:8], "big") / 2**64
    starts = [request.start_s for request in tree.requests()]
    first, last = min(starts), max(starts)
    low, high = window
    # Rounding must not leave a start point after which nothing comes.
    return min(last, first + (low + (high - low) * share) * (last - first))


class Schedule:
    """The sends of one measurement. Times are nanoseconds since its start."""

    def __init__(self, trees: Sequence[SessionTree], rules: Rules, lanes: int, seed: int, run: str) -> None:
        """
        Args:
            trees: the sessions, scaled and filtered already.
            rules: see there.
            lanes: session trees alive at once.
            seed: of the order of sessions and of their start points.
            run: name of the run, of which the markers are made: another run must not find this one's prompts cached.

        Raises:
            ConfigError: no sessions, or no lanes.
        """
        if not trees:
            raise ConfigError("the traces hold no session to replay")
        if lanes < 1:
            raise ConfigError(f"concurrency must be at least 1, not {lanes}")
        self._trees = trees
        self._rules = rules
        self._seed = seed
        self._run = run
        self._count = lanes
        self._end_ns = to_ns(rules.duration_s)
        self._orders: dict[int, list[int]] = {}
        self._closed = False
        self._now_ns = 0
        """Latest end of an answer that was told; they come in the order in which the caller saw them."""
        self.skipped = 0
        """Requests left out after their session outgrew the server's context."""
        self.finished: list[LiveTree] = []
        """Trees that have ended."""
        self.lanes = [self._take(lane, 0) for lane in range(lanes)]
        # All lanes are at their t* when the measurement starts; its first request is sent at once.
        first = min(due for live in self.lanes if (due := live.earliest_ns()) is not None)
        for live in self.lanes:
            live.shift(-first)
        self._cap_idle()

    def _take(self, lane: int, recycle: int) -> LiveTree:
        tree = self._trees[self._pick(lane, recycle)]
        t_star_s = None if recycle else start_point_s(tree, lane, self._seed, self._rules.window)
        return LiveTree(tree, lane, recycle, tree_marker(self._run, recycle, lane, tree.id), t_star_s=t_star_s)

    def _pick(self, lane: int, recycle: int) -> int:
        """Index of a lane's tree: rounds through all trees, each in a random order."""
        turn, place = divmod(lane + recycle * self._count, len(self._trees))
        order = self._orders.get(turn)
        if order is None:
            order = list(range(len(self._trees)))
            random.Random(f"{self._seed}:{turn}").shuffle(order)
            self._orders[turn] = order
        return order[place]

    def warm_up(self) -> list[list[RequestKey]]:
        """For each lane what it sends before the measurement, one after the other, with one output token each."""
        return [live.warm_up(self._rules.warmup_requests) for live in self.lanes]

    @property
    def in_flight(self) -> bool:
        return any(not live.idle for live in self.lanes)

    @property
    def closed(self) -> bool:
        """Nothing more will be sent."""
        return self._closed

    @property
    def end_ns(self) -> int:
        """From here on nothing is sent."""
        return self._end_ns

    def close(self) -> None:
        """Send nothing more."""
        self._closed = True

    def next_ns(self) -> int | None:
        """When something is due next; None if nothing will be without another answer."""
        if self._closed:
            return None
        due = min((at for live in self.lanes if (at := live.earliest_ns()) is not None), default=None)
        return due if due is not None and due < self._end_ns else None

    def due(self, now_ns: int) -> list[Send]:
        """What must be sent now, soonest first; it counts as sent. Nothing is sent from the end on."""
        if self._closed or now_ns >= self._end_ns:
            self._closed = True
            return []
        found = [send for send in self.upcoming() if send.due_ns <= now_ns]
        for send in found:
            self.lanes[send.lane].sent(send.key.conversation)
        return found

    def upcoming(self) -> list[Send]:
        """What is due without another answer, soonest first."""
        found = [send for live in self.lanes for send in live.pending()]
        return sorted(found, key=lambda send: (send.due_ns, send.lane, send.key.conversation))

    def following(self, within_ns: int) -> list[tuple[LiveTree, Send]]:
        """What the answers in flight may make due, with its tree, the shortest pause first: for prompts that can be
        made before.

        Args:
            within_ns: longest recorded pause after the answer.
        """
        found = []
        for live in self.lanes:
            found += [(live, send) for send in live.following()]
            if not live.abandoned and live.requests_left == 0:  # the next session may start with the last answer
                following = self._take(live.lane, live.recycle + 1)
                found += [(following, send) for send in following.pending()]
        near = [pair for pair in found if pair[1].due_ns <= within_ns]
        return sorted(near, key=lambda pair: (pair[1].due_ns, pair[1].lane, pair[1].key.conversation))

    def answered(self, send: Send, now_ns: int, *, overflow: bool = False) -> None:
        """A request has ended, well or not.

        Args:
            send: which one.
            now_ns: when.
            overflow: the server refused it as too long. What follows in its session is longer still, so the session
                ends; after any other failure it goes on.
        """
        live = self.lanes[send.lane]
        live.answered(send.key.conversation, now_ns)
        if overflow and not live.abandoned:
            self.skipped += live.abandon()
        if live.done and not self._closed and now_ns < self._end_ns:
            self.finished.append(live)
            self.lanes[send.lane] = self._take(send.lane, send.recycle + 1)
            self.lanes[send.lane].shift(now_ns)
        self._now_ns = max(self._now_ns, now_ns)
        self._cap_idle()

    def _cap_idle(self) -> None:
        """Cut pauses in which nothing is in flight.

        A pause begins with an answer and ends with a send, and nothing changes in between: so it can be cut when it
        begins.
        """
        for live in self.lanes:
            due = live.earliest_ns()
            if self._rules.tree_idle_s is not None and live.idle and due is not None:
                live.shift(-max(0, due - self._now_ns - to_ns(self._rules.tree_idle_s)))
        dues = [due for live in self.lanes if (due := live.earliest_ns()) is not None]
        if self._rules.system_idle_s is not None and not self.in_flight and dues:
            cut = max(0, min(dues) - self._now_ns - to_ns(self._rules.system_idle_s))
            for live in self.lanes:
                live.shift(-cut)
