"""How much memory a CPU executor may use."""

from __future__ import annotations

from pathlib import Path


def usable_memory_bytes(root: Path = Path("/")) -> int | None:
    """Installed memory, or the cgroup's limit where that is less; None where the system says neither.

    A page pool beyond it would be promised by the kernel all the same, and the process killed once the pages fill.
    """
    found = [size for size in (_installed(root), _cgroup_limit(root)) if size is not None]
    return min(found, default=None)


def _installed(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _cgroup_limit(root: Path) -> int | None:
    """`memory.max` of cgroup v2: bytes, or `max`."""
    try:
        text = (root / "sys/fs/cgroup/memory.max").read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
