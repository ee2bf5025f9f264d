"""Cost models of a family that a fit tries, and a family with some of its constants exchanged."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

from longturn.simulate.calibration import AttentionConstants, ExpertConstants, KernelFamily
from longturn.simulate.cost.model import StepCost
from longturn.simulate.cost.options import CostOptions
from longturn.simulate.cost.routing import UNIFORM
from longturn.simulate.formats import Formats
from longturn.simulate.layout import Layout
from longturn.simulate.platform import Platform
from longturn.simulate.shapes import ModelShape


class Trial:
    """Models of a platform whose kernels are one family's, even routing; each is built once."""

    def __init__(self, platform: Platform, family: KernelFamily, formats: Formats) -> None:
        self._platform = dataclasses.replace(
            platform, families=MappingProxyType({family.name: family}), default_family=family.name
        )
        self._formats = formats
        self._models: dict[tuple[str, str], StepCost] = {}

    def cost(self, shape: ModelShape, layout: Layout) -> StepCost:
        """The model of a shape; shapes are told apart by their names."""
        place = shape.name, layout.name
        if place not in self._models:
            self._models[place] = StepCost(self._platform, shape, layout, self._formats, CostOptions(routing=UNIFORM))
        return self._models[place]


def with_constants(
    family: KernelFamily, formats: Formats, attention: AttentionConstants, experts: ExpertConstants
) -> KernelFamily:
    """The family with other constants for these formats."""
    key = f"{formats.attention}-{formats.cache}"
    return dataclasses.replace(
        family,
        attention=MappingProxyType({**family.attention, key: attention}),
        experts=MappingProxyType({**family.experts, formats.experts: experts}),
    )
