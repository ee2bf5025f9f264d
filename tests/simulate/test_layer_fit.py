"""Constants of chunks from layers timed kernel by kernel, and from whole steps."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

import pytest

from longturn.errors import ConfigError
from longturn.executor.gpu.buckets import Buckets
from longturn.simulate.calibration import KernelFamily
from longturn.simulate.cost.model import StepCost
from longturn.simulate.cost.options import CostOptions
from longturn.simulate.cost.routing import UNIFORM
from longturn.simulate.cost.step import StepShape, step_shape
from longturn.simulate.fit.chunks import MeasuredChunks, fit_chunks
from longturn.simulate.fit.layers import (
    COLUMNS,
    MeasuredLayer,
    fit_layers,
    layer_predicted,
    layers_of,
    like_layers,
    predicted_ns,
)
from longturn.simulate.fit.measured import steps_of, steps_predicted
from longturn.simulate.fit.own import CHUNK_SIZES, longturn_family
from longturn.simulate.formats import formats_named
from longturn.simulate.layout import parse_layout
from longturn.simulate.own_layers import compare_layers
from longturn.simulate.platform import Platform, load_platform
from longturn.simulate.published import steps_ns
from longturn.simulate.published_data import OWN_RUNS, groups
from longturn.simulate.shapes import load_shape

KEY, FORMATS = "bf16-bf16", formats_named("bf16")


def with_family(platform: Platform, family: KernelFamily) -> Platform:
    return dataclasses.replace(platform, families=MappingProxyType({family.name: family}), default_family=family.name)


def another(family: KernelFamily) -> KernelFamily:
    """Kernels that are not ours: all that a fit may find is different."""
    attention = dataclasses.replace(
        family.attention[KEY], prefill_fixed_ns=40e3, index_compute=0.35, select_ns=0.009, attend_compute=0.25,
        chunk_stream=0.4, part_bytes=4.0, prefill_token_ns=8.0, compute=0.6,
    )  # fmt: skip
    experts = dataclasses.replace(family.experts["bf16"], compute=0.45, sharpness=1.6)
    return dataclasses.replace(
        family, attention=MappingProxyType({KEY: attention}), experts=MappingProxyType({"bf16": experts})
    )


def layers(platform: Platform, truth: KernelFamily, sizes: list[tuple[str, int, int]]) -> list[MeasuredLayer]:
    found = []
    for model, context, new in sizes:
        shape, layout = like_layers(load_shape(model)), parse_layout("tp1")
        step = step_shape([], [(context, new)], attend_limit=shape.attend_limit)
        cost = StepCost(with_family(platform, truth), shape, layout, FORMATS, CostOptions(routing=UNIFORM))
        found.append(MeasuredLayer(shape, layout, step, MappingProxyType(predicted_ns(cost, step))))
    return found


def test_layers_bring_back_the_kernels_behind_them() -> None:
    chips = load_platform("h200")
    base = chips.families["longturn"]
    truth = another(base)
    sizes = [("m3-mini60", context, new) for context in (0, 8192, 131_072) for new in (128, 512, 2048, 4096)]
    sizes += [("m3-slice8", 131_072, 512), ("m3-slice8", 8192, 2048)]
    found = fit_layers(chips, base, FORMATS, layers(chips, truth, sizes), "made up")
    unseen = layers(chips, truth, [("m3-mini60", 65_536, 1024), ("m3-mini60", 200_000, 256), ("m3-slice8", 0, 1024)])
    for layer in unseen:
        assert layer_predicted(chips, found, FORMATS, layer) == pytest.approx(layer.ns["layer"], rel=0.03)
    before = [layer_predicted(chips, base, FORMATS, layer) / layer.ns["layer"] for layer in unseen]
    assert min(before) < 0.9, "the kernels differ by more than the fit is off"
    attention = found.attention[KEY]
    assert attention.index_compute == pytest.approx(0.35, rel=0.1)
    assert attention.select_ns == pytest.approx(0.009, rel=0.2)
    assert attention.decode_fixed_ns == base.attention[KEY].decode_fixed_ns, "decode steps say that"


def test_whole_steps_bring_back_the_kernels_behind_them() -> None:
    chips = load_platform("h200")
    base = chips.families["longturn"]
    shape, layout = load_shape("m3-mini60"), parse_layout("tp1")
    slower = dataclasses.replace(
        base.attention[KEY], index_compute=0.3, attend_compute=0.2, prefill_fixed_ns=90e3
    )  # fmt: skip
    truth = dataclasses.replace(base, attention=MappingProxyType({KEY: slower}))
    model = StepCost(with_family(chips, truth), shape, layout, FORMATS, CostOptions(routing=UNIFORM))

    def measured(*runs: tuple[StepShape, ...]) -> list[MeasuredChunks]:
        return [MeasuredChunks(shape, layout, run, steps_ns(model, run)[0]) for run in runs]

    def chunk(start: int, count: int) -> StepShape:
        return step_shape([], [(start, count)], attend_limit=shape.attend_limit)

    prompt = tuple(chunk(start, 8192) for start in range(0, 65_536, 8192))
    seen = measured(prompt, (chunk(0, 4096),), (chunk(131_072, 512),), (chunk(32_768, 2048),), (chunk(8192, 128),))
    found = fit_chunks(chips, base, FORMATS, seen, "made up")
    for one in measured((chunk(65_536, 1024),), (chunk(131_072, 4096),), prompt[:3]):
        cost = StepCost(with_family(chips, found), shape, layout, FORMATS, CostOptions(routing=UNIFORM))
        assert steps_ns(cost, one.steps)[0] == pytest.approx(one.ns, rel=0.03)


def test_what_ships_is_what_the_runs_give() -> None:
    """Nobody edits constants by hand, and points that are judged are not among those fitted."""
    chips = load_platform("h200")
    fitted = [one for one in groups("decode", "chain", "layer", path=OWN_RUNS) if one.values.get("use") == "fitted"]
    found = longturn_family(chips, chips.families["vllm-0.24"], fitted, crossed=False)
    shipped = chips.families["longturn"]
    for name in (
        "decode_fixed_ns",
        "prefill_fixed_ns",
        "index_compute",
        "select_ns",
        "attend_compute",
        "lone_fixed_ns",
        "few_fixed_ns",
    ):
        mine, theirs = getattr(found.attention[KEY], name), getattr(shipped.attention[KEY], name)
        assert mine == pytest.approx(theirs, rel=1e-2), name  # arithmetic differs between machines in its last digits,
    # and valleys are flat: what the constants say of a step is settled better than each of them.
    layers = [layer for group in fitted if group.kind == "layer" for layer in layers_of(group)]
    for layer in layers:
        mine, theirs = (layer_predicted(chips, family, FORMATS, layer) for family in (found, shipped))
        assert mine == pytest.approx(theirs, rel=1e-3), layer.step
    steps = [step for group in fitted if group.kind != "layer" for step in steps_of(group)]
    assert len(layers) > 5 and len(steps) > 10
    mine, theirs = (steps_predicted(chips, family, FORMATS, steps) for family in (found, shipped))
    assert mine == pytest.approx(theirs, rel=1e-3)
    assert found.experts["bf16"].stream == pytest.approx(shipped.experts["bf16"].stream, rel=1e-3)
    assert found.chunk_sizes == shipped.chunk_sizes == CHUNK_SIZES
    for group in groups(path=OWN_RUNS):
        assert not (group.judged and group in fitted), group.name
    # Left out one at a time, points lie farther off than inside the fit.
    assert shipped.attention[KEY].prefill.rms > found.attention[KEY].prefill.rms
    assert shipped.attention[KEY].decode.rms > found.attention[KEY].decode.rms


def test_steps_are_padded_as_the_executor_does() -> None:
    assert Buckets.of(64, 8192, 131_072).tokens == CHUNK_SIZES


def test_held_out_layers_are_predicted() -> None:
    found = compare_layers()
    assert {one.kind for one in found} == {"layer"} and all(one.judged != one.fitted for one in found)
    held_out = [one for one in found if one.judged]
    assert len(held_out) == 4 and any("8 rows" in one.point for one in held_out)
    assert all(abs(one.error) < 0.07 for one in held_out)
    assert all(abs(one.error) < 0.05 for one in found if one.fitted)


def test_a_layer_is_more_than_its_kernels() -> None:
    for group in groups("layer", path=OWN_RUNS):
        for layer in layers_of(group):
            cost = StepCost(
                load_platform("h200"), layer.shape, layer.layout, FORMATS, CostOptions("longturn", routing=UNIFORM)
            )
            parts = predicted_ns(cost, layer.step)
            assert tuple(parts) == COLUMNS
            assert parts["layer"] > sum(value for name, value in parts.items() if name != "layer")


def test_errors_are_one_line() -> None:
    chips = load_platform("h200")
    family = chips.families["longturn"]
    with pytest.raises(ConfigError, match="at least 6 measured layers, not 0"):
        fit_layers(chips, family, FORMATS, [], "")
    with pytest.raises(ConfigError, match="at least 4 measured turns, mixed steps and prompts, not 0"):
        fit_chunks(chips, family, FORMATS, [], "")
    with pytest.raises(ConfigError, match="no layer has both experts and chosen blocks"):
        like_layers(load_shape("llama-3.1-8b"))


def test_kernels_that_were_not_timed_are_left_out() -> None:
    """A layer whose other kernels changed still says what the rest takes."""
    chips = load_platform("h200")
    base, truth = chips.families["longturn"], another(chips.families["longturn"])
    sizes = [("m3-mini60", context, new) for context in (0, 131_072) for new in (128, 512, 2048, 4096)]
    known = layers(chips, truth, sizes)
    lost = {"attend": 1e9, "layer": 1e9}
    wrong = [dataclasses.replace(one, ns=MappingProxyType({**one.ns, **lost})) for one in known[:2]]
    left = [dataclasses.replace(one, ns=MappingProxyType({name: ns for name, ns in one.ns.items() if name not in lost}))
            for one in wrong]  # fmt: skip
    found = fit_layers(chips, base, FORMATS, [*known[2:], *left], "made up")
    spoilt = fit_layers(chips, base, FORMATS, [*known[2:], *wrong], "made up")
    assert found.attention[KEY].prefill.rms < 0.02 < spoilt.attention[KEY].prefill.rms
    assert found.attention[KEY].prefill.points == len(known) - 2
