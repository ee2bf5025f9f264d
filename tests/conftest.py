"""Settings that must precede every import of a test session, and which tests share a process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

# Triton reads this when it and each kernel are imported, and whichever test imports it first decides for all. Without a
# card its kernels can only be interpreted; with one, the files that want the interpreter say so, and run alone.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Beside other workers a second thread of torch's would only wait for a core.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

TOGETHER = ("tests/e2e/", "tests/kernels/test_cpu_")
"""Files whose session fixtures cost much: servers, compiled libraries."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several workers a file is run by one, and files that share costly fixtures by the same."""
    from xdist.scheduler import LoadScopeScheduling

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return next((start for start in TOGETHER if file.startswith(start)), file)

    return Files(config, log)
