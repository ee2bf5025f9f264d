"""Which of several engines a request goes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from longturn.errors import ConfigError


class Router(Protocol):
    """Chooses by what a router in front of engines knows: the session and what it has sent where."""

    def choose(self, session: str) -> int:
        """The engine for a session's next request; it counts as sent there."""
        ...

    def ended(self, engine: int) -> None:
        """A request of that engine has ended."""
        ...

    def session_ended(self, session: str) -> None:
        """Nothing more comes of a session."""
        ...


class SessionAffinity:
    """All requests of a session go to one engine: that with the fewest live sessions when it began."""

    def __init__(self, engines: int) -> None:
        self._homes: dict[str, int] = {}
        self._sessions = [0] * engines

    def choose(self, session: str) -> int:
        home = self._homes.get(session)
        if home is None:
            home = self._homes[session] = _least(self._sessions)
            self._sessions[home] += 1
        return home

    def ended(self, engine: int) -> None:
        """Sessions count, not requests."""

    def session_ended(self, session: str) -> None:
        home = self._homes.pop(session, None)
        if home is not None:
            self._sessions[home] -= 1


class RoundRobin:
    """Each request to the next engine."""

    def __init__(self, engines: int) -> None:
        self._engines = engines
        self._next = 0

    def choose(self, session: str) -> int:
        engine = self._next
        self._next = (engine + 1) % self._engines
        return engine

    def ended(self, engine: int) -> None:
        """Nothing is counted."""

    def session_ended(self, session: str) -> None:
        """Nothing is kept."""


class LeastLoaded:
    """Each request to the engine with the fewest in flight, the first of equals."""

    def __init__(self, engines: int) -> None:
        self._flying = [0] * engines

    def choose(self, session: str) -> int:
        engine = _least(self._flying)
        self._flying[engine] += 1
        return engine

    def ended(self, engine: int) -> None:
        self._flying[engine] -= 1

    def session_ended(self, session: str) -> None:
        """Nothing is kept."""


ROUTERS: Mapping[str, Callable[[int], Router]] = MappingProxyType(
    {"session": SessionAffinity, "round-robin": RoundRobin, "least-loaded": LeastLoaded}
)


def make_router(name: str, engines: int) -> Router:
    """Raises ConfigError if there is no such router."""
    if name not in ROUTERS:
        raise ConfigError(f"unknown router '{name}' (known: {', '.join(ROUTERS)})")
    return ROUTERS[name](engines)


def _least(counts: list[int]) -> int:
    return counts.index(min(counts))
