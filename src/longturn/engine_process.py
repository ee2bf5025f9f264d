"""The engine's own process: `python -m longturn.engine_process ENDPOINT FACTORY`.

The configuration comes as one JSON line on standard input, which then stays open: its end means that the server is
gone, however it went, and this process follows at once. (Arguments would show API keys to everyone who can list
processes; a parent-death signal would fire when the *thread* that started us ends.)

FACTORY is `module:function`, called with the `EngineConfig`; it returns an engine such as `engine.loop.Engine`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from longturn.config import EngineConfig
from longturn.engine.protocols import Executor
from longturn.engine.records import StepOutputs
from longturn.errors import LongturnError
from longturn.frontend.engine_pump import CacheReset, Command, PumpedEngine, Rejection, pump
from longturn.frontend.wire import StartupError, decode_command, encode_message

LINGER_MS = 2000
"""Time that a last message may take to leave."""


class BuiltEngine(PumpedEngine, Protocol):
    """What a factory returns; `engine.loop.Engine` is one."""

    @property
    def executor(self) -> Executor: ...


class SocketTransport:
    """Commands and outputs over a connected ZeroMQ socket."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def receive(self, wait_s: float) -> list[Command]:
        commands: list[Command] = []
        if wait_s > 0 and not self._socket.poll(int(wait_s * 1000)):
            return commands
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return commands
            commands.append(decode_command(frames))

    def send_outputs(self, outputs: StepOutputs) -> None:
        self._socket.send_multipart(encode_message(outputs))

    def send_rejection(self, rejection: Rejection) -> None:
        self._socket.send_multipart(encode_message(rejection))

    def send_reset(self, reset: CacheReset) -> None:
        self._socket.send_multipart(encode_message(reset))


def load_factory(spec: str) -> Callable[[EngineConfig], BuiltEngine]:
    """The function that `module:function` names."""
    module, _, function = spec.partition(":")
    factory: Callable[[EngineConfig], BuiltEngine] = getattr(importlib.import_module(module), function)
    return factory


def run(config: EngineConfig, endpoint: str, factory_spec: str) -> int:
    """Build the engine, say that it is ready, and serve until told to stop. Returns the exit code."""
    context = zmq.Context(io_threads=1)
    socket = context.socket(zmq.DEALER)
    # No high-water mark: the engine must never block on a server that reads slowly; what piles up is bounded by
    # the tokens of the requests in flight.
    socket.set_hwm(0)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.connect(endpoint)
    try:
        try:
            engine = load_factory(factory_spec)(config)
        except LongturnError as error:
            socket.send_multipart(encode_message(StartupError(str(error), error.exit_code)))
            return error.exit_code
        try:
            socket.send_multipart(encode_message(engine.executor.info))
            pump(engine, SocketTransport(socket))
        finally:
            engine.close()
        return 0
    finally:
        socket.close()
        context.term()


def main(arguments: Sequence[str]) -> int:
    """Entry point of the process."""
    endpoint, factory_spec = arguments
    faulthandler.enable()
    # Ctrl-C in a terminal reaches the whole process group; the server decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s engine %(name)s: %(message)s")
    config = msgspec.json.decode(_read_line(0), type=EngineConfig)
    threading.Thread(target=_end_with_parent, args=(0, endpoint), name="parent-watch", daemon=True).start()
    return run(config, endpoint, factory_spec)


def _read_line(fd: int) -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(fd, 1 << 16)
        if not data:
            os._exit(0)
        line += data
    return line


def _end_with_parent(fd: int, endpoint: str) -> None:
    while os.read(fd, 1 << 16):
        pass
    # The server removes the socket's directory when it ends in order; if it was killed, this is what is left of it.
    path = Path(endpoint.removeprefix("ipc://"))
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)
        path.parent.rmdir()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
