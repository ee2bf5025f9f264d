"""The points that are measured, with what vLLM 0.25.1 took on the same card and the time their bytes need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from longturn.errors import ConfigError
from longturn.models.minimax_m3_config import MiniMaxM3Config

STREAM_BYTES_PER_S = 4.4e12
"""Read-only streaming rate of an H200, as measured."""

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
    def unit(self) -> str:
        return {"prefill": "tok/s", "start": "s"}.get(self.kind, "ms")


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
    points = POINTS[preset]
    if not wanted:
        return tuple(p for p in points if p.kind != "start")
    for name in wanted:
        if not any(p.name.startswith(name) for p in points):
            raise ConfigError(
                f"no point of {preset} starts with '{name}' (points: {', '.join(p.name for p in points)})"
            )
    return tuple(p for p in points if p.name.startswith(tuple(wanted)))


def decode_floor_ms(c: MiniMaxM3Config, rows: int, context: int) -> float:
    """Bytes that one decode step must read, at the streaming rate: even routing, bf16 weights, cache and index key."""
    distinct = c.experts * (1 - (1 - c.top_experts / c.experts) ** rows)
    moe_layers = sum(c.moe_layers)
    projected = c.q_width + 2 * c.kv_width + c.index_q_width + c.index_dim
    weights: float = c.layers * (projected + c.q_width) * c.hidden + c.vocab_size * c.hidden
    weights += (c.layers - moe_layers) * 3 * c.hidden * c.dense_ffn
    weights += moe_layers * (3 * c.hidden * (distinct * c.expert_ffn + c.shared_ffn) + 2 * c.experts * c.hidden)
    blocks = min(c.selection.top, context // 128 + 1)
    cache = c.layers * rows * (context * c.index_dim + blocks * 128 * 2 * c.kv_width)
    return 2 * (weights + cache) / STREAM_BYTES_PER_S * 1e3
