"""Constants of steps with chunks, from kernels of single layers that were measured.

A layer's kernels say apart what whole steps only say together: scoring, choosing blocks, attention over them,
projections, and all that follows attention. The whole layer says what is left as a fixed time and one for each token.
Constants that decode steps show (how fast weights stream) are not touched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from longturn.errors import ConfigError
from longturn.simulate.calibration import KernelFamily, Residual
from longturn.simulate.cost.model import StepCost
from longturn.simulate.cost.step import StepShape, step_shape
from longturn.simulate.fit.solver import Array, solve
from longturn.simulate.fit.trial import Trial, with_constants
from longturn.simulate.formats import Formats
from longturn.simulate.layout import Layout, parse_layout
from longturn.simulate.platform import Platform
from longturn.simulate.published_data import Group
from longturn.simulate.shapes import ModelShape, load_shape

PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "scores": ("index_scan",),
        "select": ("block_select",),
        "attend": ("sparse_attend",),
        "projections": ("projections",),
        "feed_forward": ("router", "experts", "shared_expert", "norms"),
    }
)
"""Columns of a "layer" group, and the kernels of the cost model that each holds. Column `layer` is all of them and
`attention_fixed`."""
COLUMNS = (*PARTS, "layer")
_ROWS = (*PARTS, *("layer" for _ in PARTS))
"""A layer counts as much as its kernels together, which were timed without overlap."""
FEWEST_LAYERS = 6
_LAYERS = 1000
_ACTIVATION_BYTES = 4.0
"""A BF16 element of each chosen expert's answer written, and read again for their sum: 3.9 by the time of that sum."""
_START = (10e3, 1.0, 1.0, 0.004, 0.4, 0.8, 2.0, 10.0, 1.0, 1.0, 5e3, 5e3, 5e3, 5e3, 5e3, 5.0)
_SHARED = 10
"""From here on, constants that only tell columns apart: nanoseconds of each of `PARTS` beside all that grows, and
of `select` for each token. The cost model has them in a layer's fixed time and in its time for
a token."""


@dataclass(frozen=True, slots=True)
class MeasuredLayer:
    """Kernels of the last layer of one step; it has experts and chosen blocks."""

    shape: ModelShape
    """See `like_layers`."""
    layout: Layout
    step: StepShape
    ns: Mapping[str, float]
    """By `COLUMNS`, those that were timed."""


def like_layers(shape: ModelShape) -> ModelShape:
    """The model with layers that all have experts and chosen blocks, a thousand of them, since the cost model rounds a
    step's kernels to nanoseconds. Raises ConfigError if it has no such layer."""
    if not shape.sparse_layers or not shape.moe_layers:
        raise ConfigError(f"model {shape.name}: no layer has both experts and chosen blocks")
    return dataclasses.replace(shape, layers=_LAYERS, sparse_layers=_LAYERS, moe_layers=_LAYERS)


def layers_of(group: Group) -> list[MeasuredLayer]:
    """The points of a "layer" group; a 0 was not timed."""
    shape, layout = like_layers(load_shape(group.text("model"))), parse_layout(group.text("layout"))
    columns = [group.numbers(name) for name in COLUMNS]
    sizes = zip(group.numbers("batch"), group.numbers("context"), group.numbers("new"), *columns, strict=True)
    found = []
    for rows, context, new, *micros in sizes:
        step = step_shape([int(context)] * int(rows), [(int(context), int(new))], attend_limit=shape.attend_limit)
        timed = {name: value * 1e3 for name, value in zip(COLUMNS, micros, strict=True) if value > 0}
        ns = MappingProxyType(timed)
        found.append(MeasuredLayer(shape, layout, step, ns))
    return found


def predicted_ns(cost: StepCost, step: StepShape) -> dict[str, float]:
    """Nanoseconds of each of `COLUMNS`, of one layer of a model that `like_layers` made."""
    kernels = cost.breakdown(step).by_kernel()
    found = {name: sum(kernels[one] for one in ones) / _LAYERS for name, ones in PARTS.items()}
    return {**found, "layer": sum(found.values()) + kernels["attention_fixed"] / _LAYERS}


def layer_predicted(platform: Platform, family: KernelFamily, formats: Formats, layer: MeasuredLayer) -> float:
    """What a family says of a whole layer, nanoseconds."""
    return predicted_ns(Trial(platform, family, formats).cost(layer.shape, layer.layout), layer.step)["layer"]


def fit_layers(
    platform: Platform, family: KernelFamily, formats: Formats, layers: Sequence[MeasuredLayer], note: str
) -> KernelFamily:
    """`family` with constants of chunks that come closest to the layers measured.

    Raises:
        ConfigError: there are too few layers.
    """
    if len(layers) < FEWEST_LAYERS:
        raise ConfigError(f"fitting chunks needs at least {FEWEST_LAYERS} measured layers, not {len(layers)}")
    key = f"{formats.attention}-{formats.cache}"
    attention, experts = family.attention[key], family.experts[formats.experts]

    def trial(x: Array, residual: Residual) -> KernelFamily:
        values = [float(value) for value in x[:_SHARED]]
        *fixed, token = (float(value) for value in x[_SHARED:])
        made = dataclasses.replace(
            attention,
            note=note,
            prefill_fixed_ns=values[0] + sum(fixed),
            compute=_share(values[1]),
            index_compute=_share(values[2]),
            select_ns=values[3],
            attend_compute=values[4],
            chunk_stream=values[5],
            part_bytes=values[6],
            prefill_token_ns=values[7] + token,
            prefill=residual,
        )
        fed = dataclasses.replace(
            experts, note=note, compute=_share(values[8]), activation_bytes=_ACTIVATION_BYTES,
            sharpness=1.0 + values[9], tables=residual,
        )  # fmt: skip
        return with_constants(family, formats, made, fed)

    nothing = Residual(0.0, 0.0, 0)

    def predict(x: Array) -> Array:
        models = Trial(platform, trial(x, nothing), formats)
        times: list[float] = []
        for one in layers:
            parts = predicted_ns(models.cost(one.shape, one.layout), one.step)
            for name, more in zip(PARTS, x[_SHARED:-1], strict=True):
                parts[name] += float(more)
            parts["select"] += one.step.tokens * float(x[-1])
            times += (parts[name] for name in _ROWS if name in one.ns)
        return np.array(times)

    # Of the rows that a layer counts as, one is enough to say how well it fits.
    rows = [(one.ns[name], place == len(PARTS)) for one in layers for place, name in enumerate(_ROWS) if name in one.ns]
    measured = np.array([ns for ns, _ in rows])
    solution = solve(predict, _START, measured)
    rounded = np.array([float(f"{value:.4g}") for value in solution.constants])
    whole = np.array([is_layer for _, is_layer in rows])
    return trial(rounded, solution.residual(whole))


def _share(value: float) -> float:
    """A positive number, mapped below 1."""
    return value / (1.0 + value)
