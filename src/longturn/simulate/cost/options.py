"""What else decides a step's time beside chip, model, layout and formats."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from longturn.errors import ConfigError
from longturn.simulate.cost.routing import Routing

KERNELS = (
    "projections",
    "attention_fixed",
    "index_scan",
    "block_select",
    "sparse_attend",
    "dense_attend",
    "router",
    "experts",
    "shared_expert",
    "dense_ffn",
    "norms",
    "collectives",
    "head",
    "sampling",
    "draft",
)
"""The parts of a step, in the order of `Breakdown.ns`. `attention_fixed` is what a layer's attention costs beside bytes
and operations: launches, norms, rotation, cache write, and selecting the top blocks. `block_select` is that selection
for chunks, where it was measured apart."""

CAPTURED = (1, 2, 4, *range(8, 513, 8))
"""Token counts with a captured graph, as published recipes have it: eights up to 512."""


@dataclass(frozen=True, slots=True)
class Graphs:
    """A step is padded to the next captured size. Beyond the largest, kernels are launched one by one."""

    sizes: tuple[int, ...] = CAPTURED
    launches_per_layer: int = 15
    launch_ns: int = 4_000
    """Host time of one launch outside a graph."""

    def __post_init__(self) -> None:
        if list(self.sizes) != sorted(set(self.sizes)) or any(size < 1 for size in self.sizes):
            raise ConfigError("captured sizes must be ascending and at least 1")

    def padded(self, tokens: int) -> int:
        """Tokens that are computed for `tokens`."""
        i = bisect.bisect_left(self.sizes, tokens)
        return self.sizes[i] if i < len(self.sizes) else tokens

    def host_ns(self, tokens: int, layers: int) -> int:
        """Host time of launching a step of `tokens` tokens, beside `HostTime`."""
        if self.sizes and tokens <= self.sizes[-1]:
            return 0
        return layers * self.launches_per_layer * self.launch_ns


@dataclass(frozen=True, slots=True)
class HostTime:
    """Scheduler, input preparation and output of one step.

    Defaults: Longturn's own scheduler as measured on a two-core CPU (docs/performance.md: 10 microseconds at batch 1,
    98 at batch 32), and 0.1 ms for preparing inputs and enqueueing a graph (33 microseconds measured on an H200's host)
    with the copy back.
    """

    step_ns: int = 100_000
    row_ns: int = 3_000
    overlap: bool = True
    """The host works on the next step while the device computes: a step takes the longer of the two, not the sum."""

    def ns(self, rows: int) -> int:
        return self.step_ns + rows * self.row_ns


@dataclass(frozen=True, slots=True)
class Drafter:
    """A draft model: dense layers of the target's hidden size that share its embedding and head."""

    drafts: int
    """Tokens proposed for a row in a step."""
    block: bool
    """All drafts in one pass (DSpark, DFlash), or one pass a draft (EAGLE)."""
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context_layers: int
    """Target layers whose outputs are joined into the draft's input."""
    window: int
    """Most positions that a draft layer attends to; 0 is all."""
    acceptance: tuple[float, ...] = ()
    """Mean tokens a row gains per step with 1, 2, ... drafts, the target's own token included."""

    def accepted(self) -> float:
        """Mean tokens per step and row. Raises ConfigError if that was not measured."""
        if not 0 < self.drafts <= len(self.acceptance):
            raise ConfigError(f"no acceptance length is known for {self.drafts} drafts")
        return self.acceptance[self.drafts - 1]


_NO_FACTORS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class CostOptions:
    """Everything about a run that changes what a step costs."""

    family: str | None = None
    """Kernel family; the platform's default if None."""
    routing: Routing = field(default_factory=Routing)
    locality: bool = True
    """Weights placed by locality domain, where the platform has domains and a kernel for it."""
    graphs: Graphs = field(default_factory=Graphs)
    host: HostTime = field(default_factory=HostTime)
    drafter: Drafter | None = None
    factors: Mapping[str, float] = field(default_factory=lambda: _NO_FACTORS)
    """Time of kernels (names of `KERNELS`) multiplied: 0.5 is twice as fast, 0 is free. For what-ifs."""
    expert_factor_tokens: float = 1.0
    """Exponent of the tokens that choose experts independently: tokens of one request repeat their experts, so that
    verifying k+1 tokens of a row touches fewer experts than k+1 rows. 1 takes them as independent."""

    def __post_init__(self) -> None:
        for name, factor in self.factors.items():
            if name not in KERNELS:
                raise ConfigError(f"unknown kernel '{name}' (known: {', '.join(KERNELS)})")
            if not 0 <= factor < 1e6:
                raise ConfigError(f"factor of kernel {name} must be at least 0, not {factor}")
