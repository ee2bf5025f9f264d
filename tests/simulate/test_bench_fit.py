"""A platform of a user's own card, from the file that `longturn bench step` writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from longturn.cli.main import main
from longturn.simulate.cost.model import StepCost
from longturn.simulate.cost.options import CostOptions
from longturn.simulate.cost.routing import UNIFORM
from longturn.simulate.cost.step import StepShape, step_shape
from longturn.simulate.fit.bench import FAMILY, bench_steps
from longturn.simulate.formats import formats_named
from longturn.simulate.layout import parse_layout
from longturn.simulate.platform import Platform, load_platform
from longturn.simulate.published import steps_ns
from longturn.simulate.shapes import load_shape

SIZES = ((1, 4096), (1, 32768), (1, 131072), (4, 131072), (16, 32768), (32, 8192))


def decode_ms(platform: Platform, family: str, rows: int, context: int) -> float:
    shape = load_shape("m3-mini60")
    cost = StepCost(
        platform, shape, parse_layout("tp1"), formats_named("bf16"), CostOptions(family=family, routing=UNIFORM)
    )
    return cost.breakdown(step_shape([context] * rows, attend_limit=shape.attend_limit)).device_ns / 1e6


def chunk_ms(platform: Platform, family: str, point: str) -> float:
    """A turn or mixed step of mini60, or prompts."""
    shape = load_shape("m3-mini60")
    options = CostOptions(family=family, routing=UNIFORM)
    cost = StepCost(platform, shape, parse_layout("tp1"), formats_named("bf16"), options)
    (only,) = bench_steps_of(point)
    return steps_ns(cost, only)[0] / 1e6


def bench_steps_of(point: str) -> list[tuple[StepShape, ...]]:
    """The shapes of one point, by hand."""
    limit = load_shape("m3-mini60").attend_limit
    found: dict[str, tuple[StepShape, ...]] = {
        "turn:1x131072+512": (step_shape([], [(131_072, 512)], attend_limit=limit, chunk_samples=1),),
        "mixed:8x32768+512": (step_shape([32_768] * 8, [(32_768, 512)], attend_limit=limit, chunk_samples=1),),
        "prefill:1x4096": (StepShape(chunks=((0, 4096),), samples=1),),
        "prefill:1x32768": tuple(StepShape(chunks=((start, 8192),), samples=1) for start in range(0, 32_768, 8192)),
    }
    return [found[point]]


CHUNKS = ("turn:1x131072+512", "mixed:8x32768+512", "prefill:1x4096", "prefill:1x32768")


def bench_file(
    path: Path, preset: str = "mini60", chunks: tuple[str, ...] = CHUNKS, words: tuple[str, ...] = (), **more: Any
) -> str:
    """Steps of a card that is a quarter slower than ours, and a point that is none of them."""
    platform = load_platform("h200")
    rows = [{"preset": preset, "point": f"decode:{rows}x{context}", "unit": "ms", **more,
             "value": more.get("value", 1.25 * decode_ms(platform, "longturn", rows, context))}
            for rows, context in SIZES]  # fmt: skip
    for point in chunks:
        ms = 1.25 * chunk_ms(platform, "longturn", point)
        if point.startswith("prefill"):
            tokens = int(point.partition("x")[2])
            rows.append({"preset": preset, "point": point, "unit": "tok/s", "value": tokens / ms * 1e3})
        elif point.startswith("turn"):
            rows.append({"preset": preset, "point": point, "unit": "ms", "value": ms + 1.0, "device_ms": ms})
        else:
            rows.append({"preset": preset, "point": point, "unit": "ms", "value": ms, "device_ms": None})
    rows.append({"preset": preset, "point": "warm:1x4096", "unit": "ms", "value": 2.5})
    path.write_text(json.dumps({"command": ["bench", "step", *words], "points": rows}))
    return str(path)


def test_the_platform_predicts_the_steps_it_was_fitted_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured, saved = bench_file(tmp_path / "steps.json"), tmp_path / "mine.toml"
    assert main(["simulate", "fit", "--bench", measured, "--platform", "h200", "--save", str(saved), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    mine, ours = load_platform(str(saved)), load_platform("h200")
    assert mine.default_family == FAMILY and told["points"] == len(SIZES) and told["rms"] < 0.05
    assert told["chunks"]["points"] == len(CHUNKS) and told["chunks"]["rms"] < 0.05
    assert mine.spec == ours.spec and set(mine.families) == {FAMILY, *ours.families}
    for rows, context in SIZES:
        slower = 1.25 * decode_ms(ours, "longturn", rows, context)
        assert decode_ms(mine, FAMILY, rows, context) == pytest.approx(slower, rel=0.1)
    for point in CHUNKS:
        assert chunk_ms(mine, FAMILY, point) == pytest.approx(1.25 * chunk_ms(ours, "longturn", point), rel=0.05)
    assert decode_ms(mine, "longturn", 4, 32768) == decode_ms(ours, "longturn", 4, 32768)


def test_few_chunks_leave_their_constants_borrowed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured, saved = bench_file(tmp_path / "steps.json", chunks=CHUNKS[:2]), tmp_path / "mine.toml"
    assert main(["simulate", "fit", "--bench", measured, "--platform", "h200", "--save", str(saved)]) == 0
    assert "2 turns, mixed steps and prompts are too few" in capsys.readouterr().out
    mine = load_platform(str(saved)).families
    for name in ("prefill_fixed_ns", "index_compute", "attend_compute", "select_ns", "tile_tokens", "prefill"):
        found, lent = (getattr(mine[key].attention["bf16-bf16"], name) for key in (FAMILY, "longturn"))
        assert found == lent, name


def test_steps_are_read_as_they_were_run(tmp_path: Path) -> None:
    found = bench_steps([Path(bench_file(tmp_path / "a.json")), Path(bench_file(tmp_path / "b.json"))])
    assert [one.step.rows for one in found.decode] == [rows for rows, _ in SIZES] * 2
    assert [one.steps for one in found.chunks] == [bench_steps_of(point)[0] for point in CHUNKS] * 2
    turn = found.chunks[0]
    assert turn.ns == pytest.approx(1.25e6 * chunk_ms(load_platform("h200"), "longturn", CHUNKS[0])), "the device's"
    shorter = bench_steps([Path(bench_file(tmp_path / "c.json", words=("--step-tokens", "2048")))])
    assert [len(one.steps) for one in shorter.chunks] == [1, 1, 2, 16]


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
    for more, complaint in (
        ({"preset": "mini60-nvfp4"}, "preset 'mini60-nvfp4'"),
        ({"value": -1.0}, "took -1.0 ms"),
        ({"words": ("--experts", "16")}, "fewer experts (--experts) cannot be fitted"),
    ):
        path = bench_file(tmp_path / "steps.json", **more)
        assert main(["simulate", "fit", "--bench", path, "--platform", "h200", "--save", str(tmp_path / "x")]) != 0
        assert complaint in capsys.readouterr().err
    assert main(["simulate", "fit", "--bench", path]) != 0
    assert "--bench needs --platform" in capsys.readouterr().err
