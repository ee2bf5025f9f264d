"""The cost model against hand-computed kernels, an obvious twin, and what must hold whatever the constants are."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.errors import ConfigError
from longturn.simulate.cost.formulas import attended, pairs, smooth_max
from longturn.simulate.cost.options import KERNELS, CostOptions, Graphs, HostTime
from longturn.simulate.cost.routing import BALANCED
from longturn.simulate.cost.step import StepShape, step_shape
from longturn.simulate.drafts import load_drafter
from longturn.simulate.layout import check_layout, parse_layout
from longturn.simulate.platform import load_platform
from longturn.simulate.shapes import load_shape
from tests.simulate.helpers import EXACT, NO_HOST, cost

LIMIT = 2048

contexts = st.lists(st.integers(1, 200_000), max_size=40)
chunks = st.lists(st.tuples(st.integers(0, 200_000), st.integers(1, 4_000)), max_size=3)


def shape(rows: list[int], pieces: list[tuple[int, int]], each: int = 1) -> StepShape:
    return step_shape(rows, pieces, attend_limit=LIMIT, tokens_per_row=each)


# --- sums ------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 5_000), st.integers(0, 5_000))
def test_sums_over_positions_match_loops(start: int, count: int) -> None:
    positions = range(start + 1, start + count + 1)
    assert pairs(float(start + count)) - pairs(float(start)) == sum(positions)
    assert attended(float(start + count), 2048.0) - attended(float(start), 2048.0) == sum(
        min(p, 2048) for p in positions
    )


def test_smooth_max_lies_between_maximum_and_sum() -> None:
    for sharpness in (1.0, 1.7, 3.0, 8.0):
        value = smooth_max(300.0, 400.0, sharpness)
        assert 400.0 <= value <= 700.0 + 1e-9
    assert smooth_max(300.0, 400.0, 2.0) == pytest.approx(500.0)


# --- single kernels by hand ------------------------------------------------------------------------------------------


def test_index_scan_by_hand() -> None:
    """57 sparse layers x 24 rows x 142,000 keys x 128 bytes (FP8) over the stated share of 8 TB/s."""
    share = load_platform("gb300").family("vllm-0.24").attention["fp8-fp8"].index_stream
    expected = 57 * 24 * 142_000 * 128 / (8e12 * share) * 1e9
    found = cost().breakdown(shape([142_000] * 24, [])).by_kernel()["index_scan"]
    assert found == pytest.approx(expected, rel=2e-5)


def test_chosen_blocks_by_hand() -> None:
    """Each row reads 2,048 keys and values of one key/value head (four over TP4) of 128 FP8 numbers, in 57 layers."""
    share = load_platform("gb300").family("vllm-0.24").attention["fp8-fp8"].attend_stream
    expected = 57 * 8 * 2048 * 2 * 1 * 128 * 1 / (8e12 * share) * 1e9
    found = cost().breakdown(shape([50_000] * 8, [])).by_kernel()["sparse_attend"]
    assert found == pytest.approx(expected, rel=2e-5)


def test_balanced_experts_by_hand() -> None:
    """One token, TP4: 4 experts of 3 x 6144 x 3072 weights in 57 layers. Vera Rubin: proportional to bytes."""
    constants = load_platform("vr-nvl72").family().experts["nvfp4"]
    options = CostOptions(host=NO_HOST, graphs=EXACT, routing=BALANCED, locality=False)
    found = cost("vr-nvl72", options=options).breakdown(shape([100], [])).by_kernel()["experts"]
    stream = 4 * 3 * 6144 * 3072 / 4 * 0.5625 / (19.16e12 * constants.stream) * 1e9
    moved = 4 * 6144 * constants.activation_bytes / 19.16e12 * 1e9
    assert found == pytest.approx(57 * (constants.fixed_ns + stream + moved), rel=1e-3)


def test_all_reduce_by_hand() -> None:
    """Two a layer and one for the embedding, at a measured size: 32 tokens x 6144 x 2 bytes lies between two knots."""
    knots = load_platform("gb300").family("vllm-0.24").all_reduce.ranks[4]
    message = 32 * 6144 * 2
    above = next(i for i, size in enumerate(knots.bytes) if size >= message)
    share = (message - knots.bytes[above - 1]) / (knots.bytes[above] - knots.bytes[above - 1])
    one = knots.ns[above - 1] + share * (knots.ns[above] - knots.ns[above - 1])
    found = cost().breakdown(shape([100] * 32, [])).by_kernel()["collectives"]
    assert found == pytest.approx(121 * one, rel=2e-5)


def test_one_chip_has_no_collectives() -> None:
    parts = cost("h200", "m3-slice8", "tp1", "bf16").breakdown(shape([100] * 32, [])).by_kernel()
    assert parts["collectives"] == 0


# --- what splitting divides ------------------------------------------------------------------------------------------


def test_tensor_parallelism_divides_weights_and_heads_but_not_the_index_scan() -> None:
    step = shape([100_000] * 16, [])
    one = cost("b300", "m3", "tp2").breakdown(step).by_kernel()
    two = cost("b300", "m3", "tp4").breakdown(step).by_kernel()
    assert two["index_scan"] == one["index_scan"]
    assert two["sparse_attend"] == pytest.approx(one["sparse_attend"] / 2, rel=2e-5)
    assert two["dense_attend"] == pytest.approx(one["dense_attend"] / 2, rel=2e-5)
    assert two["projections"] < 0.7 * one["projections"]
    assert two["experts"] < one["experts"]


def test_more_ranks_than_key_heads_repeat_them() -> None:
    step = shape([100_000] * 16, [])
    four = cost("b300", "m3", "tp4").breakdown(step).by_kernel()
    eight = cost("b300", "m3", "tp8").breakdown(step).by_kernel()
    assert eight["sparse_attend"] == four["sparse_attend"]


def test_data_parallel_attention_uses_all_to_all_and_everyones_tokens() -> None:
    step = shape([100_000] * 16, [])
    spread = cost("b300", "m3", "dep4").breakdown(step).by_kernel()
    together = cost("b300", "m3", "ep4").breakdown(step).by_kernel()
    assert spread["experts"] > together["experts"], "four times the tokens"
    assert spread["sparse_attend"] == pytest.approx(4 * together["sparse_attend"], rel=2e-5)


# --- metamorphic -----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    contexts, chunks, st.sampled_from(["hbm_bandwidth", "link_bandwidth", "bf16_flops", "fp8_flops", "nvfp4_flops"]),
    st.floats(1.0, 8.0), st.sampled_from(["tp2", "tp4", "ep4", "dep4"]), st.sampled_from(["gb300", "vr-nvl72"]),
)  # fmt: skip
def test_a_faster_chip_never_slows_a_step(
    rows: list[int], pieces: list[tuple[int, int]], key: str, factor: float, layout: str, name: str
) -> None:
    step = shape(rows, pieces)
    platform = load_platform(name)
    before = cost(platform, layout=layout).breakdown(step)
    after = cost(platform.scaled(**{key: factor}), layout=layout).breakdown(step)
    for kernel, old, new in zip(KERNELS, before.ns, after.ns, strict=True):
        assert new <= old + 1, kernel


@settings(max_examples=60, deadline=None)
@given(contexts, chunks, st.integers(1, 200_000), st.sampled_from(["tp4", "ep4"]))
def test_more_work_never_costs_less(rows: list[int], pieces: list[tuple[int, int]], context: int, layout: str) -> None:
    model = cost(layout=layout, options=CostOptions())
    before = model.breakdown(shape(rows, pieces)).device_ns
    assert model.breakdown(shape([*rows, context], pieces)).device_ns >= before
    assert model.breakdown(shape(rows, [*pieces, (context, 17)])).device_ns >= before
    if rows:
        longer = [rows[0] + 10_000, *rows[1:]]
        assert model.breakdown(shape(longer, pieces)).device_ns >= before


@settings(max_examples=40, deadline=None)
@given(contexts, chunks)
def test_free_kernels_leave_only_the_host(rows: list[int], pieces: list[tuple[int, int]]) -> None:
    host = HostTime(step_ns=1_000, row_ns=10)
    free = CostOptions(host=host, graphs=EXACT, factors=dict.fromkeys(KERNELS, 0.0))
    step = shape(rows, pieces)
    assert cost(options=free).step_ns(step) == 1_000 + 10 * (len(rows) + len(pieces))


@settings(max_examples=40, deadline=None)
@given(contexts, chunks, st.booleans(), st.integers(1, 8))
def test_step_ns_is_the_sum_of_its_parts(
    rows: list[int], pieces: list[tuple[int, int]], overlap: bool, each: int
) -> None:
    options = CostOptions(host=HostTime(overlap=overlap), drafter=load_drafter("eagle3-gqa-m3", 3))
    model, step = cost(options=options), shape(rows, pieces, each)
    parts = model.breakdown(step)
    assert all(isinstance(value, int) and value >= 0 for value in parts.ns)
    whole = max(parts.device_ns, parts.host_ns) if overlap else parts.device_ns + parts.host_ns
    assert model.step_ns(step) == parts.step_ns == whole
    assert model.step_ns(step) == model.step_ns(step), "what is kept changes nothing"


def test_a_mixed_step_is_one_set_of_products_not_two_steps() -> None:
    model = cost()
    rows, piece = [100_000] * 24, [(100_000, 500)]
    apart = model.step_ns(shape(rows, [])) + model.step_ns(shape([], piece))
    assert model.step_ns(shape(rows, piece)) < 0.85 * apart


def test_padding_to_captured_sizes_is_a_staircase() -> None:
    model = cost(options=CostOptions(host=NO_HOST, graphs=Graphs(sizes=(8, 16, 32), launch_ns=0)))

    def matrices(rows: int) -> int:
        parts = model.breakdown(shape([100] * rows, [])).by_kernel()
        return parts["projections"] + parts["experts"] + parts["collectives"]

    assert matrices(9) == matrices(16) < matrices(17) == matrices(32)
    assert matrices(33) < matrices(40), "beyond the largest size nothing is padded"


def test_beyond_captured_sizes_launches_cost_host_time() -> None:
    model = cost(options=CostOptions(graphs=Graphs(sizes=(8,), launches_per_layer=10, launch_ns=1_000)))
    assert model.breakdown(shape([100] * 8, [])).host_ns == 100_000 + 8 * 3_000
    assert model.breakdown(shape([100] * 9, [])).host_ns == 100_000 + 9 * 3_000 + 60 * 10 * 1_000


def test_what_if_scales_one_kernel_alone() -> None:
    step = shape([100_000] * 24, [])
    before = cost().breakdown(step).by_kernel()
    options = CostOptions(host=NO_HOST, graphs=EXACT, factors={"experts": 1 / 1.2})
    after = cost(options=options).breakdown(step).by_kernel()
    assert after["experts"] == pytest.approx(before["experts"] / 1.2, abs=1)
    assert {**after, "experts": 0} == {**before, "experts": 0}


def test_locality_domains_help_where_published() -> None:
    step = shape([100_000] * 24, [])
    on, off = (
        cost("vr-nvl72", layout="tp2", options=CostOptions(host=NO_HOST, graphs=EXACT, locality=locality))
        .breakdown(step)
        .by_kernel()["experts"]
        for locality in (True, False)
    )
    assert 1.05 < off / on < 1.25


# --- speculation -----------------------------------------------------------------------------------------------------


def test_verifying_reads_index_keys_once_but_chosen_blocks_for_each_token() -> None:
    one, four = (cost().breakdown(shape([100_000] * 4, [], each)).by_kernel() for each in (1, 4))
    assert four["index_scan"] == one["index_scan"]
    assert four["sparse_attend"] == pytest.approx(4 * one["sparse_attend"], rel=2e-5)
    assert one["experts"] < four["experts"] < 4 * one["experts"]


def test_tokens_of_one_row_may_share_experts() -> None:
    step = shape([100_000] * 4, [], 4)
    apart, shared = (
        cost(options=CostOptions(host=NO_HOST, graphs=EXACT, expert_factor_tokens=gamma)).breakdown(step).by_kernel()
        for gamma in (1.0, 0.5)
    )
    assert shared["experts"] < apart["experts"]
    assert {**shared, "experts": 0} == {**apart, "experts": 0}


def test_drafting_costs_a_pass_a_draft_unless_the_drafter_is_a_block() -> None:
    step = shape([100_000] * 4, [], 4)

    def draft(name: str, drafts: int) -> int:
        options = CostOptions(host=NO_HOST, graphs=EXACT, drafter=load_drafter(name, drafts))
        return cost(model="m3.1-flash", options=options).breakdown(step).by_kernel()["draft"]

    assert draft("eagle3-gqa-m3", 3) == pytest.approx(3 * draft("eagle3-gqa-m3", 1), abs=3)
    assert draft("dspark-m3.1-flash", 7) < 1.3 * draft("dspark-m3.1-flash", 1)
    assert cost().breakdown(step).by_kernel()["draft"] == 0


# --- formats and errors ----------------------------------------------------------------------------------------------


def test_smaller_formats_are_never_slower_in_what_they_shrink() -> None:
    step = shape([100_000] * 24, [])
    bf16, eight, four, kv4 = (
        cost("gb300", formats=name).breakdown(step).by_kernel() for name in ("bf16", "mxfp8", "nvfp4", "nvfp4-kv4")
    )
    assert bf16["projections"] > eight["projections"] == four["projections"]
    assert bf16["experts"] > eight["experts"]
    assert four["index_scan"] == pytest.approx(eight["index_scan"] / 2, rel=2e-5), "an FP8 index against a BF16 one"
    assert kv4["sparse_attend"] == pytest.approx(0.5625 * four["sparse_attend"], rel=2e-5)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"platform": "h200", "formats": "nvfp4"}, r"h200: kernel family vllm-0.24 has no experts 'nvfp4'"),
        ({"layout": "tp128"}, r"scale-up domain has 72"),
        ({"layout": "tp3"}, r"64 heads cannot be split 3 ways"),
        ({"layout": "dep24"}, r"128 experts cannot be spread over 24"),
        ({"layout": "four"}, r"unknown layout 'four'"),
        ({"formats": "int3"}, r"unknown formats 'int3'"),
        ({"model": "m9"}, r"unknown model 'm9'"),
    ],
)
def test_what_cannot_be_modelled_is_one_line(arguments: dict[str, str], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        cost(**arguments)  # type: ignore[arg-type]


def test_an_unknown_kernel_in_a_what_if_is_named() -> None:
    with pytest.raises(ConfigError, match="unknown kernel 'moe'"):
        CostOptions(factors={"moe": 0.5})


def test_an_empty_step_costs_the_host_alone() -> None:
    model = cost(options=CostOptions())
    assert model.step_ns(StepShape()) == model.options.host.step_ns
    assert dataclasses.astuple(model.breakdown(StepShape()))[0] == (0,) * len(KERNELS)


def test_a_dense_model_streams_its_weights_and_keys() -> None:
    built = cost("h200", "llama-3.1-8b", "tp1", "bf16")
    one = built.breakdown(step_shape([1], attend_limit=0)).by_kernel()
    assert one["experts"] == one["router"] == one["index_scan"] == one["sparse_attend"] == one["collectives"] == 0
    # 6.98 billion weights of layers beside the attention's projections and the head, at 4.8 TB/s at most.
    assert one["projections"] + one["dense_ffn"] > (1.34e9 + 5.64e9) * 2 / 4.8e12 * 1e9
    near, far = (built.breakdown(step_shape([context] * 8, attend_limit=0)) for context in (1000, 101_000))
    read = 8 * 100_000 * 32 * 2 * 8 * 128 * 2
    assert far.device_ns - near.device_ns == pytest.approx(read / (0.8 * 4.8e12) * 1e9, rel=1e-6)
    with pytest.raises(ConfigError, match="has no experts to spread"):
        cost("h200", "llama-3.1-8b", "ep2", "bf16")
    with pytest.raises(ConfigError, match="feed-forward 14344 wide"):
        check_layout(parse_layout("tp16"), dataclasses.replace(load_shape("llama-3.1-8b"), dense_ffn=14336 + 8), 16)
