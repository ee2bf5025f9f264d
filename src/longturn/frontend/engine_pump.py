"""The loop that drives an engine between a transport's commands and its outputs.

It is the same for an engine on a thread of this process and for one in a process of its own. Commands are drained
before every step, so an abort reaches a busy engine within one step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from longturn.engine.records import (
    EngineRequest,
    EngineStats,
    FinishReason,
    RequestOutput,
    SamplingParams,
    StepOutputs,
)
from longturn.errors import LongturnError, RequestError

log = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0
"""Longest wait for a command while the engine has no work."""
HELD_WAIT_S = 0.005
"""The same while requests are held until the executor is ready for them."""
QUIET_WAIT_S = 0.05
"""The same while the executor has work of its own left, which a command then waits for: a client that goes on at once
does not meet it."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop computing a request, if it is still there."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop; requests in flight are dropped."""


@dataclass(frozen=True, slots=True)
class ResetCache:
    """Forget all cached pages."""

    number: int
    """Comes back with the answer."""


@dataclass(frozen=True, slots=True)
class CacheReset:
    """All cached pages were forgotten."""

    number: int
    pages: int
    """How many were known."""


Command = EngineRequest | Abort | ResetCache | Stop


@dataclass(frozen=True, slots=True)
class Rejection:
    """The engine would not take a request."""

    request_id: str
    message: str
    param: str | None = None
    code: str | None = None
    http_status: int = 400

    def error(self) -> RequestError:
        """The exception that the engine raised, as the reader of the request's outputs shall see it."""
        error = RequestError(self.message, param=self.param, code=self.code)
        error.http_status = self.http_status
        return error


class PumpedEngine(Protocol):
    """What the pump needs of an engine; `engine.loop.Engine` is one."""

    def add(self, request: EngineRequest) -> None: ...
    def abort(self, request_id: str) -> object: ...
    def step(self) -> StepOutputs | None: ...
    def has_work(self) -> bool: ...
    def stats(self) -> EngineStats: ...
    def close(self) -> None: ...


@runtime_checkable
class CachingEngine(Protocol):
    """An engine with a prefix cache."""

    def reset_cache(self) -> int:
        """Forget all cached pages; the number of pages that were known."""
        ...


@runtime_checkable
class PreparingEngine(Protocol):
    """An engine that wants some requests held back a while; see `engine.protocols.Preparing`."""

    def ready(self, sampling: SamplingParams) -> bool: ...


@runtime_checkable
class IdlingEngine(Protocol):
    """An engine that has something to do without requests; see `engine.protocols.Idling`."""

    def idle(self) -> bool: ...


class Transport(Protocol):
    """Where commands come from and outputs go."""

    def receive(self, wait_s: float) -> Sequence[Command]:
        """All commands that have arrived; waits up to `wait_s` seconds for a first one."""
        ...

    def send_outputs(self, outputs: StepOutputs) -> None: ...

    def send_rejection(self, rejection: Rejection) -> None: ...

    def send_reset(self, reset: CacheReset) -> None: ...


def pump(engine: PumpedEngine, transport: Transport) -> None:
    """Run `engine` until the transport says `Stop`. Raises what `engine.step` raises."""
    idling = isinstance(engine, IdlingEngine)
    held: list[EngineRequest] = []
    while True:
        idle_wait_s = HELD_WAIT_S if held else QUIET_WAIT_S if idling else IDLE_WAIT_S
        commands = transport.receive(0.0 if engine.has_work() else idle_wait_s)
        for command in commands:
            if isinstance(command, Stop):
                return
            if isinstance(command, ResetCache):
                pages = engine.reset_cache() if isinstance(engine, CachingEngine) else 0
                transport.send_reset(CacheReset(command.number, pages))
            elif isinstance(command, Abort):
                if any(request.request_id == command.request_id for request in held):
                    held = [request for request in held if request.request_id != command.request_id]
                    # The engine never had it, so it cannot tell its reader.
                    aborted = RequestOutput(command.request_id, finish=FinishReason.ABORT)
                    transport.send_outputs(StepOutputs((aborted,), engine.stats()))
                engine.abort(command.request_id)
            elif _ready(engine, command):
                _add(engine, transport, command)
            else:
                held.append(command)
        if held:
            for request in (prepared := [request for request in held if _ready(engine, request)]):
                _add(engine, transport, request)
            held = [request for request in held if request not in prepared]
        if idling and not commands and not held and not engine.has_work():
            idling = isinstance(engine, IdlingEngine) and engine.idle()
        # An abort can leave its last output behind without leaving work, hence a step after any command.
        outputs = engine.step() if commands or engine.has_work() else None
        if outputs is not None:
            transport.send_outputs(outputs)
        if not held and not engine.has_work():
            # After work: the gauges of the last step still count the requests that it finished. Otherwise a sign of
            # life, about once a second.
            transport.send_outputs(StepOutputs(stats=engine.stats()))


def _ready(engine: PumpedEngine, request: EngineRequest) -> bool:
    return not isinstance(engine, PreparingEngine) or engine.ready(request.sampling)


def _add(engine: PumpedEngine, transport: Transport, request: EngineRequest) -> None:
    try:
        engine.add(request)
    except RequestError as error:
        transport.send_rejection(Rejection(request.request_id, str(error), error.param, error.code, error.http_status))
    except LongturnError as error:
        transport.send_rejection(Rejection(request.request_id, str(error), http_status=error.http_status))
    except Exception:
        # A bug, but one request's: the others must not lose their engine for it.
        log.exception("the engine failed to take request %s", request.request_id)
        transport.send_rejection(
            Rejection(request.request_id, "internal error while the engine took the request", http_status=500)
        )
