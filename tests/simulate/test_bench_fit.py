"""A platform of a user's own card, from the file that `longturn bench step` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longturn.cli.main import main
from longturn.simulate.cost.model import StepCost
from longturn.simulate.cost.options import CostOptions
from longturn.simulate.cost.step import step_shape
from longturn.simulate.fit.bench import FAMILY, bench_steps
from longturn.simulate.formats import formats_named
from longturn.simulate.layout import parse_layout
from longturn.simulate.platform import Platform, load_platform
from longturn.simulate.shapes import load_shape

SIZES = ((1, 4096), (1, 32768), (1, 131072), (4, 131072), (16, 32768), (32, 8192))


def decode_ms(platform: Platform, family: str, rows: int, context: int) -> float:
    shape = load_shape("m3-mini60")
    cost = StepCost(platform, shape, parse_layout("tp1"), formats_named("bf16"), CostOptions(family=family))
    return cost.breakdown(step_shape([context] * rows, attend_limit=shape.attend_limit)).device_ns / 1e6


def bench_file(path: Path, preset: str = "mini60", **more: Any) -> str:
    """Steps of a card that is a quarter slower than ours, and a point that is no decode step."""
    platform = load_platform("h200")
    rows = [{"preset": preset, "point": f"decode:{rows}x{context}", "unit": "ms", **more,
             "value": more.get("value", 1.25 * decode_ms(platform, "longturn", rows, context))}
            for rows, context in SIZES]  # fmt: skip
    rows.append({"preset": preset, "point": "prefill:1x4096", "unit": "tok/s", "value": 3e4})
    path.write_text(json.dumps({"command": ["bench", "step"], "points": rows}))
    return str(path)


def test_the_platform_predicts_the_steps_it_was_fitted_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured, saved = bench_file(tmp_path / "steps.json"), tmp_path / "mine.toml"
    assert main(["simulate", "fit", "--bench", measured, "--platform", "h200", "--save", str(saved), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    mine, ours = load_platform(str(saved)), load_platform("h200")
    assert mine.default_family == FAMILY and told["points"] == len(SIZES) and told["rms"] < 0.05
    assert mine.spec == ours.spec and set(mine.families) == {FAMILY, *ours.families}
    for rows, context in SIZES:
        slower = 1.25 * decode_ms(ours, "longturn", rows, context)
        assert decode_ms(mine, FAMILY, rows, context) == pytest.approx(slower, rel=0.1)
    assert decode_ms(mine, "longturn", 4, 32768) == decode_ms(ours, "longturn", 4, 32768)


def test_only_decode_steps_are_taken(tmp_path: Path) -> None:
    steps = bench_steps([Path(bench_file(tmp_path / "a.json")), Path(bench_file(tmp_path / "b.json"))])
    assert [one.step.rows for one in steps] == [rows for rows, _ in SIZES] * 2


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "is not what `longturn bench step --out` writes"),
        ('{"points": [{"point": "decode:1x4096", "value": 1}]}', "is not what"),
        ('{"points": []}', "at least 6 measured steps, not 0"),
        (None, "cannot be read"),
    ],
)
def test_files_that_are_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, complaint: str
) -> None:
    path = tmp_path / "steps.json"
    if content is not None:
        path.write_text(content)
    assert main(["simulate", "fit", "--bench", str(path), "--platform", "h200", "--save", str(tmp_path / "x")]) != 0
    shown = capsys.readouterr().err.strip()
    assert complaint in shown and "\n" not in shown and not (tmp_path / "x").exists()


def test_steps_that_cannot_be_fitted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more, complaint in (({"preset": "mini60-nvfp4"}, "preset 'mini60-nvfp4'"), ({"value": -1.0}, "took -1.0 ms")):
        path = bench_file(tmp_path / "steps.json", **more)
        assert main(["simulate", "fit", "--bench", path, "--platform", "h200", "--save", str(tmp_path / "x")]) != 0
        assert complaint in capsys.readouterr().err
    assert main(["simulate", "fit", "--bench", path]) != 0
    assert "--bench needs --platform" in capsys.readouterr().err
