"""The short form of the soak test: some seconds of mixed load, with a pool small enough to be filled in them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.slow
def test_half_a_minute_of_mixed_load(embedded_model: None) -> None:
    command = [sys.executable, str(SOAK), "--minutes", "0.4", "--cache-memory", "64MiB", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout, done.stderr
    summary = json.loads(done.stdout)
    assert summary["failures"] == []
    assert summary["completed"] > 10 and summary["cached_tokens"] > 0
    assert done.returncode == 0
