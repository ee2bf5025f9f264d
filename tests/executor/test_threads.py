"""Counting cores from a made-up /sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from longturn.executor.threads import usable_cores


def machine(root: Path, siblings: dict[int, str], quota: str | None = None) -> Path:
    for cpu, text in siblings.items():
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(text + "\n")
    if quota:
        (root / "sys/fs/cgroup").mkdir(parents=True)
        (root / "sys/fs/cgroup/cpu.max").write_text(quota + "\n")
    return root


@pytest.mark.parametrize(
    ("siblings", "quota", "cores"),
    [
        ({0: "0", 1: "1", 2: "2", 3: "3"}, None, 4),
        ({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}, None, 2),
        ({0: "0", 1: "1", 2: "2", 3: "3"}, "150000 100000", 1),
        ({0: "0", 1: "1", 2: "2", 3: "3"}, "max 100000", 4),
        ({0: "0", 1: "1", 2: "2", 3: "3"}, "50000 100000", 1),
    ],
)
def test_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, siblings: dict[int, str], quota: str | None, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(siblings), raising=False)
    assert usable_cores(machine(tmp_path, siblings, quota)) == cores
