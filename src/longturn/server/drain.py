"""What a server that was told to stop still has to finish."""

from __future__ import annotations

import asyncio


class Drain:
    """Counts requests in progress, and says when the last has ended. It belongs to one event loop."""

    def __init__(self) -> None:
        self._open = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def draining(self) -> bool:
        """Whether new requests are refused."""
        return self._draining

    def begin(self) -> None:
        """Refuse new requests from now on."""
        self._draining = True

    def enter(self) -> None:
        """A request has begun."""
        self._open += 1
        self._idle.clear()

    def leave(self) -> None:
        """A request has ended."""
        self._open -= 1
        if not self._open:
            self._idle.set()

    async def wait(self, seconds: float) -> bool:
        """Wait until no request is in progress, `seconds` at most. Returns whether that is so."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
