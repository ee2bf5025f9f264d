"""Measure one point: decode steps, first tokens of cached prompts, warm turns, prefill, mixed steps, start-up."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from longturn.cli.steps.harness import Stand, drain, first_tokens, pass_over, request
from longturn.cli.steps.points import START_CACHED, START_CONTEXT, Point, decode_floor_ms
from longturn.config import PAGE_TOKENS
from longturn.executor.gpu.buckets import StepKind

_WARM_UP, _STEPS = 6, 40


@dataclass(frozen=True, slots=True)
class Measured:
    """One point's figures."""

    preset: str
    point: Point
    value: float
    """In the point's unit: median of the repeats."""
    floor: float | None = None
    """What the bytes need, in the same unit."""
    device_ms: float | None = None
    """Median time of a step on the device, between the two events around it."""
    host_us: float | None = None
    """Host time of a step, waiting apart."""

    def row(self) -> dict[str, object]:
        """For JSON."""
        p = self.point
        return {
            "preset": self.preset,
            "point": p.name,
            "unit": p.unit,
            "value": self.value,
            "floor": self.floor,
            "of_floor": None if self.floor is None else self.value / self.floor,
            "vllm_0_25_1": p.peer,
            "ratio_to_vllm": self.speed_up,
            "device_ms": self.device_ms,
            "host_us": self.host_us,
        }

    @property
    def speed_up(self) -> float | None:
        """How many times faster than the peer."""
        peer = self.point.peer
        if peer is None:
            return None
        return self.value / peer if self.point.kind == "prefill" else peer / self.value


class Size(TypedDict):
    """Arguments of `Stand`."""

    rows: int
    cached_tokens: int
    context: int
    step_tokens: int


def size_of(points: tuple[Point, ...], step_tokens: int) -> Size:
    """What an executor needs to hold for these points."""
    context = max(p.context + p.new for p in points)
    return {
        "rows": max(p.all_rows for p in points),
        "cached_tokens": max(p.cached_tokens for p in points),
        "context": context,
        "step_tokens": step_tokens,
    }


