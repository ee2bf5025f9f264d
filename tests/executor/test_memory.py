from __future__ import annotations

from pathlib import Path

import pytest

from longturn.executor.memory import usable_memory_bytes


@pytest.mark.parametrize(
    ("meminfo", "limit", "expected"),
    [
        ("MemFree: 1 kB\nMemTotal:  1000 kB\n", None, 1_024_000),
        ("MemTotal:  1000 kB\n", "max\n", 1_024_000),
        ("MemTotal:  1000 kB\n", "500000\n", 500_000),
        ("MemTotal:  1000 kB\n", "5000000\n", 1_024_000),
        (None, "500000\n", 500_000),
        (None, None, None),
        ("MemTotal:\n", None, None),
    ],
)
def test_the_smaller_of_machine_and_container(
    tmp_path: Path, meminfo: str | None, limit: str | None, expected: int | None
) -> None:
    for name, text in (("proc/meminfo", meminfo), ("sys/fs/cgroup/memory.max", limit)):
        if text is not None:
            (tmp_path / name).parent.mkdir(parents=True)
            (tmp_path / name).write_text(text)
    assert usable_memory_bytes(tmp_path) == expected
