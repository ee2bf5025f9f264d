"""Attention beside its projections, as our own kernels have it: tiles, blocks read once, the choice of blocks, a step
of few rows in one launch. By hand, and what must hold whatever the constants are."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.errors import ConfigError
from longturn.simulate.cost.formulas import distinct_keys, pairs
from longturn.simulate.cost.model import StepCost
from longturn.simulate.cost.options import CostOptions
from longturn.simulate.cost.step import StepShape, step_shape
from longturn.simulate.fit.emit import family_toml
from longturn.simulate.platform import Platform, load_platform, platform_names, platform_path, read_platform
from tests.simulate.helpers import EXACT, NO_HOST, cost

KEY = "bf16-bf16"
FRACTIONS = ("index_compute", "attend_compute", "chunk_stream", "compute", "weight_stream")
TIMES = ("select_ns", "part_bytes", "prefill_fixed_ns", "prefill_token_ns")
SPARSE, HEADS, BLOCK, LIMIT = 60, 4, 128, 2048
"""Of mini60: sparse layers, index heads, tokens of a block, tokens attended to."""


def ours(platform: Platform | None = None, model: str = "m3-mini60", **changed: Any) -> StepCost:
    """Longturn's own kernels, some constants changed."""
    chips = load_platform("h200") if platform is None else platform
    family = chips.families["longturn"]
    attention = dataclasses.replace(family.attention[KEY], **changed)
    family = dataclasses.replace(family, attention=MappingProxyType({KEY: attention}))
    chips = dataclasses.replace(chips, families=MappingProxyType({"longturn": family}), default_family="longturn")
    return cost(chips, model, "tp1", "bf16", CostOptions(host=NO_HOST, graphs=EXACT))


def shape(rows: list[int], pieces: list[tuple[int, int]]) -> StepShape:
    return step_shape(rows, pieces, attend_limit=LIMIT)


def part(model: StepCost, step: StepShape, kernel: str) -> int:
    return model.breakdown(step).by_kernel()[kernel]


steps = st.builds(
    shape,
    st.lists(st.integers(1, 200_000), max_size=8),
    st.lists(st.tuples(st.integers(0, 200_000), st.integers(1, 4_000)), min_size=1, max_size=2),
)


def test_choosing_blocks_by_hand() -> None:
    model = ours()
    each = load_platform("h200").families["longturn"].attention[KEY].select_ns
    scored = pairs(131_072 + 512.0) - pairs(131_072.0)
    found = part(model, shape([], [(131_072, 512)]), "block_select")
    assert found == pytest.approx(SPARSE * HEADS * each * scored / BLOCK, rel=1e-6)
    assert part(model, shape([131_072], []), "block_select") == 0, "in a decode step it is part of the fixed time"


def test_only_families_whose_choice_was_measured_have_it() -> None:
    for name in platform_names():
        for family in load_platform(name).families.values():
            known = [one.select_ns > 0 for one in family.attention.values()]
            assert all(known) if family.name == "longturn" else not any(known)


def test_a_tile_is_scored_whole() -> None:
    model = ours(select_ns=0.0)
    tile = load_platform("h200").families["longturn"].attention[KEY].tile_tokens
    full = part(model, shape([], [(100_000, tile)]), "index_scan")
    assert part(model, shape([], [(100_000, 1)]), "index_scan") == pytest.approx(full, rel=1e-3)
    assert part(model, shape([], [(100_000, tile + 1)]), "index_scan") == pytest.approx(2 * full, rel=1e-3)


