"""What a preset's points need of a GPU's memory, for the line that says that there is too little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longturn.cli.steps.points import POINTS, PRESETS, START_CACHED, START_CONTEXT, VALUE_BYTES, Point
from longturn.config import PAGE_TOKENS
from longturn.models.make_checkpoint import PRESETS as SHAPES
from longturn.models.make_checkpoint import preset_config
from longturn.models.minimax_m3_cache import minimax_m3_kv
from longturn.models.minimax_m3_config import minimax_m3_config
from longturn.models.minimax_m3_gpu_limits import scratch_bytes, weight_bytes
from longturn.models.registry import CACHE_TYPES

_GB = 1e9


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes, about."""

    weights: int
    cache: int
    scratch: int
    """What steps may take beside, generously."""

    @property
    def all(self) -> int:
        return self.weights + self.cache + self.scratch


def needs(preset: str, points: Sequence[Point], step_tokens: int) -> Needs:
    """What measuring these points together takes."""
    form = PRESETS[preset]
    c = minimax_m3_config(preset_config(SHAPES[form.shape])["text_config"])
    kv_dtype = CACHE_TYPES[form.cache]
    assert kv_dtype is not None, "presets name a type"
    context = max(p.context + p.new for p in points)
    cached = max(p.cached_tokens for p in points)
    if any(p.kind == "start" for p in points):  # a server's size, whatever its first request
        context, cached = max(context, START_CONTEXT), max(cached, START_CACHED)
    return Needs(
        weight_bytes(c, VALUE_BYTES[form.weights]),
        -(-cached // PAGE_TOKENS) * minimax_m3_kv(c, kv_dtype).page_bytes,
        scratch_bytes(c, step_tokens, context, packed_experts=form.weights != "bf16"),
    )


def too_little_memory(preset: str, points: Sequence[Point], step_tokens: int, *, free_bytes: int, device: str) -> str:
    """One line that says how much is needed and what would fit.

    Args:
        preset: the one that did not fit.
        points: those that were to be measured together.
        step_tokens: token budget of a step.
        free_bytes: of the device, before anything was allocated.
        device: its name.
    """
    need = needs(preset, points, step_tokens)
    parts = (
        f"{need.weights / _GB:.1f} GB of weights, {need.cache / _GB:.1f} of cache, {need.scratch / _GB:.1f} of scratch"
    )
    fitting = [p.name for p in POINTS[PRESETS[preset].shape] if needs(preset, [p], step_tokens).all <= free_bytes]
    if fitting:
        fits = f"alone fit: {', '.join(fitting)}"
    else:
        least = {
            name: min(needs(name, [p], step_tokens).all for p in POINTS[form.shape]) for name, form in PRESETS.items()
        }
        others = [name for name, size in least.items() if size <= free_bytes]
        fits = f"presets that fit: {', '.join(others)}" if others else "no preset fits"
    return (
        f"too little GPU memory for {preset}: about {need.all / _GB:.1f} GB are needed for these points ({parts}), and "
        f"{free_bytes / _GB:.1f} GB of {device} were free; {fits}"
    )
