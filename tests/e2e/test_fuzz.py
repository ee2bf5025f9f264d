"""The short form of `benchmarks/fuzz_server.py`: some hundred hostile requests against a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.conftest import Server

FUZZ = Path(__file__).parents[2] / "benchmarks" / "fuzz_server.py"


def test_hostile_requests_kill_nothing_and_leak_nothing(server: Server) -> None:
    command = [sys.executable, str(FUZZ), "--requests", "300", "--seed", "7", "--url", server.url, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.stdout, done.stderr
    summary = json.loads(done.stdout)
    assert summary["failures"] == []
    assert summary["by_status"]["400"] > 100 and summary["by_status"]["200"] > 20, "hostile, and some of them valid"
    assert len(summary["by_kind"]) > 8
