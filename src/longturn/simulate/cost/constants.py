"""Choosing the constants for the formats of a run, and how far they may be off."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from longturn.errors import ConfigError
from longturn.simulate.calibration import AttentionConstants, Basis, ExpertConstants, KernelFamily
from longturn.simulate.formats import Formats, compute_rate
from longturn.simulate.platform import Platform

ASSUMED_RMS = 0.3
"""Relative uncertainty of kernels that no table covers."""
LEAST_RMS: Mapping[Basis, float] = MappingProxyType(
    {"tables": 0.0, "measured": 0.0, "published": 0.1, "borrowed": 0.2, "assumed": ASSUMED_RMS}
)
"""Relative uncertainty that constants have at least, beside their residual: a table of a few rows says little of other
rows, and fractions of one chip are not those of another."""


def multiply_rate(platform: Platform, weights: str) -> str:
    """What weights are multiplied in: BF16 where the chip has no faster rate for them."""
    rate = compute_rate(weights)
    return rate if f"{rate}_flops" in platform.spec else "bf16"


def attention_constants(platform: Platform, family: KernelFamily, formats: Formats) -> AttentionConstants:
    weights = "fp8" if formats.attention == "mxfp8" else formats.attention
    # NVFP4 caches are in no table: bytes shrink, rates are those of FP8.
    cache = "fp8" if formats.cache == "nvfp4" else formats.cache
    key = f"{weights}-{cache}"
    if key not in family.attention:
        known = ", ".join(sorted(family.attention))
        raise ConfigError(
            f"platform {platform.name}: kernel family {family.name} has no attention '{key}' (known: {known})"
        )
    return family.attention[key]


def expert_constants(platform: Platform, family: KernelFamily, formats: Formats, locality: bool) -> ExpertConstants:
    key = formats.experts
    placed = f"{key}-localized"
    if locality and placed in family.experts:
        return family.experts[placed]
    if key not in family.experts:
        known = ", ".join(sorted(family.experts))
        raise ConfigError(
            f"platform {platform.name}: kernel family {family.name} has no experts '{key}' (known: {known})"
        )
    return family.experts[key]
