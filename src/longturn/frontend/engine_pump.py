"""The loop that drives an engine between a transport's commands and its outputs.

It is the same for an engine on a thread of this process and for one in a process of its own. Commands are drained
before every step, so an abort reaches a busy engine within one step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from longturn.engine.records import EngineRequest, EngineStats, StepOutputs
from longturn.errors import LongturnError, RequestError

log = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0
"""Longest wait for a command while the engine has no work."""


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop computing a request, if it is still there."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop; requests in flight are dropped."""


Command = EngineRequest | Abort | Stop


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


class Transport(Protocol):
    """Where commands come from and outputs go."""

    def receive(self, wait_s: float) -> Sequence[Command]:
        """All commands that have arrived; waits up to `wait_s` seconds for a first one."""
        ...

    def send_outputs(self, outputs: StepOutputs) -> None: ...

    def send_rejection(self, rejection: Rejection) -> None: ...


def pump(engine: PumpedEngine, transport: Transport) -> None:
    """Run `engine` until the transport says `Stop`. Raises what `engine.step` raises."""
    was_busy = False
    while True:
        commands = transport.receive(0.0 if engine.has_work() else IDLE_WAIT_S)
        for command in commands:
            if isinstance(command, Stop):
                return
            if isinstance(command, Abort):
                engine.abort(command.request_id)
            else:
                _add(engine, transport, command)
        # An abort can leave its last output behind without leaving work, hence a step after any command.
        outputs = engine.step() if commands or engine.has_work() else None
        if outputs is not None:
            transport.send_outputs(outputs)
        busy = engine.has_work()
        if not busy and (was_busy or commands):
            # The gauges of the last step still count the requests that it finished.
            transport.send_outputs(StepOutputs(stats=engine.stats()))
        was_busy = busy


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
