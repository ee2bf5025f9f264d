"""Shorthands for cost models in tests."""

from __future__ import annotations

from longturn.simulate.cost.model import StepCost
from longturn.simulate.cost.options import CostOptions, Graphs, HostTime
from longturn.simulate.formats import formats_named
from longturn.simulate.layout import parse_layout
from longturn.simulate.platform import Platform, load_platform
from longturn.simulate.shapes import load_shape

NO_HOST = HostTime(step_ns=0, row_ns=0)
EXACT = Graphs(sizes=(), launch_ns=0)
"""No padding and no launch time: what kernels cost, and nothing else."""


def cost(
    platform: str | Platform = "gb300",
    model: str = "m3",
    layout: str = "tp4",
    formats: str = "nvfp4",
    options: CostOptions | None = None,
) -> StepCost:
    chips = load_platform(platform) if isinstance(platform, str) else platform
    if options is None:
        options = CostOptions(host=NO_HOST, graphs=EXACT)
    return StepCost(chips, load_shape(model), parse_layout(layout), formats_named(formats), options)
