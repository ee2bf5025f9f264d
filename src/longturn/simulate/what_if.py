"""A faster kernel: what Amdahl's law makes of it, and names that people use for kernels."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from longturn.errors import ConfigError
from longturn.simulate.cost.options import KERNELS

ALIASES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attend": ("sparse_attend", "dense_attend"),
        "attention": ("attention_fixed", "index_scan", "block_select", "sparse_attend", "dense_attend"),
        "index": ("index_scan",),
        "moe": ("router", "experts", "shared_expert"),
        "gemm": ("projections", "shared_expert", "dense_ffn", "head"),
        "comm": ("collectives",),
    }
)
"""Groups of kernels."""


def parse_speedups(texts: list[str]) -> dict[str, float]:
    """`attend=1.2` as how many times faster each kernel is.

    Raises:
        ConfigError: not NAME=F, an unknown kernel, or a factor that is not above 0.
    """
    found: dict[str, float] = {}
    for text in texts:
        name, equals, number = text.partition("=")
        try:
            faster = float(number)
        except ValueError:
            faster = 0.0
        if not equals or not 0 < faster < float("inf"):
            raise ConfigError(f"--kernel must be NAME=F, F times faster and above 0, not '{text}'")
        if name not in ALIASES and name not in KERNELS:
            raise ConfigError(f"unknown kernel '{name}' (known: {', '.join([*ALIASES, *KERNELS])})")
        for kernel in ALIASES.get(name, (name,)):
            if kernel in found:
                raise ConfigError(f"--kernel {text}: {kernel} has a factor already")
            found[kernel] = faster
    return found


def time_factors(speedups: Mapping[str, float]) -> dict[str, float]:
    """What `CostOptions.factors` takes: by how much each kernel's time is multiplied."""
    return {name: 1.0 / faster for name, faster in speedups.items()}


def amdahl(shares: Mapping[str, float], speedups: Mapping[str, float]) -> float:
    """How many times shorter all steps together get, if nothing but the kernels' own time changes.

    Args:
        shares: of each kernel in the time of steps, together 1.
        speedups: how many times faster some of them are.
    """
    left = sum(share / speedups.get(name, 1.0) for name, share in shares.items())
    return sum(shares.values()) / left if left > 0 else 1.0
