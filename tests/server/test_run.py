"""A whole server process: start, port, signals, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from longturn.server.run import CUT_OFF


def start(
    port: int = 0,
    factory: str = "tests.server.engine_mock:build",
    temporary: Path | None = None,
    drain_s: float = 10.0,
    more: dict[str, Any] | None = None,
) -> subprocess.Popen[str]:
    path = os.pathsep.join(p for p in sys.path if p)
    environment = {**os.environ, "PYTHONPATH": path}
    if temporary is not None:
        environment["TMPDIR"] = str(temporary)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.server.serve_script", str(port), factory, str(drain_s), json.dumps(more or {})],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


@contextmanager
def ready(
    temporary: Path,
    factory: str = "tests.server.engine_mock:build",
    drain_s: float = 10.0,
    more: dict[str, Any] | None = None,
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = start(0, factory, temporary, drain_s, more)
    assert process.stdout is not None and process.stderr is not None
    try:
        line = process.stdout.readline()
        assert "://127.0.0.1:" in line, process.stderr.read()
        yield process, line.split()[-1]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_signals_end_it_in_order(tmp_path: Path, number: signal.Signals, code: int) -> None:
    with ready(tmp_path) as (process, url):
        assert httpx.get(f"{url}/health", trust_env=False).json() == {"status": "ok"}
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, trust_env=False) as reply:
            lines = reply.iter_lines()
            next(lines)
            process.send_signal(number)
            rest = list(lines)
        assert "data: [DONE]" in rest, "a request in flight is finished"
        assert process.wait(10) == code
        assert process.stderr is not None and "Traceback" not in process.stderr.read()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("drain_s", "signals"), [(0.2, 1), (30.0, 2)])
def test_requests_that_are_cut_off_are_told_why(tmp_path: Path, drain_s: float, signals: int) -> None:
    """By the end of the drain, or by a second signal."""
    with ready(tmp_path, drain_s=drain_s) as (process, url):
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1900, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, trust_env=False) as reply:
            lines = reply.iter_lines()
            next(lines)
            for _ in range(signals):
                process.terminate()
                time.sleep(0.05)  # two signals at once are one
            rest = [line for line in lines if line]
        error = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert error["message"] == CUT_OFF and "shutting down" in CUT_OFF and "sent again" in CUT_OFF
        assert (error["type"], error["code"]) == ("server_error", "engine_unavailable")
        assert process.wait(10) == 0
        assert process.stderr is not None and "Traceback" not in process.stderr.read()
    assert list(tmp_path.iterdir()) == []


def test_a_port_in_use_is_one_line() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        begin = time.monotonic()
        _, errors = (process := start(port)).communicate(timeout=20)
        assert process.returncode == 5
        assert errors == (
            f"longturn: error: cannot listen on 127.0.0.1:{port}: the port is in use (choose another with --port)\n"
        )
        assert time.monotonic() - begin < 10


def test_a_model_that_cannot_be_built_is_one_line() -> None:
    _, errors = (process := start(0, "tests.server.engine_mock:build_no_model")).communicate(timeout=20)
    assert (process.returncode, errors) == (3, "longturn: error: there is no model at /nowhere\n")


def test_a_signal_while_starting_ends_it_soon(tmp_path: Path) -> None:
    process = start(0, "tests.server.engine_mock:build_slowly", tmp_path)
    end = time.monotonic() + 10
    while not list(tmp_path.iterdir()):
        assert time.monotonic() < end
        time.sleep(0.02)
    time.sleep(0.2)
    begin = time.monotonic()
    process.terminate()
    _, errors = process.communicate(timeout=10)
    assert time.monotonic() - begin < 5 and process.returncode == 0
    assert "Traceback" not in errors and list(tmp_path.iterdir()) == []


def test_more_signals_while_starting_cut_nothing_short(tmp_path: Path) -> None:
    process = start(0, "tests.server.engine_mock:build_and_end_slowly", tmp_path)
    assert process.stdout is not None and process.stderr is not None
    try:
        lines = iter(process.stderr.readline, "")
        for word in ("building", "ending"):
            assert any(word in line for line in lines)
            process.terminate()
        time.sleep(0.1)  # two signals at once are one
        process.terminate()
        errors = "".join(lines)
        assert process.wait(10) == 0 and "Traceback" not in errors and list(tmp_path.iterdir()) == []
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def test_the_real_engine_gives_pages_back(tmp_path: Path) -> None:
    """Through every part but the model: HTTP, ZeroMQ, the engine process, the scheduler."""
    with (
        ready(tmp_path, "tests.server.engine_mock:build_real") as (_, url),
        httpx.Client(base_url=url, trust_env=False) as http,
    ):
        body = {"messages": [{"role": "user", "content": "a" * 300}], "max_tokens": 12}
        reply = http.post("/v1/chat/completions", json=body).json()
        expected = "".join(chr(97 + (300 + k) % 26) for k in range(12))
        assert reply["choices"][0]["message"]["content"] == expected
        with http.stream("POST", "/v1/chat/completions", json={**body, "max_tokens": 3000, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(lines)
            assert gauge(http, "longturn_pages_used") > 0
            del lines  # httpx closes the connection when its iterator is dropped
        end = time.monotonic() + 1.0
        while gauge(http, "longturn_pages_used") > 0:
            assert time.monotonic() < end, "pages are not back within a second"
            time.sleep(0.02)
        assert gauge(http, "longturn_aborts_total") == 1
        assert gauge(http, "longturn_leak_faults_total") == 0


def gauge(http: httpx.Client, name: str) -> float:
    text = http.get("/metrics").text
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(name + "{")))
