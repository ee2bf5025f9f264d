"""Whole decode steps by format of weights and cache: what is compared, timed and profiled (see gpu_formats.py)."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gpu_attention import FORMATS, FormatStack, filled_cache
from gpu_decode_stack import (
    HEAD_DIM,
    PRESETS,
    STREAM_BYTES_PER_S,
    DecodeStack,
    Formats,
    Model,
    Preset,
    Tuning,
    floor_ms,
    shortened,
)
from gpu_kernels import pages_for
from longturn.kernels.moe_few import MoePlan
from longturn.kernels.msa_plan import MsaPlan
from longturn.kernels.packed_weights import WeightFormat
from longturn.kernels.pages import KvFormat, PageLayout
from longturn.kernels.small_linear import LinearPlan

QUANTISED = Formats(experts=WeightFormat.NVFP4, others=WeightFormat.MXFP8)
BF16 = Formats()
NOT_STREAMED = Tuning(qkv=LinearPlan(stream=False), o=LinearPlan(stream=False))
"""One token's projections by the kernel for several."""
NO_RING = Tuning(qkv=LinearPlan(ring=False), o=LinearPlan(ring=False))
"""Those of two to eight tokens by the kernel for more."""
BY_REGISTERS = Tuning(few_at_one=False)
"""One token outside the tensor cores."""
FOUR_WARPS = MoePlan(64, 256, 128, 256, 3, 4)
_TWO = LinearPlan(gemv_tokens=0, tile_rows=32, tile_block=256, tile_stages=4, warps=2, stream=False, ring=False)
BY_LAUNCHES = Tuning(moe=replace(MoePlan.default(WeightFormat.NVFP4, 8), stream=False))
"""Experts of two to eight tokens by a launch for each product."""
TILES_OF_TWO = Tuning(qkv=_TWO, o=_TWO)
"""Projections in smaller programs, without warp-group products."""
POINTS = {
    "mini60": [(1, 4096), (4, 131072), (16, 32768), (32, 8192)],
    "slice8": [(1, 4096), (8, 32768)],
}
"""Rows and context."""


@dataclass(frozen=True)
class Way:
    """A configuration whose steps are timed."""

    label: str
    formats: Formats
    cache: str
    """A key of `gpu_attention.FORMATS`."""
    tuning: Tuning

    def floor_ms(self, preset: Preset, rows: int, context: int) -> float:
        kv, index = FORMATS[self.cache]
        cache = preset.layers * rows * HEAD_DIM
        blocks = min(16, context // 128 + 1)
        saved = cache * context * (2 - LANE_BYTES[index])
        saved += cache * blocks * 128 * preset.kv_heads * 2 * (2 - LANE_BYTES[kv])
        return floor_ms(preset, rows, context, self.formats) - saved / STREAM_BYTES_PER_S * 1e3


LANE_BYTES = {KvFormat.PLAIN: 2.0, KvFormat.FP8: 1.0, KvFormat.NVFP4: 0.5 + 1 / 16}


def ways(rows: int) -> list[Way]:
    """Grouped by format of the weights, of which one set at a time fits."""
    whole = "nvfp4, fp8 index"
    out = [Way("weights", QUANTISED, "bf16", Tuning())]
    tunings = {"whole": Tuning(), "experts by 4 warps": Tuning(moe=FOUR_WARPS), "tiles of 2 warps": TILES_OF_TWO}
    if 1 < rows <= 8:
        tunings |= {"no ring": NO_RING, "experts by launches": BY_LAUNCHES}
    if rows == 1:
        tunings |= {"registers": BY_REGISTERS, "not streamed": NOT_STREAMED}
    out += [Way(label, QUANTISED, whole, tuning) for label, tuning in tunings.items()]
    return [*out, Way("bf16", BF16, "bf16", Tuning())]


def stack_of(way: Way, model: Model, caches: dict[str, Tensor], rows: int, context: int, pages: int) -> DecodeStack:
    """A captured step; its cache is kept in `caches` for the next one."""
    kv, index = FORMATS[way.cache]
    layout = PageLayout(model.preset.layers, model.preset.kv_heads, kv_format=kv, index_format=index)
    if way.cache not in caches:
        caches[way.cache] = filled_cache(layout, pages)
    plan = MsaPlan.default(rows, context // 128 + 1, kv)
    stack = FormatStack(model, layout, caches[way.cache], [context] * rows, replace(way.tuning, msa=plan))
    stack.capture()
    return stack


def table(name: str, points: list[tuple[int, int]], bf16: bool) -> list[str]:
    """Step time of whole stacks, and what of bf16's it is."""
    preset = PRESETS[name]
    pages = max(pages_for(*point) for point in points)
    lines, caches = [], {}
    times: dict[tuple[int, int], dict[str, float]] = {point: {} for point in points}
    for formats in (QUANTISED, BF16) if bf16 else (QUANTISED,):
        begin = time.time()
        model = Model.random(preset, formats=formats)
        torch.cuda.synchronize()
        print(f"{name}: {torch.cuda.memory_allocated() / 2**30:.1f} GiB in {time.time() - begin:.1f} s", flush=True)
        for rows, context in points:
            for way in ways(rows):
                if way.formats != formats:
                    continue
                begin = time.time()
                stack = stack_of(way, model, caches, rows, context, pages)
                took = time.time() - begin
                ms, floor = stack.time_ms(), way.floor_ms(preset, rows, context)
                times[rows, context][way.label] = ms
                lines.append(
                    f"{name} {rows:2} x {context:6} {way.label:16} {ms:7.3f} ms  floor {floor:6.2f} "
                    f"({ms / floor:4.2f} x) [compile+capture {took:.0f} s]"
                )
                print(lines[-1], flush=True)
                del stack
        del model
        torch.cuda.empty_cache()
    for (rows, context), by_way in times.items():
        if "bf16" in by_way:
            ratios = ", ".join(f"{label} {by_way['bf16'] / ms:.2f} x" for label, ms in by_way.items())
            lines.append(f"{name} {rows:2} x {context:6} faster than bf16: {ratios}")
    return lines


def profile(name: str, points: list[tuple[int, int]]) -> list[str]:
    """Durations of the kernels of one middle layer, launched dependently or not."""
    preset = shortened(PRESETS[name], 4)
    model = Model.random(preset, formats=QUANTISED)
    lines, caches = [], {}
    for rows, context in points:
        for way in ways(rows):
            if way.formats != QUANTISED:
                continue
            for pdl in (False, True):
                tuned = replace(way, tuning=replace(way.tuning, pdl=pdl))
                stack = stack_of(tuned, model, caches, rows, context, max(pages_for(*point) for point in points))
                for _ in range(3):
                    stack.graph.replay()
                torch.cuda.synchronize()
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
                    stack.graph.replay()
                    torch.cuda.synchronize()
                events = sorted(
                    (e.time_range.start, e.time_range.end, e.name) for e in trace.events() if e.name.startswith("_")
                )
                first, last = [n for n, e in enumerate(events) if e[2] == "_scores"][-2:]
                zero = events[first][0]
                kernels = " ".join(f"{e[2]} {e[0] - zero:.1f}+{e[1] - e[0]:.1f}" for e in events[first:last])
                lines.append(f"profile {name} {rows} x {context} {way.label}{' pdl' if pdl else ''}: {kernels}")
                print(lines[-1], flush=True)
                del stack
    return lines
