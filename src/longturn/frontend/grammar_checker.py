"""The server's side of the process in which grammars are tried: started when needed, killed when it takes too long."""

from __future__ import annotations

import os
import select
import struct
import subprocess
import sys
import time

import msgspec

from longturn.errors import LongturnError
from longturn.frontend.grammar import GrammarSpec
from longturn.frontend.grammar_child import Checked, Job, Start, write_frame
from longturn.frontend.grammar_reasoning import ReasoningMarks

START_S = 60.0
"""Longest time that a process may take to be ready; a fraction of a second where the machine is not overloaded."""


class GrammarChecker:
    """One process, which may be replaced by another between two checks. Not for several threads at once."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, spec: GrammarSpec, marks: ReasoningMarks | None, timeout_s: float) -> Checked:
        """Try a grammar. One that takes too long or breaks the process is refused like any other.

        Raises:
            LongturnError: the process does not start.
        """
        process = self._running()
        assert process.stdin is not None
        try:
            write_frame(process.stdin, Job(spec, marks))
            frame = _read_frame(process, timeout_s)
        except (TimeoutError, BrokenPipeError) as error:
            self.close()
            if isinstance(error, TimeoutError):
                return Checked(
                    refusal=f"it takes longer than {timeout_s:g} s (server.grammar_timeout_s)", timed_out=True
                )
            frame = None
        if frame is None:
            self.close()
            return Checked(refusal="it is too deep or too large: the compiler ran out of stack or memory")
        return msgspec.msgpack.decode(frame, type=Checked)

    def close(self) -> None:
        """Kill the process; the next check starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except BrokenPipeError:
                        continue  # what was left to write is for nobody
            process.wait()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        process = self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "longturn.frontend.grammar_child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # It must import the same code as this process, from the same places in the same order.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        )
        assert process.stdin is not None
        try:
            write_frame(process.stdin, self._start)
            ready = _read_frame(process, START_S) is not None
        except (TimeoutError, BrokenPipeError):
            ready = False
        if not ready:
            self.close()
            raise LongturnError("the process that compiles grammars does not start; its own message is above")
        return process


def _read_frame(process: subprocess.Popen[bytes], timeout_s: float) -> bytes | None:
    """The next frame; None if the process ended without one. Raises TimeoutError."""
    assert process.stdout is not None
    descriptor, end_s = process.stdout.fileno(), time.monotonic() + timeout_s
    data = b""
    while len(data) < 4 or len(data) < 4 + struct.unpack_from("<I", data)[0]:
        left_s = end_s - time.monotonic()
        if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
            raise TimeoutError
        more = os.read(descriptor, 1 << 16)
        if not more:
            return None
        data += more
    return data[4:]
