"""Progress where there is no terminal."""

from __future__ import annotations

import io
import time

import pytest

from longturn.cli.tensor_progress import TensorProgress


@pytest.mark.parametrize(
    ("seconds_each", "lines"),
    [
        (0.0, ["making: 32/32 tensors, 0 s"]),
        (1.0, [f"making: {done}/32 tensors, {done} s" for done in range(4, 33, 4)]),  # an eighth of the work each
        (0.1, ["making: 20/32 tensors, 2 s", "making: 32/32 tensors, 3 s"]),  # two seconds
    ],
)
def test_lines_are_few(monkeypatch: pytest.MonkeyPatch, seconds_each: float, lines: list[str]) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stream = io.StringIO()
    progress = TensorProgress("making", stream)
    for done in range(1, 33):
        now = 100.0 + done * seconds_each
        progress(done, 32, "name")
    assert stream.getvalue().splitlines() == lines
