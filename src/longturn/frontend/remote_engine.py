"""An engine in a process of its own, and the supervisor that restarts it once when it dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable

import zmq.asyncio

from longturn.config import EngineConfig
from longturn.engine.protocols import ExecutorInfo
from longturn.engine.records import EngineRequest, EngineStats, RequestOutput, StepOutputs
from longturn.errors import EngineDeadError, LongturnError, RequestError
from longturn.frontend.engine_child import EngineChild
from longturn.frontend.engine_pump import Abort, CacheReset, Rejection, ResetCache
from longturn.frontend.output_stream import OutputStream

log = logging.getLogger(__name__)

DEFAULT_FACTORY = "longturn.assemble:build_engine"
SECOND_DEATH_WINDOW_S = 600.0
"""An engine that dies twice within this time stays dead: restarting would hide the fault and lose every request."""


class RemoteEngine:
    """An `EngineClient` over an engine process. All methods belong to the event loop that called `start`.

    When the process dies, requests in flight fail with `EngineDeadError`, the cause is logged with the last lines
    that the process wrote, and it is started again; if it dies a second time within ten minutes it stays dead. One that
    says nothing for `server.engine_silence_s` is ended, which leaves its stacks in the log, and counts as dead.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        factory: str = DEFAULT_FACTORY,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._factory = factory
        self._monotonic_s = monotonic_s
        self._streams: dict[str, OutputStream] = {}
        self._stats = EngineStats()
        self._child: EngineChild | None = None
        self._context: zmq.asyncio.Context | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._info: ExecutorInfo | None = None
        self._down: str | None = "the engine is starting"
        self._restarts = 0
        self._closing = False
        self._silence_s = config.server.engine_silence_s
        self._heard_s = 0.0
        """When the process last said something."""
        self._hung: str | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._resets: dict[int, asyncio.Future[int]] = {}
        self._reset_count = 0

    @property
    def alive(self) -> bool:
        return self._down is None

    def health(self) -> str:
        """`ok`, or one line that says why there is no engine."""
        return self._down or "ok"

    @property
    def restarts(self) -> int:
        """How often the engine process was started again."""
        return self._restarts

    @property
    def pid(self) -> int | None:
        """Process id of the engine, if there is one."""
        return None if self._child is None else self._child.pid

    @property
    def info(self) -> ExecutorInfo:
        """What the executor can hold. Raises EngineDeadError before the engine was ready for the first time."""
        if self._info is None:
            raise EngineDeadError(self.health())
        return self._info

    def stats(self) -> EngineStats:
        return self._stats

    async def start(self) -> ExecutorInfo:
        """Start the process and wait until it is ready.

        Raises:
            LongturnError: the engine could not be built; one line, with the exit code of the cause.
        """
        self._context = zmq.asyncio.Context(io_threads=1)
        try:
            info = await self._start_child()
        except BaseException:
            await self.close()
            raise
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")
        if self._silence_s:
            self._watcher = asyncio.create_task(self._watch(), name="engine-watch")
        return info

    async def generate(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        """See `EngineClient.generate`."""
        if self._down is not None or self._child is None:
            raise EngineDeadError(self.health())
        if request.request_id in self._streams:
            raise RequestError(f"request id '{request.request_id}' is in use", param="request_id")
        child = self._child
        stream = self._streams[request.request_id] = OutputStream()
        ended = False
        try:
            child.send(request)
            while not ended:
                output = await stream.next()
                ended = output.finish is not None
                yield output
        except LongturnError:
            ended = True
            raise
        finally:
            if self._streams.get(request.request_id) is stream:
                del self._streams[request.request_id]
            if not ended and child is self._child and self._down is None:
                child.send(Abort(request.request_id))

    def abort(self, request_id: str) -> bool:
        """End a request; its reader gets an output with ABORT. False if there is no reader of that id."""
        if request_id not in self._streams or self._child is None:
            return False
        self._child.send(Abort(request_id))
        return True

    async def reset_prefix_cache(self) -> int:
        """Forget all cached pages; the number of pages that were known.

        Raises:
            EngineDeadError: there is no engine, or it died before it answered.
        """
        if self._down is not None or self._child is None:
            raise EngineDeadError(self.health())
        self._reset_count += 1
        number = self._reset_count
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._resets[number] = answer
        try:
            self._child.send(ResetCache(number))
            return await answer
        finally:
            del self._resets[number]

    async def close(self, why: str = "the engine was closed") -> None:
        """End the process; readers that still wait get `EngineDeadError`, which says `why`."""
        self._closing = True
        self._down = why
        self._fail_streams(self._down)
        for task in (self._watcher, self._supervisor):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self._child is not None:
            await self._child.close()
            self._child = None
        if self._context is not None:
            self._context.term()
            self._context = None

    async def _start_child(self) -> ExecutorInfo:
        assert self._context is not None
        self._child = await EngineChild.spawn(self._config, self._factory, self._context)
        self._info = await self._child.ready()
        self._hung, self._heard_s = None, self._monotonic_s()
        if not self._closing:
            self._down = None
        return self._info

    async def _watch(self) -> None:
        """End a process that is alive and says nothing: one that works or waits says something every second."""
        pause_s = min(1.0, self._silence_s / 4)
        looked_s = self._monotonic_s()
        while True:
            await asyncio.sleep(pause_s)
            now_s = self._monotonic_s()
            if now_s - looked_s > 2 * pause_s + 0.5:
                self._heard_s = now_s  # it was this process that stood still, and what was said waits to be read
            looked_s = now_s
            if self._down is None and self._child is not None and now_s - self._heard_s > self._silence_s:
                self._hung = f"it said nothing for {self._silence_s:g} s"
                self._down = f"the engine hangs: {self._hung}"
                log.error("%s (server.engine_silence_s); it is ended", self._down)
                self._fail_streams(self._down)
                self._child.abort()

    async def _supervise(self) -> None:
        last_death_s: float | None = None
        while True:
            assert self._child is not None
            try:
                await self._child.run(self._on_outputs, self._on_rejection, self._on_reset)
            except Exception:
                log.exception("the engine process sent what cannot be read")
                self._child.kill()
            cause = await self._child.cause()
            cause = self._hung or cause
            now_s = self._monotonic_s()
            again = last_death_s is None or now_s - last_death_s > SECOND_DEATH_WINDOW_S
            last_death_s = now_s
            self._down = f"the engine died: {cause}; " + (
                "it is being restarted" if again else "it died twice within ten minutes and is not restarted"
            )
            self._stats = EngineStats()
            lost = self._fail_streams(self._down)
            log.error("%s (requests lost: %d); its last output:\n%s", self._down, lost, "\n".join(self._child.tail()))
            await self._child.close()
            self._child = None
            if not again:
                return
            try:
                self._restarts += 1
                await self._start_child()
            except Exception as error:
                self._down = f"the engine died: {cause}; it could not be restarted: {error}"
                log.error("%s", self._down, exc_info=not isinstance(error, LongturnError))
                if self._child is not None:
                    await self._child.close()
                    self._child = None
                return
            log.warning("the engine is running again")

    def _on_outputs(self, outputs: StepOutputs) -> None:
        self._heard_s = self._monotonic_s()
        self._stats = outputs.stats
        for output in outputs.outputs:
            # An aborted request's reader is gone before its last output arrives.
            stream = self._streams.get(output.request_id)
            if stream is not None:
                stream.push(output)

    def _on_rejection(self, rejection: Rejection) -> None:
        stream = self._streams.get(rejection.request_id)
        if stream is not None:
            stream.fail(rejection.error())

    def _on_reset(self, reset: CacheReset) -> None:
        answer = self._resets.get(reset.number)
        if answer is not None and not answer.done():
            answer.set_result(reset.pages)

    def _fail_streams(self, why: str) -> int:
        streams = list(self._streams.values())
        self._streams.clear()
        for stream in streams:
            stream.fail(EngineDeadError(why))
        for answer in self._resets.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(why))
        return len(streams)
