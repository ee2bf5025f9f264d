"""`longturn bench step` as far as it goes without a GPU."""

from __future__ import annotations

import json

import pytest
import torch

from longturn.cli.main import main
from longturn.cli.steps.points import POINTS, Point, choose, decode_floor_ms
from longturn.errors import ConfigError
from longturn.models.make_checkpoint import PRESETS, preset_config
from longturn.models.minimax_m3_config import minimax_m3_config


def test_list_names_points_and_the_peers_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step", "--list", "decode:1x4096", "warm"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["decode:1x4096", "vLLM", "0.25.1:", "6.19", "ms"]
    assert all(line.startswith(("decode:1x4096", "warm:")) for line in lines)
    assert main(["bench", "step", "--list", "--json", "--preset", "slice8", "prefill"]) == 0
    assert {row["unit"] for row in json.loads(capsys.readouterr().out)} == {"tok/s"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "mini"], "unknown preset 'mini' (known: mini60, slice8, "),
        (["decode:7"], "no point of mini60 starts with 'decode:7' (points: decode:1x4096,"),
        (["--repeats", "0"], "--repeats must be at least 1, not 0"),
        (["--step-tokens", "0"], "--step-tokens must be at least 1, not 0"),
        (["--experts", "3"], "--experts must be 4 to 128, those that mini60 has, not 3"),
        (["--experts", "129", "--list"], "--experts must be 4 to 128, those that mini60 has, not 129"),
    ],
)
def test_bad_arguments_are_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert main(["bench", "step", *arguments]) == ConfigError.exit_code
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "step"]) == ConfigError.exit_code
    assert "bench step measures a GPU, and there is none to use: " in capsys.readouterr().err


def test_start_is_measured_only_when_named() -> None:
    assert all(p.kind != "start" for p in choose("mini60", ()))
    assert [p.kind for p in choose("mini60", ("start",))] == ["start"]
    names = [p.name for points in POINTS.values() for p in points]
    assert all(len(set(names[: len(points)])) == len(points) for points in POINTS.values())


@pytest.mark.parametrize(
    ("preset", "rows", "context", "wanted"),
    [("mini60", 1, 4096, 1.26), ("mini60", 32, 8192, 10.49), ("slice8", 1, 131072, 2.04), ("slice8", 32, 32768, 16.69)],
)
def test_floors_are_those_of_the_notes(preset: str, rows: int, context: int, wanted: float) -> None:
    """docs/performance.md, section H200: worked out there by other code."""
    config = minimax_m3_config(preset_config(PRESETS[preset])["text_config"])
    assert decode_floor_ms(config, rows, context) == pytest.approx(wanted, abs=0.006)
    assert Point("decode", rows, context).name == f"decode:{rows}x{context}"
