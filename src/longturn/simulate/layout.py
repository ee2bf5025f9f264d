"""How one replica of a model lies on chips."""

from __future__ import annotations

import re
from dataclasses import dataclass

from longturn.errors import ConfigError
from longturn.simulate.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of one replica. Attention is split `attention_tp` ways and repeated over the other chips with other
    requests (data parallel); experts are spread over `expert_ep` ranks and each of them split over the rest."""

    chips: int
    attention_tp: int
    expert_ep: int

    @property
    def attention_dp(self) -> int:
        return self.chips // self.attention_tp

    @property
    def expert_tp(self) -> int:
        return self.chips // self.expert_ep

    @property
    def name(self) -> str:
        if self.attention_dp > 1:
            return f"dep{self.chips}"
        if self.expert_ep == 1:
            return f"tp{self.chips}"
        return f"ep{self.chips}" if self.expert_ep == self.chips else f"tp{self.chips}ep{self.expert_ep}"


def parse_layout(text: str) -> Layout:
    """`tp4`: all split four ways. `ep4`: attention split four ways, whole experts spread over four. `tp8ep4`: experts
    spread over four pairs. `dep4`: attention data parallel, experts spread over four.

    Raises:
        ConfigError: anything else.
    """
    match = re.fullmatch(r"(tp|ep|dep)([1-9]\d{0,3})(?:ep([1-9]\d{0,3}))?", text)
    if match is None or (match[3] and match[1] != "tp"):
        raise ConfigError(f"unknown layout '{text}' (such as tp4, ep4, tp8ep4 or dep4)")
    kind, chips = match[1], int(match[2])
    experts = int(match[3]) if match[3] else (1 if kind == "tp" else chips)
    if chips % experts:
        raise ConfigError(f"layout '{text}': {chips} chips cannot be split into {experts} expert ranks")
    return Layout(chips, 1 if kind == "dep" else chips, experts)


def check_layout(layout: Layout, shape: ModelShape, scale_up_chips: int) -> None:
    """Raises ConfigError if the model's sizes cannot be split that way, or the replica is larger than the machine."""
    if layout.chips > scale_up_chips:
        raise ConfigError(f"layout {layout.name} needs {layout.chips} chips; the scale-up domain has {scale_up_chips}")
    if shape.heads % layout.attention_tp:
        raise ConfigError(f"layout {layout.name}: {shape.heads} heads cannot be split {layout.attention_tp} ways")
    if layout.expert_ep > 1 and not shape.moe_layers:
        raise ConfigError(f"layout {layout.name}: {shape.name} has no experts to spread")
    if shape.experts % layout.expert_ep:
        raise ConfigError(f"layout {layout.name}: {shape.experts} experts cannot be spread over {layout.expert_ep}")
    if not shape.moe_layers and shape.dense_ffn % layout.attention_tp:
        raise ConfigError(
            f"layout {layout.name}: a feed-forward {shape.dense_ffn} wide cannot be split {layout.attention_tp} ways"
        )
    if shape.moe_layers and shape.expert_ffn % layout.expert_tp:
        raise ConfigError(
            f"layout {layout.name}: experts {shape.expert_ffn} wide cannot be split {layout.expert_tp} ways"
        )


def heads_per_rank(heads: int, ways: int) -> int:
    """Key/value (or index) heads that one rank holds: where there are fewer than ranks, they are repeated."""
    return max(1, heads // ways)
