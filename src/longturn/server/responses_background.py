"""Responses that are generated while no connection waits for them: bounded, each client's apart from the others'."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from longturn.errors import LongturnError, OverloadedError
from longturn.server.drain import Drain
from longturn.server.errors import body_of, error_body

log = logging.getLogger(__name__)

MOST = 256
"""Responses in the background at once; one more is refused with 429."""
_Key = tuple[str | None, str]
"""The client (see `gate`), and the response's id."""


@dataclass(frozen=True, slots=True)
class BackgroundWork:
    """One response."""

    generate: Callable[[], Awaitable[None]]
    """Generates it and keeps it."""
    snapshot: Callable[[], bytes]
    """Its JSON as far as it has come."""
    end: Callable[[str, bytes | None], None]
    """Keeps it as what it is: `cancelled`, or `failed` with the error in OpenAI's form."""


class Background:
    """To be used from one event loop."""

    def __init__(self, drain: Drain) -> None:
        """`drain`: a server that stops waits for these as for requests."""
        self._drain = drain
        self._running: dict[_Key, tuple[asyncio.Task[None], BackgroundWork]] = {}

    def __len__(self) -> int:
        return len(self._running)

    def start(self, tenant: str | None, response_id: str, work: BackgroundWork) -> None:
        """Generate a response from now on.

        Raises:
            OverloadedError: too many are generated already.
        """
        if len(self._running) >= MOST:
            raise OverloadedError(
                f"{MOST} responses are generated in the background already; try again later", code="too_many_requests"
            )
        key = tenant, response_id
        task = asyncio.create_task(_ended(response_id, work))
        self._running[key] = (task, work)
        self._drain.enter()
        task.add_done_callback(lambda task: self._done(key, task, work))

    def snapshot(self, tenant: str | None, response_id: str) -> bytes | None:
        """The JSON of a response that is being generated; None if there is none of that id."""
        entry = self._running.get((tenant, response_id))
        return None if entry is None else entry[1].snapshot()

    async def cancel(self, tenant: str | None, response_id: str) -> bool:
        """End a response, and wait until it has ended. False if none of that id is being generated."""
        entry = self._running.get((tenant, response_id))
        if entry is None:
            return False
        entry[0].cancel()
        await asyncio.gather(entry[0], return_exceptions=True)
        return True

    def _done(self, key: _Key, task: asyncio.Task[None], work: BackgroundWork) -> None:
        # Here and not in the task: one that is cancelled before it has begun runs nothing of itself.
        del self._running[key]
        self._drain.leave()
        if task.cancelled():
            work.end("cancelled", None)


async def _ended(response_id: str, work: BackgroundWork) -> None:
    """Generate a response; what goes wrong becomes a part of it."""
    try:
        await work.generate()
    except LongturnError as error:
        work.end("failed", body_of(error))
    except Exception:
        log.exception("response %s failed in the background", response_id)
        work.end("failed", error_body(500, f"internal server error (response {response_id})", code="internal_error"))
