"""Bytes of stored numbers: how weights, cached keys and values, and index keys are held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from longturn.errors import ConfigError

WeightFormat = Literal["bf16", "fp8", "mxfp8", "nvfp4"]
CacheFormat = Literal["bf16", "fp8", "nvfp4"]

WEIGHT_BYTES: Mapping[str, float] = MappingProxyType({"bf16": 2.0, "fp8": 1.0, "mxfp8": 1.0 + 1 / 32, "nvfp4": 0.5625})
"""Bytes of one weight, block scales included: one byte for 32 in MXFP8, one for 16 in NVFP4."""

CACHE_BYTES: Mapping[str, float] = MappingProxyType({"bf16": 2.0, "fp8": 1.0, "nvfp4": 0.5625})
"""Bytes of one cached element, block scales included; plain FP8 has none."""


@dataclass(frozen=True, slots=True)
class Formats:
    """How one model is held. The head, embeddings, norms and router are BF16 or wider in every published checkpoint."""

    attention: WeightFormat = "bf16"
    """Query, key, value, index and output projections."""
    experts: WeightFormat = "bf16"
    """Routed experts."""
    ffn: WeightFormat = "bf16"
    """Shared expert and dense feed-forward layers."""
    cache: CacheFormat = "bf16"
    """Keys and values."""
    index: CacheFormat = "bf16"
    """Index keys."""


FORMATS: Mapping[str, Formats] = MappingProxyType(
    {
        "bf16": Formats(),
        "mxfp8": Formats("mxfp8", "mxfp8", "mxfp8", "fp8", "bf16"),
        "nvfp4": Formats("mxfp8", "nvfp4", "mxfp8", "fp8", "fp8"),
        "nvfp4-kv4": Formats("mxfp8", "nvfp4", "mxfp8", "nvfp4", "fp8"),
    }
)
"""Common mixes. `nvfp4`: NVFP4 experts, MXFP8 elsewhere, FP8 cache and index, as M3.1-Flash is published and served."""


def formats_named(name: str) -> Formats:
    """Raises ConfigError if there is no such mix."""
    if name not in FORMATS:
        raise ConfigError(f"unknown formats '{name}' (known: {', '.join(sorted(FORMATS))})")
    return FORMATS[name]


def compute_rate(weights: str) -> str:
    """The rate (bf16, fp8, nvfp4) that weights of a format are multiplied at where the chip has it."""
    return "fp8" if weights == "mxfp8" else weights
