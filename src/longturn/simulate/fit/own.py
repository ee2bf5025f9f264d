"""Longturn's own kernels on a platform, from its measured decode steps and layers of steps with chunks.

A dozen constants on two dozen points fit closer than they predict. So the residuals that stand in the platform file,
and make the band, are those of each point predicted by a fit to all others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import MappingProxyType
from typing import TypeVar

import numpy as np

from longturn.simulate.calibration import KernelFamily, Residual
from longturn.simulate.fit.layers import MeasuredLayer, fit_layers, layer_predicted, layers_of
from longturn.simulate.fit.measured import MeasuredStep, fit_measured, steps_of, steps_predicted
from longturn.simulate.fit.solver import residual_of
from longturn.simulate.fit.trial import with_constants
from longturn.simulate.formats import Formats, formats_named
from longturn.simulate.platform import Platform
from longturn.simulate.published_data import Group

FAMILY = "longturn"
SCORE_TILE_TOKENS, ROW_TILE_TOKENS = 64, 32
LONE_HIDDEN, LONE_ROWS = 2048, 4
CHUNK_SIZES = (64, 128, 256, 384, 512, 576, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096, 6144, 8192)
"""These as in the code: `block_scores_hopper` (a page for a tile of few rows costs half of one for another),
`kernels.one_token_rows` and `executor.gpu.buckets`."""
_T = TypeVar("_T")
SMALL_KERNEL_NS = 900.0
"""Kernels are fused further than the model counts launches, so one that moves little counts as the least time of a
kernel in a captured graph, measured on an H200."""


def longturn_family(
    platform: Platform, base: KernelFamily, measured: Sequence[Group], *, crossed: bool = True
) -> KernelFamily:
    """The family of groups of kind "decode", "chain" and "layer"; `base` lends what they cannot show.

    Args:
        crossed: residuals of points left out of the fit, which takes a fit for each, or of those fitted.

    Raises:
        ConfigError: there are too few points.
    """
    decode = [group for group in measured if group.kind in ("decode", "chain")]
    steps = [step for group in decode for step in steps_of(group)]
    layers = [layer for group in measured if group.kind == "layer" for layer in layers_of(group)]
    formats = formats_named(decode[0].text("formats"))
    source, date = decode[0].source, decode[0].date
    key = f"{formats.attention}-{formats.cache}"
    tiled = dataclasses.replace(
        base.attention[key],
        tile_tokens=SCORE_TILE_TOKENS,
        row_tile_tokens=ROW_TILE_TOKENS,
        lone_hidden=LONE_HIDDEN,
        lone_rows=LONE_ROWS,
    )
    family = dataclasses.replace(base, attention=MappingProxyType({key: tiled}), chunk_sizes=CHUNK_SIZES)
    note = f"{len(steps)} measured decode steps, {len(layers)} layers of steps with chunks"

    def of_steps(family: KernelFamily, seen: Sequence[MeasuredStep]) -> KernelFamily:
        return fit_measured(platform, family, FAMILY, formats, seen, source, date, SMALL_KERNEL_NS)

    def of_layers(family: KernelFamily, seen: Sequence[MeasuredLayer]) -> KernelFamily:
        return fit_layers(platform, family, formats, seen, note)

    # Decode steps say how fast weights stream, layers how fast they are multiplied; each leans on the other a little.
    for _ in range(2):
        family = of_layers(of_steps(family, steps), layers)
    if not crossed:
        return family
    rows = [
        steps_predicted(platform, of_steps(family, _without(steps, place)), formats, [step])[0] / step.ns
        for place, step in enumerate(steps)
    ]
    chunks = [
        layer_predicted(platform, of_layers(family, _without(layers, place)), formats, layer) / layer.ns["layer"]
        for place, layer in enumerate(layers)
        if "layer" in layer.ns
    ]
    return _with_residuals(family, key, formats, residual_of(np.log(rows)), residual_of(np.log(chunks)))


def _without(found: Sequence[_T], place: int) -> list[_T]:
    return [one for at, one in enumerate(found) if at != place]


def _with_residuals(
    family: KernelFamily, key: str, formats: Formats, decode: Residual, prefill: Residual
) -> KernelFamily:
    attention = dataclasses.replace(family.attention[key], decode=decode, prefill=prefill)
    experts = dataclasses.replace(family.experts[formats.experts], tables=prefill, uneven_tables=decode)
    return with_constants(family, formats, attention, experts)
