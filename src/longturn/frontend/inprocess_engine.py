"""An engine on a thread of this process: what `longturn.LLM` and tests use, and serving without a socket."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import logging
import threading
import time
from collections.abc import AsyncIterator, Sequence

from longturn.engine.records import EngineRequest, EngineStats, RequestOutput, StepOutputs
from longturn.errors import EngineDeadError, LongturnError, RequestError
from longturn.frontend.engine_pump import (
    Abort,
    CacheReset,
    Command,
    PumpedEngine,
    Rejection,
    ResetCache,
    Stop,
    pump,
)
from longturn.frontend.output_stream import OutputStream

log = logging.getLogger(__name__)

HUNG_JOIN_S = 5.0
"""Time that a thread which hangs is given to end."""


class InProcessEngine:
    """An `EngineClient` over an engine that runs on its own thread. Readers may live on any event loops."""

    def __init__(self, engine: PumpedEngine, *, silence_s: float = 0.0) -> None:
        """
        Args:
            engine: what to run.
            silence_s: one that neither takes commands nor says anything for this long hangs: its readers get
                `EngineDeadError`, and it counts as dead until it goes on. 0 waits for ever.
        """
        self._engine = engine
        self._silence_s = silence_s
        self._heard_s = time.monotonic()
        self._hung: str | None = None
        self._ended = threading.Event()
        self._inbox: collections.deque[Command] = collections.deque()
        self._arrived = threading.Condition()
        self._lock = threading.Lock()
        """Guards `_streams` and `_dead`: readers and the engine's thread both change them."""
        self._streams: dict[str, OutputStream] = {}
        self._dead: str | None = None
        self._stats = engine.stats()
        self._resets: dict[int, concurrent.futures.Future[int]] = {}
        self._reset_count = 0
        self._thread = threading.Thread(target=self._run, name="longturn-engine", daemon=True)
        self._thread.start()
        if silence_s:
            threading.Thread(target=self._watch, name="longturn-engine-watch", daemon=True).start()

    @property
    def alive(self) -> bool:
        return self._dead is None and self._hung is None

    def health(self) -> str:
        """`ok`, or one line that says why there is no engine."""
        return self._dead or self._hung or "ok"

    def stats(self) -> EngineStats:
        return self._stats

    @property
    def restarts(self) -> int:
        """Always 0: an engine on a thread cannot be started again safely."""
        return 0

    async def generate(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        """See `EngineClient.generate`."""
        stream = OutputStream()
        with self._lock:
            if not self.alive:
                raise EngineDeadError(self.health())
            if request.request_id in self._streams:
                raise RequestError(f"request id '{request.request_id}' is in use", param="request_id")
            self._streams[request.request_id] = stream
        ended = False
        try:
            self._command(request)
            while not ended:
                output = await stream.next()
                ended = output.finish is not None
                yield output
        except LongturnError:
            ended = True
            raise
        finally:
            with self._lock:
                known = self._streams.pop(request.request_id, None) is stream
            if known and not ended:
                self._command(Abort(request.request_id))

    def abort(self, request_id: str) -> bool:
        """End a request; its reader gets an output with ABORT. False if there is no reader of that id."""
        with self._lock:
            known = request_id in self._streams
        if known:
            self._command(Abort(request_id))
        return known

    async def reset_prefix_cache(self) -> int:
        """Forget all cached pages; the number of pages that were known.

        Raises:
            EngineDeadError: there is no engine, or it died before it answered.
        """
        answer: concurrent.futures.Future[int] = concurrent.futures.Future()
        with self._lock:
            if self._dead is not None:
                raise EngineDeadError(self._dead)
            self._reset_count += 1
            number = self._reset_count
            self._resets[number] = answer
        self._command(ResetCache(number))
        return await asyncio.wrap_future(answer)

    def close(self) -> None:
        """Stop the thread and close the engine; readers that still wait get `EngineDeadError`."""
        self._command(Stop())
        # One that hangs is left behind: the thread ends with the process.
        self._thread.join(HUNG_JOIN_S if self._hung else None)

    # --- Transport, called on the engine's thread --------------------------------------------------------------------

    def receive(self, wait_s: float) -> Sequence[Command]:
        self._heard()
        with self._arrived:
            if not self._inbox and wait_s > 0:
                self._arrived.wait(wait_s)
            commands = list(self._inbox)
            self._inbox.clear()
        self._heard()
        return commands

    def send_outputs(self, outputs: StepOutputs) -> None:
        self._stats = outputs.stats
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, RequestOutput]]] = {}
        with self._lock:
            for output in outputs.outputs:
                stream = self._streams.get(output.request_id)
                if stream is not None:
                    by_loop.setdefault(stream.loop, []).append((stream, output))
        for loop, deliveries in by_loop.items():
            try:
                loop.call_soon_threadsafe(_deliver, deliveries)
            except RuntimeError:
                # The reader's loop was closed without closing its generator: nobody will read this again.
                for _, output in deliveries:
                    self._forget(output)

    def send_rejection(self, rejection: Rejection) -> None:
        with self._lock:
            stream = self._streams.get(rejection.request_id)
        if stream is not None:
            _fail(stream, rejection.error())

    def send_reset(self, reset: CacheReset) -> None:
        with self._lock:
            answer = self._resets.pop(reset.number, None)
        if answer is not None and answer.set_running_or_notify_cancel():
            answer.set_result(reset.pages)

    # --- inner -------------------------------------------------------------------------------------------------------

    def _command(self, command: Command) -> None:
        with self._arrived:
            self._inbox.append(command)
            self._arrived.notify()

    def _heard(self) -> None:
        self._heard_s = time.monotonic()
        self._hung = None

    def _watch(self) -> None:
        """On a thread of its own: tell readers of an engine that hangs."""
        while not self._ended.wait(min(1.0, self._silence_s / 4)):
            if time.monotonic() - self._heard_s <= self._silence_s or self._hung is not None:
                continue
            with self._lock:
                self._hung = f"the engine hangs: it did nothing for {self._silence_s:g} s"
                streams = dict(self._streams)
                self._streams.clear()
                why = self._hung
            log.error("%s", why)
            for request_id, stream in streams.items():
                _fail(stream, EngineDeadError(why))
                self._command(Abort(request_id))  # for when it goes on

    def _forget(self, output: RequestOutput) -> None:
        with self._lock:
            self._streams.pop(output.request_id, None)
        if output.finish is None:
            self._command(Abort(output.request_id))

    def _run(self) -> None:
        cause = "the engine was closed"
        try:
            pump(self._engine, self)
        except Exception as error:
            log.exception("the engine died")
            cause = f"the engine died: {type(error).__name__}: {error}"
        finally:
            self._ended.set()
            with self._lock:
                self._dead = cause
                streams = list(self._streams.values())
                self._streams.clear()
                resets = list(self._resets.values())
                self._resets.clear()
            for stream in streams:
                _fail(stream, EngineDeadError(cause))
            for answer in resets:
                if answer.set_running_or_notify_cancel():
                    answer.set_exception(EngineDeadError(cause))
            self._engine.close()


def _deliver(deliveries: list[tuple[OutputStream, RequestOutput]]) -> None:
    for stream, output in deliveries:
        stream.push(output)


def _fail(stream: OutputStream, error: BaseException) -> None:
    try:
        stream.loop.call_soon_threadsafe(stream.fail, error)
    except RuntimeError:
        log.debug("a reader's event loop was closed before its request ended")
