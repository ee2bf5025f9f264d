"""The points that are measured, with what vLLM 0.25.1 took on the same card and the time their bytes need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from longturn.errors import ConfigError
from longturn.models.minimax_m3_config import MiniMaxM3Config

STREAM_BYTES_PER_S = 4.4e12
"""Read-only streaming rate of an H200, as measured."""

START_CONTEXT = 131_072
START_CACHED = 2 * START_CONTEXT
"""Tokens of the executor whose start is measured: of its longest request, and of its page pool."""

Kind = Literal["decode", "warm", "turn", "prefill", "mixed", "start"]


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement on one preset."""

    kind: Kind
    rows: int
    context: int
    """Tokens of each row before the measurement."""
    new: int = 0
    """Tokens that are computed, in `turn` and `mixed`."""
    peer: float | None = None
    """vLLM 0.25.1, bf16, one H200: ms (tok/s for prefill)."""

    @property
    def name(self) -> str:
        new = f"+{self.new}" if self.new else ""
        return f"{self.kind}:{self.rows}x{self.context}{new}"

    @property
    def all_rows(self) -> int:
        """A mixed step has a row for its chunk too."""
        return self.rows + (self.kind == "mixed")

    @property
    def cached_tokens(self) -> int:
        """Of all rows, at the end."""
        return self.all_rows * (self.context + self.new)

    @property
    def unit(self) -> str:
        return {"prefill": "tok/s", "start": "s"}.get(self.kind, "ms")


@dataclass(frozen=True, slots=True)
class StepPreset:
    """A model that is measured."""

    shape: str
    """One of `make_checkpoint.PRESETS`."""
    weights: str = "bf16"
    """`nvfp4`: NVFP4 experts, MXFP8 elsewhere, embedding and head in bf16."""
    cache: str = "bf16"
    """Of keys and values; the index key is fp8 where this is not bf16."""


PRESETS = {
    "mini60": StepPreset("mini60"),
    "slice8": StepPreset("slice8"),
    "mini60-nvfp4": StepPreset("mini60", "nvfp4", "nvfp4"),
    "slice8-nvfp4": StepPreset("slice8", "nvfp4", "nvfp4"),
    "slice8-nvfp4-bf16kv": StepPreset("slice8", "nvfp4"),
    "slice8-fp8kv": StepPreset("slice8", "bf16", "fp8"),
}
"""Models by name; their points are those of the shape."""

POINTS: dict[str, tuple[Point, ...]] = {
    "mini60": (
        Point("decode", 1, 4096, peer=6.19),
        Point("decode", 1, 32768, peer=6.46),
        Point("decode", 1, 131072, peer=6.83),
        Point("decode", 4, 131072, peer=18.30),
        Point("decode", 16, 32768, peer=12.96),
        Point("decode", 32, 8192, peer=14.43),
        Point("warm", 1, 4096, peer=25.7),
        Point("warm", 1, 32768, peer=42.2),
        Point("warm", 1, 131072, peer=119.6),
        Point("warm", 4, 131072, peer=180.6),
        Point("warm", 16, 32768, peer=176.8),
        Point("turn", 1, 131072, 512),
        Point("mixed", 8, 32768, 512),
        Point("prefill", 1, 4096, peer=27_224),
        Point("prefill", 1, 32768, peer=22_541),
        Point("prefill", 1, 131072, peer=18_006),
        Point("start", 1, 1000, peer=120.0),
    ),
    "slice8": (
        Point("decode", 1, 4096, peer=2.68),
        Point("decode", 1, 32768, peer=2.70),
        Point("decode", 1, 131072, peer=2.79),
        Point("decode", 8, 32768, peer=7.72),
        Point("decode", 32, 8192, peer=13.68),
        Point("decode", 32, 32768, peer=14.07),
        Point("warm", 1, 4096, peer=20.1),
        Point("warm", 1, 131072, peer=51.8),
        Point("warm", 8, 32768, peer=68.9),
        Point("turn", 1, 131072, 512),
        Point("mixed", 8, 32768, 512),
        Point("prefill", 1, 4096, peer=49_996),
        Point("prefill", 1, 32768, peer=54_083),
        Point("start", 1, 1000, peer=120.0),
    ),
}


def choose(preset: str, wanted: Sequence[str]) -> tuple[Point, ...]:
    """Points of a preset whose names start with one of `wanted`; all but `start` if that is empty.

    Raises:
        ConfigError: a name matches nothing.
    """
    points = POINTS[PRESETS[preset].shape]
    if not wanted:
        return tuple(p for p in points if p.kind != "start")
    for name in wanted:
        if not any(p.name.startswith(name) for p in points):
            raise ConfigError(
                f"no point of {preset} starts with '{name}' (points: {', '.join(p.name for p in points)})"
            )
    return tuple(p for p in points if p.name.startswith(tuple(wanted)))


VALUE_BYTES = {"bf16": 2.0, "fp8": 1.0, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
"""Scales counted."""


def decode_floor_ms(
    c: MiniMaxM3Config, rows: int, context: int, preset: StepPreset | None = None, experts: int | None = None
) -> float:
    """Bytes that one decode step must read, at the streaming rate: weights and cache as in `preset`, even routing
    among `experts` of each layer (all if None)."""
    choices = experts or c.experts
    form = preset or StepPreset("")
    expert_bytes = VALUE_BYTES[form.weights]
    other_bytes = VALUE_BYTES["bf16" if form.weights == "bf16" else "mxfp8"]
    distinct = choices * (1 - (1 - c.top_experts / choices) ** rows)
    moe_layers = sum(c.moe_layers)
    projected = c.q_width + 2 * c.kv_width + c.index_q_width + c.index_dim
    others = c.layers * (projected + c.q_width) * c.hidden + (c.layers - moe_layers) * 3 * c.hidden * c.dense_ffn
    others += moe_layers * 3 * c.hidden * c.shared_ffn
    weights = other_bytes * others + 2.0 * c.vocab_size * c.hidden
    weights += moe_layers * c.hidden * (3 * expert_bytes * distinct * c.expert_ffn + 4 * c.experts)
    blocks = min(c.selection.top, context // 128 + 1)
    index_bytes = VALUE_BYTES["bf16" if form.cache == "bf16" else "fp8"]
    cache = index_bytes * context * c.index_dim + VALUE_BYTES[form.cache] * blocks * 128 * 2 * c.kv_width
    return (weights + c.layers * rows * cache) / STREAM_BYTES_PER_S * 1e3
