"""200 clients that go away, on the embedded model."""

from __future__ import annotations

import asyncio
import time

from tests.e2e.conftest import Server
from tests.server.vanishing import many_vanish


def test_200_clients_that_vanish_leave_no_request_and_no_page(server: Server) -> None:
    asyncio.run(many_vanish(server.url, 200, seed=2, longest_s=4.0))
    names = ("requests_running", "requests_waiting", "requests_open", "pages_used")
    # A step of the model is in flight when the last one goes, and the machine may be busy with other tests.
    end = time.monotonic() + 5.0
    while any(server.metric(f"longturn_{name}") for name in names):
        assert time.monotonic() < end, {name: server.metric(f"longturn_{name}") for name in names}
        time.sleep(0.05)
    assert server.metric("longturn_leak_faults_total") == 0
