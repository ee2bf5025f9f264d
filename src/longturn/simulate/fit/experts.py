"""Constants of routed experts, from the tables of one mixture-of-experts layer.

Only rows with balanced routing and no expert parallelism are fitted: there the distinct experts are known. The rows
with power-law routing then fix what unequal experts cost (`fit_uneven`), and the rows with expert parallelism, which no
constant comes from, say how well the slowest rank is predicted (`judge_expert_parallel`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longturn.simulate.calibration import Basis, ExpertConstants, Residual
from longturn.simulate.cost.formulas import experts_ns
from longturn.simulate.cost.routing import REFERENCE_SPREAD, Routing, RoutingTable
from longturn.simulate.fit.solver import Array, residual_of, solve
from longturn.simulate.fit.tables import Columns, numbers
from longturn.simulate.formats import WEIGHT_BYTES
from longturn.simulate.platform import Platform, WeightRate

_FEWEST_ROWS = 20
_GROUPED = 7168, 256
"""Hidden size and experts of the one shape that routes by groups of experts (DeepSeek-V3's), inside the kernel: how
many distinct experts its balanced rows touch is not known; they are a quarter faster than any other shape's."""
_SHARPEST = 8.0
"""Beyond it `smooth_max` is the maximum within a hundredth nearly everywhere."""
_SPREADS = (1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 14.0, 20.0, 28.0, 40.0, 60.0)


@dataclass(frozen=True, slots=True)
class Kernel:
    """Which rows of the tables stand for one weight format."""

    format: str
    """As in `ExpertConstants` tables: bf16, mxfp8, nvfp4."""
    table_format: str
    source: str
    """Part of the kernel's name in the tables."""
    rate: WeightRate
    table_bytes: float
    """Bytes of a weight in those rows."""
    m3_only: bool
    """The tables have MiniMax-M3's own shape; else all shapes with hidden sizes of at least 4,096 are taken."""
    note: str


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Rows as the formula takes them: at the platform's peaks."""

    stream_ns: Array
    compute_ns: Array
    activation_elements: Array
    ns: Array

    def fit(
        self, bandwidth_bytes_ns: float, basis: Basis, note: str, rate: WeightRate, exponent: float | None
    ) -> ExpertConstants:
        """Constants for these rows; `exponent` fixes `stream_exponent` where the rows cannot show it."""

        def predict(x: Array) -> Array:
            return experts_ns(
                self.stream_ns,
                self.compute_ns,
                self.activation_elements * x[4] / bandwidth_bytes_ns,
                fixed_ns=float(x[0]),
                stream=float(x[1]),
                stream_exponent=float(x[5]) if exponent is None else exponent,
                compute=float(x[2]),
                sharpness=_sharpness(float(x[3])),
            )

        start = [40e3, 0.7, 0.4, 1.0, 10.0] + ([0.95] if exponent is None else [])
        solution = solve(predict, start, self.ns)
        x = [float(f"{value:.4g}") for value in solution.constants]
        return ExpertConstants(
            basis=basis,
            note=note,
            rate=rate,
            fixed_ns=x[0],
            stream=x[1],
            stream_exponent=x[5] if exponent is None else exponent,
            compute=x[2],
            activation_bytes=x[4],
            sharpness=round(_sharpness(x[3]), 4),
            uneven=0.0,
            tables=solution.residual(),
            uneven_tables=Residual(0.0, 0.0, 0),
        )


def fit_experts(platform: Platform, table: Columns, kernel: Kernel) -> ExpertConstants | None:
    """Constants of one kernel; None if the table has too few rows of it."""
    chosen = _select(table, kernel) & (table["distribution"] == "balanced") & (table["moe_ep_size"] == 1)
    if int(chosen.sum()) < _FEWEST_ROWS:
        return None

    def distinct(tokens: Array, experts: Array, top: Array) -> Array:
        return np.minimum(experts, tokens * top)

    rows = _rows(platform, table, chosen, kernel, distinct)
    return rows.fit(platform.value("hbm_bandwidth") / 1e9, "tables", kernel.note, kernel.rate, None)


def fit_uneven(platform: Platform, table: Columns, kernel: Kernel, constants: ExpertConstants) -> ExpertConstants:
    """The same constants with `uneven`, from rows with power-law routing."""
    rows = _power_law_rows(platform, table, kernel, REFERENCE_SPREAD)

    def predict(x: Array) -> Array:
        return _predict(platform, rows, dataclasses.replace(constants, uneven=float(x[0])))

    solution = solve(predict, [0.2], rows.ns)
    uneven = float(f"{solution.constants[0]:.4g}")
    return dataclasses.replace(constants, uneven=uneven, uneven_tables=solution.residual())


def best_spread(
    platform: Platform, table: Columns, kernel: Kernel, constants: ExpertConstants
) -> tuple[float, Residual]:
    """The spread of popularity with which power-law rows come out best, and how well they then do: what the default
    of `Routing` rests on."""
    found = []
    for spread in _SPREADS:
        uneven = constants.uneven * Routing(spread).unevenness
        rows = _power_law_rows(platform, table, kernel, spread)
        predicted = _predict(platform, rows, dataclasses.replace(constants, uneven=uneven))
        found.append((residual_of(np.log(predicted / rows.ns)), spread))
    residual, spread = min(found, key=lambda pair: pair[0].rms)
    return spread, residual


def _power_law_rows(platform: Platform, table: Columns, kernel: Kernel, spread: float) -> ExpertRows:
    chosen = _select(table, kernel) & (table["distribution"] == "power_law_1.01") & (table["moe_ep_size"] == 1)
    made: dict[tuple[int, int], RoutingTable] = {}

    def distinct(tokens: Array, experts: Array, top: Array) -> Array:
        counts = []
        for number, total, each in zip(tokens, experts, top, strict=True):
            key = int(total), int(each)
            table = made.setdefault(key, RoutingTable(*key, 1, Routing(spread)))
            counts.append(table.slowest(int(number)).experts)
        return np.array(counts)

    return _rows(platform, table, chosen, kernel, distinct)


def judge_expert_parallel(
    platform: Platform, table: Columns, kernel: Kernel, constants: ExpertConstants, ranks: int
) -> Residual:
    """How well the slowest rank of expert-parallel power-law rows is predicted; nothing is fitted here."""
    chosen = _select(table, kernel) & (table["distribution"] == "power_law_1.01")
    chosen &= (table["moe_ep_size"] == ranks) & (table["moe_tp_size"] == 1)
    if not chosen.any():
        return Residual(0.0, 0.0, 0)
    routing = RoutingTable(128, 4, ranks, Routing())
    tokens = numbers(table, "num_tokens", chosen)
    loads = [routing.slowest(int(count)) for count in tokens]
    rows = _rows(platform, table, chosen, kernel, lambda *_: np.array([load.experts for load in loads]))
    share = np.array([load.choices for load in loads]) / (tokens * 4)
    sharded = ExpertRows(rows.stream_ns, rows.compute_ns * share, rows.activation_elements * share, rows.ns)
    return residual_of(np.log(_predict(platform, sharded, constants) / rows.ns))


def _predict(platform: Platform, rows: ExpertRows, constants: ExpertConstants) -> Array:
    return experts_ns(
        rows.stream_ns,
        rows.compute_ns,
        rows.activation_elements * constants.activation_bytes / (platform.value("hbm_bandwidth") / 1e9),
        fixed_ns=constants.fixed_ns,
        stream=constants.stream,
        stream_exponent=constants.stream_exponent,
        compute=constants.compute,
        sharpness=constants.sharpness,
        uneven=constants.uneven,
    )


def _sharpness(value: float) -> float:
    """A positive number, mapped to between 1 and `_SHARPEST`."""
    return 1.0 + value / (1.0 + value / (_SHARPEST - 1.0))


def _select(table: Columns, kernel: Kernel) -> NDArray[np.bool_]:
    chosen: NDArray[np.bool_] = table["moe_dtype"] == kernel.table_format
    chosen = chosen & (np.char.find(table["kernel_source"], kernel.source) >= 0)
    if kernel.m3_only:
        chosen = chosen & (table["hidden_size"] == 6144) & (table["inter_size"] == 3072)
        chosen = chosen & (table["num_experts"] == 128) & (table["topk"] == 4) & (table["moe_tp_size"] <= 8)
    else:
        chosen = chosen & (table["hidden_size"] >= 4096) & (table["num_experts"] >= 64)
        chosen = chosen & (table["inter_size"] // table["moe_tp_size"] >= 256) & (table["moe_tp_size"] <= 8)
        chosen = chosen & ~((table["hidden_size"] == _GROUPED[0]) & (table["num_experts"] == _GROUPED[1]))
    return chosen


def _rows(
    platform: Platform,
    table: Columns,
    chosen: NDArray[np.bool_],
    kernel: Kernel,
    distinct: Callable[[Array, Array, Array], Array],
) -> ExpertRows:
    hidden, width, top, experts, ways, tokens, latency = (
        numbers(table, column, chosen)
        for column in ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "num_tokens", "latency")
    )
    elements = 3.0 * hidden * width / ways
    choices = tokens * top
    return ExpertRows(
        stream_ns=distinct(tokens, experts, top)
        * elements
        * kernel.table_bytes
        / platform.value("hbm_bandwidth")
        * 1e9,
        compute_ns=2.0 * choices * elements / platform.flops(kernel.rate) * 1e9,
        activation_elements=choices * hidden,
        ns=latency * 1e6,
    )


HOPPER_KERNELS = (
    Kernel("bf16", "bfloat16", "triton", "bf16", WEIGHT_BYTES["bf16"], True, "Triton, MiniMax-M3's shape"),
    Kernel(
        "mxfp8",
        "int4_wo",
        "marlin",
        "bf16",
        0.53125,
        False,
        "Marlin, 4-bit rows of another shape (7168 wide, 384 experts); M3's MXFP8 rows are not in the tables",
    ),
)
BLACKWELL_KERNELS = (
    Kernel("bf16", "bfloat16", "cutlass", "bf16", WEIGHT_BYTES["bf16"], True, "CUTLASS, MiniMax-M3's shape"),
    Kernel("nvfp4", "nvfp4", "cutlass", "nvfp4", WEIGHT_BYTES["nvfp4"], True, "CUTLASS, MiniMax-M3's shape"),
    Kernel(
        "mxfp8",
        "fp8_block",
        "trtllm",
        "fp8",
        WEIGHT_BYTES["fp8"],
        False,
        "TensorRT-LLM generator, block FP8 rows of other shapes; M3's MXFP8 rows are not in the tables",
    ),
)
TRTLLM_KERNELS = (
    BLACKWELL_KERNELS[0],
    Kernel(
        "nvfp4",
        "nvfp4",
        "trtllm",
        "nvfp4",
        WEIGHT_BYTES["nvfp4"],
        False,
        "TensorRT-LLM generator, rows of other shapes; M3's are not in the tables",
    ),
    BLACKWELL_KERNELS[2],
)
