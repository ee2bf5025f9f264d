"""One request's outputs on their way from an engine to the coroutine that reads them."""

from __future__ import annotations

import asyncio

from longturn.engine.records import RequestOutput


def merge_outputs(first: RequestOutput, second: RequestOutput) -> RequestOutput:
    """Two successive outputs of one request as one: tokens are joined, everything else is the later state."""
    return second._replace(
        token_ids=first.token_ids + second.token_ids,
        logprobs=first.logprobs + second.logprobs,
        prompt_logprobs=first.prompt_logprobs + second.prompt_logprobs,
        cached_tokens=max(first.cached_tokens, second.cached_tokens),
        preemptions=max(first.preemptions, second.preemptions),
    )


class OutputStream:
    """A mailbox with one reader. Every method must be called on the event loop that made it.

    Outputs that arrive while the reader is busy are merged, so that a slow reader costs one small record and not a
    growing queue.
    """

    __slots__ = ("_error", "_loop", "_pending", "_waiter")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._pending: RequestOutput | None = None
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def push(self, output: RequestOutput) -> None:
        """Hand over new output."""
        self._pending = output if self._pending is None else merge_outputs(self._pending, output)
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Make the reader raise `error` once it has read what is pending."""
        self._error = error
        self._wake()

    async def next(self) -> RequestOutput:
        """The output since the last call; waits for some.

        Raises:
            whatever `fail` was given.
        """
        while self._pending is None:
            if self._error is not None:
                raise self._error
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        output, self._pending = self._pending, None
        return output

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
