"""Collectives among the chips of one scale-up domain: measured times at some sizes, interpolated and scaled."""

from __future__ import annotations

import bisect

from longturn.errors import ConfigError
from longturn.simulate.calibration import CollectiveConstants, Knots


class Collective:
    """Time of one collective by message size, on `ranks` chips whose links have `link_bytes_s` one way."""

    __slots__ = ("_bytes", "_ns")

    def __init__(self, constants: CollectiveConstants, ranks: int, link_bytes_s: float) -> None:
        """Raises ConfigError if no smaller or equal number of ranks was measured."""
        self._bytes: tuple[float, ...]
        self._ns: tuple[float, ...]
        if ranks < 2:
            self._bytes, self._ns = (1.0,), (0.0,)
            return
        measured = max((n for n in constants.ranks if n <= ranks), default=None)
        if measured is None:
            raise ConfigError(f"no collective among {ranks} chips is calibrated")
        knots = constants.ranks[measured]
        latency = knots.ns[0]
        # Beyond the ranks that were measured: each doubling adds as much latency as the last measured doubling did,
        # and a ring moves (n - 1) / n of the bytes.
        more = _latency_growth(constants, measured) * max(0, (ranks // measured).bit_length() - 1)
        volume = ((ranks - 1) / ranks) / ((measured - 1) / measured)
        scale = constants.link_bytes_s / link_bytes_s * volume
        ns = [latency + more + (value - latency) * scale for value in knots.ns]
        self._bytes = tuple(float(value) for value in knots.bytes)
        # A measured dip between two sizes is noise or another algorithm: larger messages are never cheaper here.
        self._ns = tuple(max(ns[: i + 1]) for i in range(len(ns)))

    def ns(self, message_bytes: float) -> float:
        """Nanoseconds for a message of so many bytes on each rank; 0 bytes are free."""
        if message_bytes <= 0 or self._ns[-1] == 0:
            return 0.0
        sizes, times = self._bytes, self._ns
        i = bisect.bisect_left(sizes, message_bytes)
        if i == 0:
            return times[0]
        if i == len(sizes):
            slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
            return times[-1] + (message_bytes - sizes[-1]) * slope
        share = (message_bytes - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
        return times[i - 1] + share * (times[i] - times[i - 1])


def _latency_growth(constants: CollectiveConstants, measured: int) -> float:
    below = [n for n in constants.ranks if n < measured]
    if not below:
        return 0.0
    last: Knots = constants.ranks[max(below)]
    return max(0.0, constants.ranks[measured].ns[0] - last.ns[0])
