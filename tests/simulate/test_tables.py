"""The whole model against rows of the measured tables: what is added up for a step is what one module took."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from longturn.simulate.cost.options import CostOptions
from longturn.simulate.cost.routing import BALANCED
from longturn.simulate.cost.step import StepShape, step_shape
from longturn.simulate.fit.tables import Columns, read_table
from tests.simulate.helpers import EXACT, NO_HOST, cost

TABLES = Path(__file__).parents[3] / "shared" / "calibration"
ATTENTION = ("projections", "attention_fixed", "index_scan", "sparse_attend")


@functools.cache
def table(name: str) -> Columns:
    pytest.importorskip("pyarrow")
    found = read_table(TABLES, name) if TABLES.is_dir() else None
    if found is None:
        pytest.skip("no kernel tables beside the repository")
    return found


def errors(pairs: Iterator[tuple[float, float]]) -> np.ndarray:
    return np.array([predicted / measured - 1 for predicted, measured in pairs])


@pytest.mark.parametrize(
    ("platform", "prefix", "layout", "heads"),
    [("h200", "h200_sxm", "tp8", 8), ("b200", "b200_sxm", "tp4", 16), ("b300", "b300_sxm", "tp2", 32),
     ("gb300", "gb300", "tp4", 16), ("gb200", "gb200", "dep4", 64)],
)  # fmt: skip
def test_an_attention_layer_of_a_decode_step(platform: str, prefix: str, layout: str, heads: int) -> None:
    """MXFP8 projections and an FP8 cache with a BF16 index: the tables' block-FP8 rows. Every layer sparse."""
    rows = table(f"{prefix}_msa_generation_module_perf")
    model = cost(platform, "m3.1-flash", layout, "mxfp8")
    chosen = (rows["gemm_type"] == "fp8_block") & (rows["kv_cache_dtype"] == "fp8") & (rows["num_heads"] == heads)
    chosen &= (rows["step"] >= 1023) & (rows["batch_size"] <= 256)

    def compare() -> Iterator[tuple[float, float]]:
        for i in np.flatnonzero(chosen):
            batch, context = int(rows["batch_size"][i]), int(rows["step"][i]) + 1
            parts = model.breakdown(step_shape([context] * batch, attend_limit=2048)).by_kernel()
            yield sum(parts[name] for name in ATTENTION) / 60, float(rows["latency"][i]) * 1e6

    found = errors(compare())
    assert len(found) > 50
    assert np.abs(found).mean() < 0.06
    assert np.abs(found).max() < 0.30


def test_an_attention_layer_of_a_chunk() -> None:
    rows = table("h200_sxm_msa_context_module_perf")
    model = cost("h200", "m3-slice8", "tp1", "bf16")
    chosen = (rows["gemm_type"] == "bfloat16") & (rows["kv_cache_dtype"] == "bfloat16") & (rows["num_heads"] == 64)
    chosen &= (rows["batch_size"] == 1) & (rows["isl"] >= 128)

    def compare() -> Iterator[tuple[float, float]]:
        for i in np.flatnonzero(chosen):
            step = StepShape(chunks=((int(rows["step"][i]), int(rows["isl"][i])),))
            parts = model.breakdown(step).by_kernel()
            yield sum(parts[name] for name in ATTENTION) / 8, float(rows["latency"][i]) * 1e6

    assert np.abs(errors(compare())).mean() < 0.05


@pytest.mark.parametrize(
    ("platform", "prefix", "layout", "ways"), [("gb300", "gb300", "tp4", 4), ("b200", "b200_sxm", "tp8", 8)]
)
@pytest.mark.parametrize("distribution", ["balanced", "power_law_1.01"])
def test_an_expert_layer(platform: str, prefix: str, layout: str, ways: int, distribution: str) -> None:
    rows = table(f"{prefix}_moe")
    routing = {"routing": BALANCED} if distribution == "balanced" else {}
    model = cost(platform, "m3", layout, "nvfp4", CostOptions(host=NO_HOST, graphs=EXACT, **routing))
    chosen = (rows["moe_dtype"] == "nvfp4") & (np.char.find(rows["kernel_source"], "cutlass") >= 0)
    chosen &= (rows["hidden_size"] == 6144) & (rows["inter_size"] == 3072) & (rows["topk"] == 4)
    chosen &= (rows["moe_tp_size"] == ways) & (rows["moe_ep_size"] == 1) & (rows["distribution"] == distribution)

    def compare() -> Iterator[tuple[float, float]]:
        for i in np.flatnonzero(chosen):
            parts = model.breakdown(StepShape(chunks=((0, int(rows["num_tokens"][i])),))).by_kernel()
            yield parts["experts"] / 57, float(rows["latency"][i]) * 1e6

    found = errors(compare())
    assert len(found) == 27
    assert np.median(np.abs(found)) < 0.10
