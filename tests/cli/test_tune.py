"""`longturn tune`: what it says without a GPU, and which plans it keeps."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from longturn.cli import tune
from longturn.cli.main import main
from longturn.executor.gpu import device


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch has CUDA")
def test_without_a_gpu_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--json"]) == 2
    said = capsys.readouterr()
    (line,) = said.err.splitlines()
    assert "tune measures a GPU, and there is none to use" in line
    assert json.loads(said.out)["error"] in line


@pytest.mark.parametrize("argv", [["--rows", "0"], ["--context", "0"], ["--tokens", "-1"], ["--layers", "0"]])
def test_numbers_are_checked_before_anything_is_measured(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", *argv]) == 2
    assert f"{argv[0]} must be at least 1" in capsys.readouterr().err


def test_an_unknown_preset_is_told_before_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--preset", "mini"]) == 2
    assert "unknown preset 'mini' (known: mini60, " in capsys.readouterr().err


class Card:
    """A GPU as far as `tune` looks at it before it measures."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(device, "why_no_device", lambda: None)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA Test")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (24 * 10**9, 0))


def test_a_table_that_cannot_be_written_is_told_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    Card(monkeypatch)
    file = tmp_path / "file"
    file.touch()
    for out, why in ((file / "plans.json", f"{file} is no directory"), (tmp_path, "Is a directory")):
        assert main(["tune", "--out", str(out)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line == f"longturn: error: cannot write plans to {out}: {why}"


def test_too_little_memory_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    Card(monkeypatch)

    def full(args: argparse.Namespace) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 2.00 GiB.")

    monkeypatch.setattr(tune, "_tuner", full)
    assert main(["tune", "--out", str(tmp_path / "plans.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "too little GPU memory to tune with: 24.0 GB of NVIDIA Test were free; fewer --layers" in line
    assert list(tmp_path.iterdir()) == []


def test_a_plan_is_kept_only_if_the_step_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from longturn.cli.steps import tuning
    from longturn.kernels.packed_weights import WeightFormat
    from longturn.kernels.plan_table import Entry, PlanTable
    from longturn.models.make_checkpoint import PRESETS, preset_config
    from longturn.models.minimax_m3_config import minimax_m3_config

    preset = replace(PRESETS["tiny"], head_dim=128, index_dim=128, dense_attention=0)
    tuner = tuning.Tuner(
        minimax_m3_config(preset_config(preset)["text_config"]), experts=WeightFormat.PLAIN, others=WeightFormat.PLAIN,
        kv_dtype=torch.bfloat16, layers=2, context=300, device="meta",
    )  # fmt: skip
    assert tuner.config.layers == 2
    tables: list[PlanTable] = []
    step_of = tuner._step

    def noting(owner: object, table: PlanTable, size: int, many: bool) -> Callable[[], None]:
        tables.append(table)
        step_of(owner, table, size, many)  # type: ignore[arg-type]
        return lambda: None

    # The base, then one time a candidate: slower, a little faster, faster, does not run, faster again, ...
    times = iter([1.0, 1.1, 0.995, 0.9, None, 0.8])
    monkeypatch.setattr(tuner, "_step", noting)
    monkeypatch.setattr(tuning, "_kernels", lambda step: [])
    monkeypatch.setattr(tuning, "_time_ms", lambda step: next(times, 0.85))
    kernels = {"projection": ({"dot_rows": 8}, {"warps": 2}, {"warps": 8}, {"slices": True}, {"dot_stages": 4})}
    monkeypatch.setattr(tuning, "candidates", lambda size, many: kernels | {"msa": ({"tile": 64},)})
    before = Entry("projection", tuning.MiniMaxM3Gpu(tuner._weights, 2).plans.shapes["projection"], 4, {"rows": 2})
    other = replace(before, rows=16)
    *tried, table = tuner.tune(PlanTable("card", (before, other)), [4], many=False)
    assert [one.kept for one in tried if isinstance(one, tuning.Tried)] == [False, False, True, False, True, False]
    assert isinstance(table, PlanTable)
    assert table.entries[0] == other  # of other rows, and so left alone
    (entry,) = table.entries[1:]
    assert entry == replace(before, fields={"warps": 8, "dot_stages": 4})
    assert before not in tables[0].entries  # measured again like anything else


@pytest.mark.parametrize(("size", "many"), [(1, False), (8, False), (512, True), (8192, True)])
def test_candidates_are_fields_of_plans_and_change_those_for_many_tokens(size: int, many: bool) -> None:
    """One that is the default already would be measured for nothing, and could be kept by a lucky timing."""
    pytest.importorskip("triton", reason="triton is not installed")
    from longturn.cli.steps.tuning import candidates
    from longturn.kernels.msa_many import MsaManyPlan
    from longturn.kernels.msa_plan import MsaShape
    from longturn.kernels.pages import PageLayout
    from longturn.models.minimax_m3_gpu_plans import PLANS

    tried = candidates(size, many=many)
    for kernel, each in tried.items():
        known = {field.name for field in fields(PLANS[kernel])}
        assert all(set(changed) <= known for changed in each), kernel
    default = MsaManyPlan.default(MsaShape(32, PageLayout(60, 4), rotary_dim=64, max_blocks=1025), size)
    assert all(replace(default, **dict(changed)) != default for changed in tried.get("msa_many", ()))
    # Triton's kernels take what Hopper's leave, so tuning must have tried to leave it before it changes theirs.
    order = [name for changed in tried.get("msa_many", ()) for name in changed]
    assert order == sorted(order, key=lambda name: not name.startswith("hopper"))