def prepare(stand: Stand, points: tuple[Point, ...]) -> float:
    """Compile and capture the shapes that these points run through; seconds."""
    begin = time.perf_counter()
    shape_for = stand.executor.shape_for
    wanted = set()
    for p in points:
        blocks = (p.context + p.new) // PAGE_TOKENS + 1
        if p.kind in ("decode", "mixed"):
            wanted.add(shape_for(StepKind.DECODE, p.rows, blocks))
        if p.kind == "mixed":
            wanted.add(shape_for(StepKind.MANY, p.rows + p.new, blocks))
        if p.kind == "turn":
            wanted.add(shape_for(StepKind.MANY, p.new, blocks))
        if p.kind == "warm":
            # A cached prompt computes its last token alone, in a copy of its page: prompts of one step are a decode.
            wanted |= {shape_for(StepKind.DECODE, rows, blocks) for rows in (1, p.rows)}
        if p.kind == "prefill":
            step = stand.executor.shape_for(StepKind.MANY, p.context, blocks).tokens
            ends = [*range(step, p.context, step), p.context]
            wanted |= {shape_for(StepKind.MANY, step, end // PAGE_TOKENS + 1) for end in ends}
            wanted.add(shape_for(StepKind.MANY, p.context % step or step, blocks))
    stand.executor.capture(sorted(wanted, key=lambda s: s.tokens * s.blocks, reverse=True))
    gc.collect()
    gc.freeze()  # as a server does once it is up: a full collection in the middle of a step costs a tenth of a second
    return time.perf_counter() - begin


def measure(stand: Stand, point: Point, repeats: int = 3) -> Measured:
    """Measure one point, except `start`."""
    kinds: dict[str, Callable[[Stand, Point, int], Measured]] = {
        "decode": _decode, "warm": _warm, "turn": _turn, "prefill": _prefill, "mixed": _mixed
    }  # fmt: skip
    return kinds[point.kind](stand, point, repeats)


def _decode(stand: Stand, p: Point, repeats: int) -> Measured:
    engine, watch = stand.engine()
    names = [f"d{i}" for i in range(p.rows)]
    outputs = repeats * _STEPS + 4 * _WARM_UP
    pass_over(engine, watch, [request(name, stand.tokens(p.context), outputs) for name in names])
    for _ in range(_WARM_UP):
        engine.step()
    times, hosts = [], []
    watch.device_ns.clear()
    for _ in range(repeats):
        watch.waited_ns = 0
        begin = time.perf_counter_ns()
        for _ in range(_STEPS):
            engine.step()
        spent = time.perf_counter_ns() - begin
        times.append(spent / _STEPS / 1e6)
        hosts.append((spent - watch.waited_ns) / _STEPS / 1e3)
    device = statistics.median(watch.device_ns) / 1e6
    drain(engine, names)
    floor = _floor(stand, p)
    return Measured(stand.preset, p, statistics.median(times), floor, device, statistics.median(hosts))


def _floor(stand: Stand, p: Point) -> float:
    """What the bytes of one step need."""
    return decode_floor_ms(stand.config, p.rows, p.context, stand.form, stand.experts)


def _warm(stand: Stand, p: Point, repeats: int) -> Measured:
    engine, watch = stand.engine()
    prompts = [stand.tokens(p.context) for _ in range(p.rows)]
    pass_over(engine, watch, [request(f"c{i}", tokens, 1, cached=True) for i, tokens in enumerate(prompts)])
    times = []
    for turn in range(repeats + 1):
        wave = [request(f"w{turn}.{i}", tokens, 1, cached=True) for i, tokens in enumerate(prompts)]
        times.append(first_tokens(engine, wave))
        drain(engine, ())
    return Measured(stand.preset, p, statistics.median(times[1:]), _floor(stand, p))


def _turn(stand: Stand, p: Point, repeats: int) -> Measured:
    engine, watch = stand.engine()
    prompt = stand.tokens(p.context)
    pass_over(engine, watch, [request("c", prompt, 1, cached=True)])
    times = []
    for turn in range(repeats + 1):
        times.append(first_tokens(engine, [request(f"t{turn}", prompt + stand.tokens(p.new), 1, cached=True)]))
        drain(engine, ())
    return Measured(stand.preset, p, statistics.median(times[1:]), device_ms=watch.device_ns[-1] / 1e6)


def _prefill(stand: Stand, p: Point, repeats: int) -> Measured:
    engine, _ = stand.engine(passing=False)
    rates = []
    # A long prompt takes seconds; once is enough after a short one that warms up.
    for turn in range(2 if p.context > 65536 else repeats + 1):
        count = 16384 if turn == 0 and p.context > 65536 else p.context
        rates.append(count / first_tokens(engine, [request(f"p{turn}", stand.tokens(count), 1)]) * 1e3)
        drain(engine, ())
    return Measured(stand.preset, p, statistics.median(rates[1:]))


def _mixed(stand: Stand, p: Point, repeats: int) -> Measured:
    """Time on the device of one step that has every row's decode and one warm turn's new tokens."""
    engine, watch = stand.engine()
    names = [f"d{i}" for i in range(p.rows)]
    prompt = stand.tokens(p.context)
    pass_over(engine, watch, [request("c", prompt, 1, cached=True)])
    pass_over(engine, watch, [request(name, stand.tokens(p.context), 100) for name in names])
    times = []
    for turn in range(repeats + 1):
        engine.step()
        watch.device_ns.clear()
        first_tokens(engine, [request(f"m{turn}", prompt + stand.tokens(p.new), 1, cached=True)])
        times.append(max(watch.device_ns) / 1e6)
    drain(engine, names)
    return Measured(stand.preset, p, statistics.median(times[1:]))


def measure_start(preset: str, p: Point, step_tokens: int) -> tuple[Measured, dict[str, float]]:
    """From the start of this process to the first token of its first request, and where the seconds went.

    By then the graphs of decode steps of few rows are made. The others are made when a step first needs one, or while
    there are no requests, as happens here after the first token.
    """
    parts = {"imports": since_process_start_s()}
    size = Size(rows=32, cached_tokens=START_CACHED, context=START_CONTEXT, step_tokens=step_tokens)
    stand = Stand(preset, **size, serving=True)
    parts["weights"] = since_process_start_s()
    graphs = stand.start()
    parts["kernels and graphs"] = since_process_start_s()
    engine, _ = stand.engine(passing=False)
    first_tokens(engine, [request("first", stand.tokens(p.context), 1)])
    parts["first token"] = since_process_start_s()
    drain(engine, ())
    idle = 0
    while stand.executor.idle():
        idle += 1
    parts["other graphs"] = since_process_start_s()
    stand.close()
    steps = list(parts.values())
    spent = {name: round(b - a, 2) for name, a, b in zip(parts, [0.0, *steps], steps, strict=False)}
    counts = {"graphs before": graphs, "graphs after": idle + 1}
    return Measured(preset, p, parts["first token"]), spent | counts


def since_process_start_s() -> float:
    """Seconds since this process began, from /proc."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - ticks / 100.0
