"""A server of one's own, in a child process on a free port, for verbs that need one."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from longturn.config import EngineConfig
from longturn.errors import LongturnError

_POLL_S = 0.1
_STOP_S = 15.0
_PR_SET_PDEATHSIG = 1


class ServerStartError(LongturnError):
    """The child server ended, or did not become ready; the message has its own last line."""

    exit_code = 6


@contextmanager
def local_server(
    config: EngineConfig, *, on_wait: Callable[[], None] | None = None, timeout_s: float = 300.0
) -> Iterator[str]:
    """Run `longturn serve` with `config` on a free port of the loopback address; yields its URL once it is ready.

    Args:
        config: as it should be served, less what is for the outside: address, TLS, page events.
        on_wait: called several times a second until the server is ready.
        timeout_s: longest time to wait for that; the first start prepares the model and compiles kernels.

    Raises:
        ServerStartError: it ended or was not ready in time.
    """
    port = free_port()
    server = dataclasses.replace(
        config.server, host="127.0.0.1", port=port, ssl_certfile=None, ssl_keyfile=None, cors_origins=()
    )
    # The ports of events may be those of the server that the configuration was written for.
    cache = dataclasses.replace(config.cache, events_endpoint=None, events_replay_endpoint=None)
    served = dataclasses.replace(config, server=server, cache=cache)
    with _sigterm_unwinds(), tempfile.TemporaryDirectory(prefix="longturn-") as folder:
        config_path, log_path = Path(folder) / "config.yaml", Path(folder) / "server.log"
        config_path.touch(mode=0o600)  # it may hold API keys
        config_path.write_text(json.dumps(dataclasses.asdict(served)), encoding="utf-8")  # JSON is YAML
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "longturn.cli.main", "serve", "--config", str(config_path)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C in the terminal is for the parent, which still has results to save.
                start_new_session=True,
                preexec_fn=_die_with_parent if sys.platform == "linux" else None,
            )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(process, url, log_path, on_wait, timeout_s)
            yield url
        finally:
            _stop(process)


def client_key(config: EngineConfig) -> str | None:
    """A key that the configured server accepts; None if it admits everyone.

    Raises:
        ConfigError: the file of keys cannot be read, or has none.
    """
    from longturn.server.keys import accepted_keys

    return next(iter(accepted_keys(config.server)), None)


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Let SIGTERM end the program as an exception does, so that the server is stopped and its files are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _die_with_parent() -> None:
    """In the child, before exec: a parent that is killed outright must not leave a server behind."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_ready(
    process: subprocess.Popen[bytes], url: str, log_path: Path, on_wait: Callable[[], None] | None, timeout_s: float
) -> None:
    end = time.monotonic() + timeout_s
    while not _is_ready(url):
        if process.poll() is not None:
            raise ServerStartError(f"the server could not start: {_last_line(log_path, process.returncode)}")
        if time.monotonic() > end:
            raise ServerStartError(f"the server was not ready in {timeout_s:g} s: {_last_line(log_path, None)}")
        if on_wait is not None:
            on_wait()
        time.sleep(_POLL_S)


def _is_ready(url: str) -> bool:
    # No proxies: a proxy set for the outside would be asked for the loopback address.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _last_line(log_path: Path, code: int | None) -> str:
    lines = [
        line.strip() for line in log_path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
    ]
    if lines:
        return lines[-1].removeprefix("longturn: error: ")
    if code is None:
        return "it printed nothing"
    return f"exit code {code}" if code >= 0 else f"killed by signal {-code}"


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to end, and end its whole process group if it does not."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as reason:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if isinstance(reason, KeyboardInterrupt):
                raise
