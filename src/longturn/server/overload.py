"""How long a client that was refused for a full queue should wait before it asks again."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 60.0
"""Only requests that ended this recently tell how fast the queue moves."""
MOST_ENDS = 256
LEAST_S, MOST_S = 1, 300
UNKNOWN_S = 5
"""Answer while too few requests have ended to tell."""


class QueuePace:
    """How fast requests end."""

    def __init__(self, *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        self._ends_s: deque[float] = deque(maxlen=MOST_ENDS)

    def ended(self) -> None:
        """A request has ended, so the queue has moved by one."""
        self._ends_s.append(self._monotonic_s())

    def retry_after_s(self, waiting: int) -> int:
        """Whole seconds until about half of `waiting` requests have left the queue.

        Half, because it is the room that matters and not the end of the queue: whoever comes back then finds some.
        """
        now_s = self._monotonic_s()
        recent = [end_s for end_s in self._ends_s if now_s - end_s <= WINDOW_S]
        if len(recent) < 2:
            return UNKNOWN_S
        each_s = (now_s - recent[0]) / len(recent)
        return min(MOST_S, max(LEAST_S, math.ceil(each_s * max(1, waiting) / 2)))
