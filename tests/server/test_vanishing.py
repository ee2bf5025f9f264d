"""200 clients that go away leave nothing behind."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx

from tests.server.test_run import gauge, ready
from tests.server.vanishing import many_vanish


def test_200_clients_that_vanish_leave_no_request_and_no_page(tmp_path: Path) -> None:
    """Through every part but the model: HTTP, ZeroMQ, the engine process, the scheduler."""
    with (
        ready(tmp_path, "tests.server.engine_mock:build_real") as (process, url),
        httpx.Client(base_url=url, trust_env=False, timeout=20) as http,
    ):
        done = asyncio.run(many_vanish(url, 200, seed=1))
        assert len(done) == 10, "plain and streaming, at five moments"
        end = time.monotonic() + 1.0
        while any(gauge(http, f"longturn_{name}") for name in ("requests_running", "requests_open", "pages_used")):
            assert time.monotonic() < end, "a second later something is left"
            time.sleep(0.02)
        assert gauge(http, "longturn_requests_waiting") == 0
        assert gauge(http, "longturn_leak_faults_total") == 0
        assert gauge(http, "longturn_aborts_total") > 50
        # It still answers.
        body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
        assert http.post("/v1/chat/completions", json=body).status_code == 200
        process.terminate()
        assert process.wait(10) == 0
        assert process.stderr is not None and "Traceback" not in process.stderr.read()
