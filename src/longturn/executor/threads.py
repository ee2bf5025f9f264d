"""How many compute threads a CPU executor should use."""

from __future__ import annotations

import os
from pathlib import Path


def usable_cores(root: Path = Path("/")) -> int:
    """Physical cores that this process may use: its affinity, less hyper-thread siblings, within the cgroup's quota.

    A second thread on one core gains nothing for code that is bound by memory and vector units, and a thread beyond a
    container's quota is throttled in the middle of a step while its peers wait at the barrier.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    siblings = {_siblings(root, cpu) for cpu in allowed}
    return max(1, min(len(siblings), _quota(root)))


def _siblings(root: Path, cpu: int) -> str:
    file = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    try:
        return file.read_text().strip()
    except OSError:
        return str(cpu)


def _quota(root: Path) -> int:
    """Whole cores of the cgroup's CPU quota (cgroup v2 `cpu.max`: quota and period in microseconds)."""
    try:
        quota, period = (root / "sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return 1 << 16
    return max(1, int(quota) // int(period)) if quota != "max" else 1 << 16
