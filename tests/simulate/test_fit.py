"""The fit: known constants come back, tables give the constants that ship, and the written file reads the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from longturn.errors import ConfigError
from longturn.simulate.calibration import KernelFamily
from longturn.simulate.cost.formulas import experts_ns
from longturn.simulate.cost.options import CostOptions
from longturn.simulate.cost.routing import UNIFORM
from longturn.simulate.cost.step import step_shape
from longturn.simulate.fit.attention import fit_attention
from longturn.simulate.fit.emit import MARKER, write_calibration
from longturn.simulate.fit.experts import HOPPER_KERNELS, ExpertRows, fit_experts, fit_uneven
from longturn.simulate.fit.measured import MeasuredStep, fit_measured, steps_predicted
from longturn.simulate.fit.rubin import fit_rubin_experts
from longturn.simulate.fit.run import fit_platforms
from longturn.simulate.fit.solver import solve
from longturn.simulate.fit.tables import read_table
from longturn.simulate.formats import formats_named
from longturn.simulate.layout import parse_layout
from longturn.simulate.platform import load_platform, load_spec, platform_names, platform_path
from longturn.simulate.published_data import Group, groups
from longturn.simulate.shapes import load_shape
from tests.simulate.helpers import EXACT, NO_HOST, cost

TABLES = Path(__file__).parents[3] / "shared" / "calibration"


def tables() -> Path:
    pytest.importorskip("pyarrow")
    if not TABLES.is_dir():
        pytest.skip("no kernel tables beside the repository")
    return TABLES


def test_the_solver_finds_known_constants_in_spite_of_a_wild_row() -> None:
    rng = np.random.Generator(np.random.PCG64(3))
    x, y = rng.uniform(1, 100, 200), rng.uniform(1, 100, 200)
    times = 50.0 + 2.0 * x + 0.3 * y
    times[7] *= 40
    found = solve(lambda c: c[0] + c[1] * x + c[2] * y, [10.0, 1.0, 1.0], times)
    assert found.constants == pytest.approx([50.0, 2.0, 0.3], rel=0.01)
    assert found.residual().worst > 0.9
    assert found.residual(np.arange(200) != 7).rms < 0.01


def test_expert_constants_come_back_from_their_own_times() -> None:
    truth = {"fixed_ns": 3e4, "stream": 0.6, "stream_exponent": 0.9, "compute": 0.4, "sharpness": 2.5}
    tokens = np.array([1.0, 2, 4, 8, 16, 32, 64, 256, 1024, 4096, 16384])
    stream = np.concatenate([np.minimum(128, 4 * tokens) * 4e3 / ways for ways in (1, 4)])
    compute = np.concatenate([tokens * 300 / ways for ways in (1, 4)])
    activation = np.concatenate([tokens * 4 * 6144.0] * 2)
    times = experts_ns(stream, compute, activation * 12.0 / 8000.0, **truth)
    found = ExpertRows(stream, compute, activation, times).fit(8000.0, "tables", "x", "nvfp4", None)
    assert found.tables.rms < 0.01
    for name, value in truth.items():
        assert getattr(found, name) == pytest.approx(value, rel=0.1), name


@pytest.mark.parametrize(
    ("platform", "family", "low", "high"),
    [("h200", "vllm-0.24", 58.6, 61.9), ("b200", "vllm-0.24", 36.7, 39.4), ("gb300", "vllm-0.24", 36.5, 39.1)],
)
def test_the_index_scan_agrees_with_an_independent_fit(platform: str, family: str, low: float, high: float) -> None:
    """Picoseconds a key, layer and sequence, by ordinary least squares over contexts of 8,192 and more."""
    chips = load_platform(platform)
    for constants in chips.family(family).attention.values():
        slope = 256 / (chips.value("hbm_bandwidth") * constants.index_stream) * 1e12
        assert low * 0.96 < slope < high * 1.04


def test_published_rubin_constants_are_those_that_ship() -> None:
    fitted = fit_rubin_experts(load_spec(platform_path("vr-nvl72")))
    shipped = load_platform("vr-nvl72").family().experts
    for key, constants in fitted.items():
        for field in ("fixed_ns", "stream", "compute", "activation_bytes", "sharpness"):
            assert getattr(shipped[key], field) == pytest.approx(getattr(constants, field), rel=0.01), field


def test_constants_depend_on_no_judged_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """The held-out rule: doubling what the model is judged by changes nothing, doubling what it is fitted to does."""
    platform = load_spec(platform_path("vr-nvl72"))
    before = fit_rubin_experts(platform)

    def doubled(use: str) -> tuple[Group, ...]:
        return tuple(
            dataclasses.replace(
                group,
                values={
                    key: [2 * value for value in values] if key in ("plain", "localized") else values
                    for key, values in group.values.items()
                },
            )
            if group.values["use"] == use
            else group
            for group in groups("experts")
        )

    monkeypatch.setattr("longturn.simulate.fit.rubin.groups", lambda kind: doubled("judged"))
    assert fit_rubin_experts(platform) == before
    monkeypatch.setattr("longturn.simulate.fit.rubin.groups", lambda kind: doubled("fitted"))
    assert fit_rubin_experts(platform) != before


def test_the_tables_give_the_constants_that_ship() -> None:
    directory = tables()
    platform = load_spec(platform_path("h200"))
    decode = read_table(directory, "h200_sxm_msa_generation_module_perf")
    prefill = read_table(directory, "h200_sxm_msa_context_module_perf")
    experts = read_table(directory, "h200_sxm_moe")
    assert decode is not None and prefill is not None and experts is not None
    shipped = load_platform("h200").family()
    for key, constants in fit_attention(platform, decode, prefill, "x").items():
        for field in ("decode_fixed_ns", "weight_stream", "index_stream", "attend_stream", "attend_compute"):
            assert getattr(shipped.attention[key], field) == pytest.approx(getattr(constants, field), rel=0.01)
    found = fit_experts(platform, experts, HOPPER_KERNELS[0])
    assert found is not None
    found = fit_uneven(platform, experts, HOPPER_KERNELS[0], found)
    assert shipped.experts["bf16"].stream == pytest.approx(found.stream, rel=0.01)
    assert shipped.experts["bf16"].uneven == pytest.approx(found.uneven, rel=0.01)


@pytest.mark.parametrize("name", platform_names())
def test_what_is_written_reads_back_the_same(name: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}.toml"
    path.write_text(platform_path(name).read_text())
    before: list[KernelFamily] = list(load_platform(name).families.values())
    write_calibration(path, before)
    assert list(load_platform(str(path)).families.values()) == before
    assert path.read_text() == platform_path(name).read_text(), "what ships was written by the same code"


def test_a_file_without_the_marker_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(platform_path("h200").read_text().replace(MARKER, "# mine"))
    before = path.read_text()
    with pytest.raises(ConfigError, match=r"mine\.toml: no line"):
        write_calibration(path, list(load_platform("h200").families.values()))
    assert path.read_text() == before


def test_measured_steps_are_reproduced() -> None:
    """Steps that a known family would take: the fit must predict others of it, not only those. What is measured has
    random weights, which choose experts evenly."""
    chips = load_platform("h200")
    even = CostOptions(host=NO_HOST, graphs=EXACT, routing=UNIFORM)
    truth = cost("h200", "m3-slice8", "tp1", "bf16", even)
    shape, layout = load_shape("m3-slice8"), parse_layout("tp1")

    def steps(grid: list[tuple[int, int]]) -> list[MeasuredStep]:
        made = [step_shape([context] * rows, attend_limit=shape.attend_limit) for rows, context in grid]
        return [MeasuredStep(shape, layout, step, float(truth.breakdown(step).device_ns)) for step in made]

    seen = steps([(1, 4096), (1, 131072), (2, 65536), (8, 32768), (16, 4096), (32, 8192), (32, 32768), (4, 131072)])
    base = chips.family("vllm-0.24")
    found = fit_measured(chips, base, "mine", formats_named("bf16"), seen, "here", "today", base.small_kernel_ns)
    mine = dataclasses.replace(chips, families={"mine": found}, default_family="mine")
    for measured in steps([(4, 16384), (16, 65536), (24, 10000)]):
        predicted = cost(mine, "m3-slice8", "tp1", "bf16", even).breakdown(measured.step).device_ns
        assert predicted == pytest.approx(measured.ns, rel=0.05)


def test_few_rows_bring_back_a_launch_of_their_own() -> None:
    """One row, some rows, and the chain of kernels that takes more: each has its fixed time and its stream."""
    chips = load_platform("h200")
    ours, formats, layout, shape = (
        chips.families["longturn"],
        formats_named("bf16"),
        parse_layout("tp1"),
        load_shape("m3-mini60"),
    )
    known = dataclasses.replace(
        ours.attention["bf16-bf16"], decode_fixed_ns=25e3, index_stream=0.7, lone_fixed_ns=6e3, lone_index_stream=0.4,
        few_fixed_ns=12e3, few_index_stream=0.55,
    )  # fmt: skip
    truth = dataclasses.replace(ours, attention={"bf16-bf16": known})

    def steps(grid: list[tuple[int, int]], lone: bool) -> list[MeasuredStep]:
        made = [step_shape([context] * rows, attend_limit=shape.attend_limit) for rows, context in grid]
        empty = [MeasuredStep(shape, layout, step, 1.0, lone) for step in made]
        times = steps_predicted(chips, truth, formats, empty)
        return [dataclasses.replace(one, ns=float(ns)) for one, ns in zip(empty, times, strict=True)]

    one, few = [(1, 4096), (1, 65_536), (1, 131_072)], [(2, 4096), (2, 131_072), (4, 4096), (4, 32_768), (4, 131_072)]
    seen = steps([*one, *few, (8, 32_768), (16, 8192), (32, 8192), (32, 65_536)], True) + steps(few, False)
    found = fit_measured(chips, ours, "mine", formats, seen, "here", "today", ours.small_kernel_ns)
    unseen = steps([(1, 200_000), (2, 65_536), (3, 100_000), (6, 50_000)], True) + steps([(2, 50_000)], False)
    assert steps_predicted(chips, found, formats, unseen) == pytest.approx([step.ns for step in unseen], rel=0.01)
    before = steps_predicted(chips, ours, formats, unseen) / np.array([step.ns for step in unseen])
    assert min(before) < 0.95, "the kernels differ by more than the fit is off"
    mine = found.attention["bf16-bf16"]
    assert mine.lone_index_stream == pytest.approx(0.4, rel=0.05)
    assert mine.few_index_stream == pytest.approx(0.55, rel=0.05)


def test_errors_are_one_line(tmp_path: Path) -> None:
    chips = load_platform("h200")
    with pytest.raises(ConfigError, match="at least 6 measured steps"):
        fit_measured(chips, chips.family(), "mine", formats_named("bf16"), [], "here", "today", 0.0)
    with pytest.raises(ConfigError, match="no kernel table"):
        fit_platforms(tmp_path, lambda line: None, names=("h200",))
    with pytest.raises(ConfigError, match="no recipe"):
        fit_platforms(tmp_path, lambda line: None, names=("h300",))
    pytest.importorskip("pyarrow")
    (tmp_path / "broken.parquet").write_bytes(b"not a table")
    with pytest.raises(ConfigError, match="broken"):
        read_table(tmp_path, "broken")
