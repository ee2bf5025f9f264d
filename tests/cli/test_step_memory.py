"""`longturn bench step` on a GPU that is too small."""

from __future__ import annotations

import re

import pytest
import torch

from longturn.cli import step
from longturn.cli.main import main
from longturn.cli.steps.memory import needs, too_little_memory
from longturn.cli.steps.points import choose
from longturn.errors import ConfigError
from longturn.executor.gpu import device


def test_needs_are_those_worked_out_by_hand() -> None:
    need = needs("mini60", choose("mini60", ()), 8192)
    # 4 rows of 131,072 tokens: 1,024 pages each, of 60 layers, 128 tokens, two bytes, two lanes of 512 and one of 128.
    assert need.cache == 4 * 1024 * 60 * 128 * 2 * (2 * 512 + 128)
    assert need.weights == pytest.approx(52e9, rel=0.01)
    assert needs("slice8-nvfp4", choose("slice8", ("decode:1x4096",)), 8192).weights == pytest.approx(36.5e9, rel=0.01)
    start = needs("mini60", choose("mini60", ("start",)), 8192)
    assert start.cache == need.cache // 2


@pytest.mark.parametrize(
    ("preset", "free_gb", "says"),
    [
        (
            "mini60",
            100,
            r"129\.1 GB are needed .*72\.5 of cache.* 100\.0 GB of CARD were free; alone fit: decode:1x4096",
        ),
        ("slice8", 80, r"; presets that fit: mini60, mini60-nvfp4, slice8-nvfp4, slice8-nvfp4-bf16kv$"),
        ("mini60", 8, r"; no preset fits$"),
    ],
)
def test_the_line_says_what_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], preset: str, free_gb: int, says: str
) -> None:
    def full(*args: object) -> list[dict[str, object]]:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB.")

    monkeypatch.setattr(device, "why_no_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free_gb * 10**9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "CARD")
    monkeypatch.setattr(step, "_measure", full)
    assert main(["bench", "step", "--preset", preset]) == ConfigError.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert f"too little GPU memory for {preset}: about " in line
    assert re.search(says, line), line


def test_a_point_that_needs_too_much_is_not_said_to_fit() -> None:
    line = too_little_memory("mini60", choose("mini60", ()), 8192, free_bytes=100 * 10**9, device="CARD")
    assert "decode:1x131072" in line and "decode:4x131072" not in line
