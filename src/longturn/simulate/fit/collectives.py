"""Measured times of collectives, as knots to interpolate between.

An engine picks the faster of its own all-reduce (captured in a graph) and NCCL's for each size, so the knots do too.
Sizes in the tables count elements of two bytes.
"""

from __future__ import annotations

from longturn.simulate.calibration import CollectiveConstants, Knots
from longturn.simulate.fit.tables import Columns
from longturn.simulate.platform import Platform

_ELEMENT_BYTES = 2
_SIZES = tuple(1 << power for power in range(10, 28))
"""Elements: messages of 2 KiB to 256 MiB."""


def fit_all_reduce(platform: Platform, custom: Columns, nccl: Columns) -> CollectiveConstants:
    """The faster of vLLM's graph-captured custom all-reduce and NCCL's, by ranks and size."""
    return _knots(
        platform,
        "vLLM's custom all-reduce in a graph, or NCCL's where that is faster",
        (custom, "vLLM_custom_graph", "all_reduce"),
        (nccl, "NCCL", "all_reduce"),
    )


def fit_all_to_all(platform: Platform, nccl: Columns) -> CollectiveConstants:
    """NCCL's all-to-all, by ranks and size."""
    return _knots(platform, "NCCL's all-to-all", (nccl, "NCCL", "alltoall"))


def _knots(platform: Platform, note: str, *sources: tuple[Columns, str, str]) -> CollectiveConstants:
    best: dict[int, dict[int, float]] = {}
    for table, kernel, operation in sources:
        types = table.get("nccl_dtype", table.get("allreduce_dtype"))
        assert types is not None
        for kind, name, number_type, ranks, size, latency in zip(
            table["kernel_source"], table["op_name"], types, table["num_gpus"], table["message_size"],
            table["latency"], strict=True,
        ):  # fmt: skip
            if kind == kernel and name == operation and number_type in ("half", "bfloat16") and int(size) in _SIZES:
                times = best.setdefault(int(ranks), {})
                times[int(size)] = min(times.get(int(size), float("inf")), float(latency) * 1e6)
    ranks_knots = {
        ranks: Knots(
            tuple(size * _ELEMENT_BYTES for size in sorted(times)), tuple(round(times[size]) for size in sorted(times))
        )
        for ranks, times in sorted(best.items())
    }
    return CollectiveConstants("tables", note, platform.value("link_bandwidth"), ranks_knots)
