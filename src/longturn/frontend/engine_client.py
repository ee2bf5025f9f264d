"""How the frontend reaches an engine, wherever it runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from longturn.engine.records import EngineRequest, EngineStats, RequestOutput


class EngineClient(Protocol):
    """An engine in this process or another one."""

    def generate(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        """Outputs of one request until one has `finish` set.

        Closing the iterator early aborts the request within one step.

        Raises:
            RequestError: the engine refused the request (429 when too many wait).
            EngineDeadError: the engine died before the request finished.
        """
        ...

    def stats(self) -> EngineStats:
        """The latest snapshot that the engine sent."""
        ...

    @property
    def alive(self) -> bool: ...
