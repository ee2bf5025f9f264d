"""Constants from whole decode steps that were measured: for kernels that no table covers, or a user's own card.

A dozen steps cannot tell all constants apart. What they can show is fitted: the fixed time of an attention layer and of
an expert layer, how fast projections, experts and index keys stream, and what a row costs beside bytes. The rest stays
as in a family of the same platform.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from longturn.errors import ConfigError
from longturn.simulate.calibration import KernelFamily, Residual
from longturn.simulate.cost.step import StepShape, step_shape
from longturn.simulate.fit.solver import Array, solve
from longturn.simulate.fit.trial import Trial
from longturn.simulate.formats import Formats
from longturn.simulate.layout import Layout, parse_layout
from longturn.simulate.platform import Platform
from longturn.simulate.published_data import Group
from longturn.simulate.shapes import ModelShape, load_shape

FEWEST_STEPS = 6


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step and how long the device took."""

    shape: ModelShape
    layout: Layout
    step: StepShape
    ns: float
    lone_kernel: bool = True
    """Whether a step of few rows ran by the one launch for all layers, where the model fits it."""


def steps_of(group: Group) -> list[MeasuredStep]:
    """The points of a group of kind "decode", or "chain", whose steps of few rows have no launch of their own."""
    shape, layout = load_shape(group.text("model")), parse_layout(group.text("layout"))
    rows = zip(group.numbers("batch"), group.numbers("context"), group.numbers("value"), strict=True)
    return [
        MeasuredStep(
            shape,
            layout,
            step_shape([int(context)] * int(batch), attend_limit=shape.attend_limit),
            value * 1e6,
            group.kind != "chain",
        )
        for batch, context, value in rows
    ]


def fit_measured(
    platform: Platform, base: KernelFamily, name: str, formats: Formats, steps: Sequence[MeasuredStep], source: str,
    date: str, small_kernel_ns: float,
) -> KernelFamily:  # fmt: skip
    """A kernel family whose decode steps come closest to those measured; `base` lends what they cannot show.

    Raises:
        ConfigError: there are too few steps, or `base` has no constants for `formats`.
    """
    if len(steps) < FEWEST_STEPS:
        raise ConfigError(f"fitting needs at least {FEWEST_STEPS} measured steps, not {len(steps)}")
    key = f"{formats.attention}-{formats.cache}"
    if key not in base.attention or formats.experts not in base.experts:
        raise ConfigError(f"kernel family {base.name} has no constants for {key} and experts {formats.experts}")
    attention, experts = base.attention[key], base.experts[formats.experts]
    # Without steps of few rows by the chain of kernels the one launch keeps its distance from it.
    lone = attention.lone_hidden > 0 and not all(step.lone_kernel for step in steps)
    few = lone and attention.lone_rows > 1
    note = f"{len(steps)} measured decode steps; chunks and chosen blocks as in {base.name}"

    def family(x: Array, decode: Residual) -> KernelFamily:
        fixed = float(x[0]) / attention.decode_fixed_ns
        scan = _share(float(x[5])) / attention.index_stream
        return KernelFamily(
            name=name,
            source=source,
            date=date,
            small_kernel_ns=small_kernel_ns,
            gemm_note=base.gemm_note,
            attention=MappingProxyType(
                {
                    key: dataclasses.replace(
                        attention,
                        basis="measured",
                        note=note,
                        decode_fixed_ns=float(x[0]),
                        weight_stream=_share(float(x[1])),
                        decode_token_ns=float(x[2]),
                        index_stream=_share(float(x[5])),
                        lone_fixed_ns=float(x[6]) if lone else attention.lone_fixed_ns * fixed,
                        lone_index_stream=_share(float(x[7])) if lone else attention.lone_index_stream * scan,
                        few_fixed_ns=float(x[8]) if few else attention.few_fixed_ns * fixed,
                        few_index_stream=_share(float(x[9])) if few else attention.few_index_stream * scan,
                        decode=decode,
                    )
                }
            ),
            experts=MappingProxyType(
                {
                    formats.experts: dataclasses.replace(
                        experts,
                        basis="measured",
                        note=note,
                        fixed_ns=float(x[3]),
                        stream=_share(float(x[4])),
                        stream_exponent=1.0,
                        uneven_tables=decode,
                    )
                }
            ),
            all_reduce=base.all_reduce,
            all_to_all=base.all_to_all,
            chunk_sizes=base.chunk_sizes,
        )

    nothing = Residual(0.0, 0.0, 0)

    def predict(x: Array) -> Array:
        return steps_predicted(platform, family(x, nothing), formats, steps)

    start = [15e3, 2.0, 300.0, 8e3, 2.0, 4.0, *((5e3, 4.0) if lone else ()), *((5e3, 4.0) if few else ())]
    solution = solve(predict, start, np.array([measured.ns for measured in steps]))
    return family(np.array([float(f"{value:.4g}") for value in solution.constants]), solution.residual())


def steps_predicted(platform: Platform, family: KernelFamily, formats: Formats, steps: Sequence[MeasuredStep]) -> Array:
    """What a family says of each step, nanoseconds."""
    whole, chain = (Trial(platform, one, formats) for one in (family, _without_lone_kernel(family)))
    costs = [(whole if step.lone_kernel else chain).cost(step.shape, step.layout) for step in steps]
    return np.array([cost.breakdown(step.step).device_ns for cost, step in zip(costs, steps, strict=True)], float)


def _without_lone_kernel(family: KernelFamily) -> KernelFamily:
    attention = {key: dataclasses.replace(one, lone_hidden=0) for key, one in family.attention.items()}
    return dataclasses.replace(family, attention=MappingProxyType(attention))


def _share(value: float) -> float:
    """A positive number, mapped below 1: no kernel streams faster than the memory."""
    return value / (1.0 + value)