def test_a_row_beside_a_chunk_takes_a_tile_and_alone_it_does_not() -> None:
    model = ours(row_tile_tokens=0)
    tile = load_platform("h200").families["longturn"].attention[KEY].tile_tokens
    chunk = [(50_000, 512)]
    beside = part(model, shape([100_000], chunk), "index_scan") - part(model, shape([], chunk), "index_scan")
    assert beside == pytest.approx(part(model, shape([], [(100_000 - tile // 2, tile)]), "index_scan"), rel=1e-3)
    assert part(ours(row_tile_tokens=0, tile_tokens=2 * tile), shape([100_000], chunk), "index_scan") > part(
        model, shape([100_000], chunk), "index_scan"
    )
    keys_ns = SPARSE * 100_000 * 128 * 2 / 4.8e12 * 1e9
    for tokens in (3 * tile // 4, tile // 4):
        shares = ours(row_tile_tokens=tokens)
        less = part(shares, shape([100_000], chunk), "index_scan") - part(shares, shape([], chunk), "index_scan")
        assert less == pytest.approx(max(beside * tokens / tile, keys_ns), rel=1e-3), "keys are read in any case"
    assert beside / 4 < keys_ns < 3 * beside / 4


def test_the_tile_of_a_row_with_drafts_is_a_full_one() -> None:
    shares, full = ours(row_tile_tokens=16), ours(row_tile_tokens=0)
    verified = step_shape([100_000], [(50_000, 512)], tokens_per_row=4, attend_limit=LIMIT)
    assert part(shares, verified, "index_scan") == part(full, verified, "index_scan")


@pytest.mark.parametrize("tokens", [1, 7, 100, 2_000])
def test_distinct_keys_against_chance(tokens: int) -> None:
    """Blocks drawn at random, a block a choice: the mean over many draws."""
    draw = np.random.default_rng(tokens)
    blocks, top = 300, 16
    seen = [
        len(set(np.concatenate([draw.choice(blocks, top, replace=False) for _ in range(tokens)]))) for _ in range(5)
    ]
    assert distinct_keys(blocks * 128.0, tokens, top * 128.0) == pytest.approx(128 * np.mean(seen), rel=0.03)
    assert distinct_keys(1_000.0, tokens, 2_048.0) == 1_000.0


def test_few_rows_in_one_launch() -> None:
    """It serves mini60's width and no other, rows without drafts and no chunk."""
    chain: dict[str, Any] = {"lone_hidden": 0}
    one, two = shape([100_000], []), shape([50_000, 50_000], [])
    most = load_platform("h200").families["longturn"].attention[KEY].lone_rows
    assert most == 4
    for rows in range(1, most + 1):
        step = shape([50_000] * rows, [])
        assert ours().step_ns(step) < ours(**chain).step_ns(step), rows
    more = shape([50_000] * (most + 1), [])
    assert ours().step_ns(more) == ours(**chain).step_ns(more)
    assert ours(lone_rows=1).step_ns(two) == ours(**chain).step_ns(two)
    assert ours(lone_rows=1).step_ns(one) == ours().step_ns(one)
    assert ours(model="m3-slice8").step_ns(one) == ours(model="m3-slice8", **chain).step_ns(one)
    mixed, verified = shape([100_000], [(0, 64)]), step_shape([100_000], attend_limit=LIMIT, tokens_per_row=2)
    assert ours().step_ns(mixed) == ours(**chain).step_ns(mixed)
    assert ours().step_ns(verified) == ours(**chain).step_ns(verified)


def test_one_row_has_constants_of_its_own() -> None:
    """By hand: a layer's fixed time, and index keys of 128 elements of two bytes at the peak's share."""
    one, two = shape([100_000], []), shape([50_000, 50_000], [])
    for step, pair in ((one, "lone"), (two, "few")):
        other = "few" if pair == "lone" else "lone"
        slow: dict[str, Any] = {f"{pair}_fixed_ns": 1e4, f"{pair}_index_stream": 0.5}
        assert part(ours(**slow), step, "index_scan") == pytest.approx(SPARSE * 100_000 * 256 / (4800 * 0.5), rel=1e-6)
        faster = ours(**{**slow, f"{pair}_fixed_ns": 0.0})
        saved = part(ours(**slow), step, "attention_fixed") - part(faster, step, "attention_fixed")
        assert saved == SPARSE * 10_000
        untouched = ours(**{f"{other}_fixed_ns": 1e4, f"{other}_index_stream": 0.5})
        assert untouched.step_ns(step) == ours().step_ns(step)


def test_a_chunk_is_padded_to_its_familys_sizes() -> None:
    model = ours()

    def products(tokens: int) -> list[int]:
        found = model.breakdown(shape([], [(0, tokens)])).by_kernel()
        return [found[name] for name in ("projections", "experts", "shared_expert", "router", "norms")]

    assert products(520) == products(576) != products(512)
    assert products(8192) != products(9000), "beyond the largest nothing is padded"
    assert model.breakdown(shape([], [(0, 8192)])).host_ns == 0, "every size has its graph"


@pytest.mark.parametrize("name", FRACTIONS)
@given(step=steps, more=st.floats(1.0, 3.0))
@settings(max_examples=20, deadline=None)
def test_a_faster_kernel_never_slows_a_step(name: str, step: StepShape, more: float) -> None:
    value = getattr(load_platform("h200").families["longturn"].attention[KEY], name)
    assert ours(**{name: value * more}).step_ns(step) <= ours().step_ns(step)


@pytest.mark.parametrize("name", TIMES)
@given(step=steps, less=st.floats(0.0, 1.0))
@settings(max_examples=20, deadline=None)
def test_less_work_never_slows_a_step(name: str, step: StepShape, less: float) -> None:
    value = getattr(load_platform("h200").families["longturn"].attention[KEY], name)
    assert ours(**{name: value * less}).step_ns(step) <= ours().step_ns(step)


@given(step=steps, context=st.integers(0, 200_000), tokens=st.integers(1, 4_000))
@settings(max_examples=50, deadline=None)
def test_more_in_a_step_never_makes_it_faster(step: StepShape, context: int, tokens: int) -> None:
    model = ours()
    before = model.step_ns(step)
    (start, count), *others = step.chunks
    for chunks in (
        [(start + context, count), *others],
        [(start, count + tokens), *others],
        [*step.chunks, (0, tokens)],
    ):
        assert model.step_ns(dataclasses.replace(step, chunks=tuple(chunks))) >= before
    row = shape([context + 1], [])
    rows = dataclasses.replace(
        step,
        rows=step.rows + 1,
        row_tokens=step.row_tokens + 1,
        context_tokens=step.context_tokens + row.context_tokens,
        attended_tokens=step.attended_tokens + row.attended_tokens,
        samples=step.samples + 1,
    )
    assert model.step_ns(rows) >= before


@given(step=steps, more=st.floats(1.0, 3.0))
@settings(max_examples=20, deadline=None)
def test_more_bandwidth_and_compute_never_slow_our_steps(step: StepShape, more: float) -> None:
    chips = load_platform("h200")
    before = ours(chips).step_ns(step)
    assert ours(chips.scaled(hbm_bandwidth=more)).step_ns(step) <= before
    assert ours(chips.scaled(bf16_flops=more)).step_ns(step) <= before


def test_optional_constants_are_written_only_where_they_are_known() -> None:
    families = load_platform("h200").families
    assert "select_ns" in family_toml(families["longturn"]) and "chunk_sizes" in family_toml(families["longturn"])
    assert "select_ns" not in family_toml(families["vllm-0.24"]) and "lone" not in family_toml(families["vllm-0.24"])


@pytest.mark.parametrize("sizes", [[128, 64], [64, 64], [0, 64], ["64"], 64, [True]])
def test_chunk_sizes_that_are_none(sizes: Any) -> None:
    import tomllib

    data = tomllib.loads(platform_path("h200").read_text())
    data["calibration"]["longturn"]["chunk_sizes"] = sizes
    with pytest.raises(ConfigError, match=r"mine: calibration.longturn.chunk_sizes must be") as caught:
        read_platform(data, "mine", "mine")
    assert "\n" not in str(caught.value)
