"""Constants of steps with chunks from whole steps: for a user's own card, whose kernels nobody has timed one by one.

A handful of prompts and turns cannot tell all kernels apart. What they can show is fitted: a layer's fixed time, and
how fast index scores, attention and experts compute. The rest stays as in the family that lends it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longturn.errors import ConfigError
from longturn.simulate.calibration import KernelFamily, Residual
from longturn.simulate.cost.step import StepShape
from longturn.simulate.fit.solver import Array, solve
from longturn.simulate.fit.trial import Trial, with_constants
from longturn.simulate.formats import Formats
from longturn.simulate.layout import Layout
from longturn.simulate.platform import Platform
from longturn.simulate.published import steps_ns
from longturn.simulate.shapes import ModelShape

FEWEST_CHUNKS = 4


@dataclass(frozen=True, slots=True)
class MeasuredChunks:
    """Steps with chunks that followed each other, a prompt's or a single one, and how long they took together."""

    shape: ModelShape
    layout: Layout
    steps: tuple[StepShape, ...]
    ns: float


def fit_chunks(
    platform: Platform, family: KernelFamily, formats: Formats, measured: Sequence[MeasuredChunks], note: str
) -> KernelFamily:
    """`family` with chunks that come closest to those measured.

    Raises:
        ConfigError: there are too few.
    """
    if len(measured) < FEWEST_CHUNKS:
        raise ConfigError(
            f"fitting chunks needs at least {FEWEST_CHUNKS} measured turns, mixed steps and prompts, "
            f"not {len(measured)}"
        )
    key = f"{formats.attention}-{formats.cache}"
    attention, experts = family.attention[key], family.experts[formats.experts]

    def trial(x: Array, residual: Residual) -> KernelFamily:
        fixed, index, attend, compute = (float(f"{value:.6g}") for value in x)
        made = dataclasses.replace(
            attention,
            note=note,
            prefill_fixed_ns=attention.prefill_fixed_ns * fixed,
            index_compute=_part(attention.index_compute, index),
            attend_compute=_part(attention.attend_compute, attend),
            prefill=residual,
        )
        fed = dataclasses.replace(experts, note=note, compute=_part(experts.compute, compute), tables=residual)
        return with_constants(family, formats, made, fed)

    nothing = Residual(0.0, 0.0, 0)

    def predict(x: Array) -> Array:
        models = Trial(platform, trial(x, nothing), formats)
        return np.array([steps_ns(models.cost(one.shape, one.layout), one.steps)[0] for one in measured])

    solution = solve(predict, (1.0, 1.0, 1.0, 1.0), np.array([one.ns for one in measured]))
    return trial(solution.constants, solution.residual())


def _part(value: float, factor: float) -> float:
    """A part of a peak, multiplied and held below the peak."""
    return 1.0 / (1.0 + (1.0 / value - 1.0) / factor)
