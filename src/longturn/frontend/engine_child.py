"""One life of an engine process: start it, talk to it, and say why it ended."""

from __future__ import annotations

import asyncio
import codecs
import collections
import contextlib
import dataclasses
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from longturn.config import EngineConfig, ServerConfig
from longturn.engine.protocols import ExecutorInfo
from longturn.engine.records import StepOutputs
from longturn.errors import EngineDeadError, LongturnError
from longturn.frontend.engine_pump import CacheReset, Command, Rejection, Stop
from longturn.frontend.wire import Event, StartupError, decode_event, encode_message
from longturn.json_log import json_line

TAIL_LINES = 20
"""Last lines of the process's output that are kept for the log."""
MAX_LINE_CHARS = 4096
STOP_S = 5.0
"""Time the process has to end after `Stop`, and again after SIGTERM."""
DRAIN_MS = 100
"""Wait for messages that a process sent before it ended."""
MAX_IPC_PATH_BYTES = 100
"""Unix socket paths end at 107 bytes on Linux and 103 on macOS."""


class EngineStartError(LongturnError):
    """The engine process could not start; it carries the exit code that the cause asks for."""

    def __init__(self, line: str, exit_code: int) -> None:
        super().__init__(line)
        self.exit_code = exit_code


class EngineChild:
    """A running engine process and the socket to it."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        socket: zmq.asyncio.Socket,
        directory: Path,
        *,
        json_log: bool = False,
    ) -> None:
        """`json_log`: pass the process's output on as JSON log lines."""
        self._json_log = json_log
        self._process = process
        self._socket = socket
        self._directory = directory
        self._ready = False
        self._tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self._output = asyncio.create_task(self._forward_output())
        self._exited = asyncio.create_task(process.wait())

    @classmethod
    async def spawn(cls, config: EngineConfig, factory: str, context: zmq.asyncio.Context) -> EngineChild:
        """Start the process. It is not ready before `ready` returns."""
        directory = _private_directory()
        endpoint = f"ipc://{directory}/engine"
        socket = context.socket(zmq.DEALER)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        try:
            socket.bind(endpoint)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "longturn.engine_process",
                endpoint,
                factory,
                stdin=asyncio.subprocess.PIPE,
                # Standard output belongs to the command line (`--json`); what libraries print there is no answer.
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                # The child must import the same code as this process, from the same places in the same order.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                # Ctrl-C goes to the foreground group; the engine must outlive it until requests are drained.
                start_new_session=True,
            )
        except BaseException:
            socket.close()
            shutil.rmtree(directory, ignore_errors=True)
            raise
        assert process.stdin is not None
        # The engine needs nothing of the HTTP side, least of all its API keys.
        engine_side = dataclasses.replace(config, server=ServerConfig())
        process.stdin.write(msgspec.json.encode(engine_side) + b"\n")
        return cls(process, socket, directory, json_log=config.server.log_format == "json")

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ready(self) -> ExecutorInfo:
        """Wait until the engine is built.

        Raises:
            EngineStartError: it could not be built; the line and the exit code are the engine process's own.
            EngineDeadError: the process ended without a word.
        """
        event = await self._next_event()
        if isinstance(event, ExecutorInfo):
            self._ready = True
            return event
        if isinstance(event, StartupError):
            raise EngineStartError(event.line, event.exit_code)
        raise EngineDeadError(f"the engine process ended while starting: {await self.cause()}")

    async def run(
        self,
        on_outputs: Callable[[StepOutputs], None],
        on_rejection: Callable[[Rejection], None],
        on_reset: Callable[[CacheReset], None],
    ) -> None:
        """Deliver messages until the process has ended."""
        while (event := await self._next_event()) is not None:
            if isinstance(event, StepOutputs):
                on_outputs(event)
            elif isinstance(event, Rejection):
                on_rejection(event)
            elif isinstance(event, CacheReset):
                on_reset(event)

    def send(self, command: Command) -> None:
        """Send without waiting: the socket has no high-water mark, so it always takes the message."""
        # A closed socket or one without a peer means that the process is gone, which readers of outputs are told.
        with contextlib.suppress(zmq.ZMQError):
            sent: Awaitable[object] = self._socket.send_multipart(encode_message(command), zmq.NOBLOCK)
            asyncio.ensure_future(sent).add_done_callback(_retrieve)

    async def cause(self) -> str:
        """Why the process ended: the signal, or its exit code and its last line of output if it wrote any."""
        code = await self._process.wait()
        # A grandchild may hold the pipe open: don't wait for its end for ever.
        await asyncio.wait({self._output}, timeout=1.0)
        if code < 0:
            # What it wrote last has nothing to do with it, or is a fault handler's trace for the log.
            hint = " (out of memory?)" if -code == signal.SIGKILL else ""
            return f"killed by {signal.Signals(-code).name}{hint}"
        last = next((line for line in reversed(self._tail) if line.strip()), None)
        return f"exit code {code}" if last is None else f"exit code {code} ({last.strip()})"

    def abort(self) -> None:
        """End a process that does not listen: it writes where its threads stand, or is killed if it does not even do
        that."""
        self._signal(signal.SIGABRT)
        asyncio.get_running_loop().call_later(STOP_S, self.kill)

    def kill(self) -> None:
        """End the process at once."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """`Process.send_signal` would poll first: of a process that is just ending it would take the exit status away
        from asyncio, which then warns on standard error and reports 255."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    def tail(self) -> list[str]:
        """The last lines that the process wrote."""
        return list(self._tail)

    async def close(self) -> None:
        """End the process, in order if it lets itself, and remove its socket."""
        if self._process.returncode is None:
            if self._ready:
                self.send(Stop())
            else:
                # It reads no commands while it builds the engine.
                self._signal(signal.SIGTERM)
            for number in (signal.SIGTERM, signal.SIGKILL):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), STOP_S)
                    break
                self._signal(number)
        await self._exited
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._output.cancel()
        await asyncio.gather(self._output, return_exceptions=True)
        self._socket.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    async def _next_event(self) -> Event | None:
        """The next message, or None when the process has ended and all it sent has been read."""
        receive = asyncio.ensure_future(self._socket.recv_multipart())
        try:
            if not receive.done():
                await asyncio.wait({receive, self._exited}, return_when=asyncio.FIRST_COMPLETED)
            if not receive.done():
                await asyncio.wait({receive}, timeout=DRAIN_MS / 1000)
            return decode_event(receive.result()) if receive.done() else None
        finally:
            receive.cancel()

    async def _forward_output(self) -> None:
        """Pass the process's output on to our standard error as it comes, and remember its last lines."""
        assert self._process.stdout is not None
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        rest = ""
        while data := await self._process.stdout.read(1 << 16):
            text = decoder.decode(data)
            # A progress bar writes no line ends: keep the end of such a line only.
            *lines, rest = (rest[-MAX_LINE_CHARS:] + text).split("\n")
            shown = _as_json(lines) if self._json_log else text
            print(shown, end="", file=sys.stderr, flush=True)
            self._tail.extend(lines)
        if rest:
            self._tail.append(rest)


def _as_json(lines: list[str]) -> str:
    now_s = time.time()
    return "".join(
        json_line(line.strip("\r"), level="info", logger="longturn.engine", created_s=now_s) + "\n"
        for line in lines
        if line.strip()
    )


def _retrieve(sent: asyncio.Future[object]) -> None:
    """Mark a failure as seen; asyncio would log it otherwise."""
    if not sent.cancelled():
        sent.exception()


def _private_directory() -> Path:
    """A new directory that only this user can enter, with a path short enough for a socket in it."""
    directory = Path(tempfile.mkdtemp(prefix="longturn-"))
    if len(os.fsencode(directory)) > MAX_IPC_PATH_BYTES - len("/engine"):
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix="longturn-", dir="/tmp"))
    return directory
