"""Frequencies of rotary position embedding (Su et al., 2021, arXiv:2104.09864) and the published ways to stretch them.

In numpy, so that the packed path starts without torch: that import costs a second and 200 MB.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from longturn.errors import ModelError

Floats = npt.NDArray[np.float32]

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeFrequencies:
    """What a model needs to rotate queries and keys."""

    inv_freq: Floats
    """Radians per position, fp32 [rotary_dim / 2]."""
    scale: float = 1.0
    """Factor on cosine and sine (YaRN's attention factor)."""

    @property
    def rotary_dim(self) -> int:
        return 2 * len(self.inv_freq)

    def table(self, positions: int) -> tuple[Floats, Floats]:
        """Cosine and sine of positions 0 .. positions-1, each [positions, rotary_dim / 2], scaled."""
        angles = np.arange(positions, dtype=np.float32)[:, None] * self.inv_freq
        scale = np.float32(self.scale)
        return np.cos(angles) * scale, np.sin(angles) * scale


def rope_frequencies(config: Mapping[str, Any], head_dim: int) -> RopeFrequencies:
    """Read `rope_parameters`, or the older `rope_scaling` and `rope_theta`, of a Hugging Face configuration.

    `dynamic` scaling changes nothing up to the trained context length, which `source.py` makes the limit: past it the
    rotation of cached keys would depend on how long the sequence later became, so cached and fresh runs would differ.

    Raises:
        ModelError: the type is unknown or one of its parameters is missing or impossible.
    """
    params: dict[str, Any] = {"rope_theta": config.get("rope_theta", 10000.0)}
    if "partial_rotary_factor" in config:
        params["partial_rotary_factor"] = config["partial_rotary_factor"]
    params |= config.get("rope_scaling") or {}
    params |= config.get("rope_parameters") or {}
    kind = params.get("rope_type", params.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ModelError(f"RoPE type '{kind}' is not supported (supported: {', '.join(ROPE_TYPES)})")
    share = params.get("partial_rotary_factor") or 1.0
    if not isinstance(share, (int, float)) or not 0.0 < share <= 1.0:
        raise ModelError(f"partial_rotary_factor must be above 0 and at most 1, not {share!r}")
    dim = int(head_dim * share)
    theta = _number(params, kind, "rope_theta")
    # fp32 exponents and reciprocals, as checkpoints were trained; the power itself in float64, because a 1-ulp error of
    # an fp32 power turns the fastest dimensions by 0.0005 rad at position 8,000
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    powers: npt.NDArray[np.float64] = np.power(np.float64(theta), exponents.astype(np.float64))
    plain: Floats = np.float32(1) / np.asarray(powers, np.float32)
    if factors := config.get("rope_freq_factors"):
        if len(factors) != dim // 2:
            raise ModelError(f"{len(factors)} RoPE frequency factors for {dim // 2} frequencies")
        divisors: Floats = np.asarray(factors, np.float32)
        plain = plain / divisors
    if kind == "linear":
        return RopeFrequencies(plain / np.float32(_number(params, kind, "factor")))
    if kind == "llama3":
        return RopeFrequencies(_llama3(plain, config, params))
    if kind == "yarn":
        return _yarn(plain, config, params, theta)
    return RopeFrequencies(plain)


def _number(params: Mapping[str, Any], kind: str, key: str) -> float:
    value = params.get(key)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value <= 0:
        raise ModelError(f"RoPE type '{kind}' needs a positive {key}, not {value!r}")
    return float(value)


def _trained(config: Mapping[str, Any], params: Mapping[str, Any]) -> float:
    """Context length that the frequencies were trained at."""
    key = "original_max_position_embeddings"
    value = params.get(key) or config.get("max_position_embeddings")
    return _number({key: value}, str(params.get("rope_type", params.get("type"))), key)


def _llama3(plain: Floats, config: Mapping[str, Any], params: Mapping[str, Any]) -> Floats:
    """Long wavelengths are divided by `factor`, short ones kept, those between blended (Llama 3.1)."""
    factor = _number(params, "llama3", "factor")
    low, high = _number(params, "llama3", "low_freq_factor"), _number(params, "llama3", "high_freq_factor")
    if high <= low:
        raise ModelError(f"RoPE type 'llama3' needs high_freq_factor above low_freq_factor, not {high} and {low}")
    turns = _trained(config, params) * plain.astype(np.float64) / (2 * math.pi)  # over the trained context
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (plain * keep + plain / factor * (1.0 - keep)).astype(np.float32)


def _yarn(plain: Floats, config: Mapping[str, Any], params: Mapping[str, Any], theta: float) -> RopeFrequencies:
    """NTK-by-parts interpolation with a temperature on attention (Peng et al., 2023, arXiv:2309.00071)."""
    factor, dim = _number(params, "yarn", "factor"), 2 * len(plain)
    original = _trained(config, params)

    def dimension(turns: float) -> float:
        """Index of the dimension that turns this often over the trained context."""
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension(params.get("beta_fast") or 32.0)
    high = dimension(params.get("beta_slow") or 1.0)
    if params.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / (high - low or 0.001), 0.0, 1.0)
    scale = params.get("attention_factor")
    if scale is None:
        mscale, mscale_all = params.get("mscale"), params.get("mscale_all_dim")
        scale = _mscale(factor, mscale) / _mscale(factor, mscale_all) if mscale and mscale_all else _mscale(factor, 1.0)
    return RopeFrequencies((plain / factor * ramp + plain * (1.0 - ramp)).astype(np.float32), float(scale))


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
