"""Measured agent sessions, our own and the peer's, simulated by the same rules: those in the head of
`benchmarks/gpu_sessions.py`.

Sessions with at least ten turns before the first prompt of more than 120,000 tokens, those turns alone; each starts at
40 % of them with the turn before computed; pauses are cut at 3 s and answers at 1,200 tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from longturn.bench.traces.tree import SessionTree
from longturn.config import PAGE_TOKENS
from longturn.errors import ConfigError
from longturn.simulate.cost.options import CostOptions
from longturn.simulate.deployment import Target, engine_spec, parse_deployment
from longturn.simulate.formats import formats_named
from longturn.simulate.own_replay import Done, Replayed, RequestTime, replay
from longturn.simulate.platform import load_platform
from longturn.simulate.published_data import Group
from longturn.simulate.replicas import EngineSpec
from longturn.simulate.shapes import load_shape
from longturn.simulate.tally import MOST_BAND

MOST_TOKENS, LEAST_TURNS, START, MOST_GAP_S, MOST_OUTPUT, MOST_TURNS = 120_000, 10, 0.4, 3.0, 1200, 24
OWN_FAMILY = "longturn"
"""Kernels of our own, and with them our engine."""
NEAR = (-0.02, -0.01, 0.0, 0.01, 0.02)
"""Figures are medians of runs whose steps take so much longer: which prompts meet in a step hangs on less than steps
are known to, and of 48 first tokens the fifth slowest is 85 or 127 ms by it."""
MORE_SESSIONS = 4
"""Prepared beside those that start; when they have been taken too, the first comes again."""

# Column of a "sessions" group -> its name and unit for people, and whether the band covers it. A hit rate follows from
# the traces and the pool.
FIGURES: Mapping[str, tuple[str, bool]] = MappingProxyType(
    {
        "p90_tok_s_user": ("P90 tok/s/user", True),
        "p50_tok_s_user": ("P50 tok/s/user", True),
        "total_tok_s": ("total tok/s", True),
        "ttft_p50_ms": ("TTFT P50, ms", True),
        "ttft_p90_ms": ("TTFT P90, ms", True),
        "hit_rate": ("hit rate", False),
    }
)


@dataclass(frozen=True, slots=True)
class SessionFigure:
    """One figure of a point."""

    name: str
    """Column of the group."""
    predicted: float
    """Median of the runs of `NEAR`."""
    slow: float
    """With all steps longer by the band."""
    fast: float
    measured: float
    near: tuple[float, ...] = ()
    """Of the runs of `NEAR`, in its order."""

    @property
    def error(self) -> float:
        """Relative, signed: above 0 where the prediction is larger."""
        return self.predicted / self.measured - 1.0

    @property
    def band(self) -> tuple[float, float]:
        """Least and most: a closed loop is chaotic, and a prediction need not lie between the ends' runs."""
        ends = (self.slow, self.predicted, self.fast, *self.near)
        return min(ends), max(ends)

    @property
    def inside(self) -> bool:
        """Whether the band holds what was measured."""
        least, most = self.band
        return least <= self.measured <= most


@dataclass(frozen=True, slots=True)
class SessionPoint:
    """Some sessions at once."""

    group: str
    platform: str
    judged: bool
    note: str
    sessions: int
    requests: int
    """Simulated, that ended in time."""
    measured_requests: int
    figures: tuple[SessionFigure, ...]
    """Those that were measured."""
    band: float
    """Relative half-width of the time of steps, its two sources together."""
    run_band: float
    """Of it, what steps of other measured runs differ by; see `run_residual`."""


def own_trees(trees: Sequence[SessionTree]) -> list[SessionTree]:
    """The part of each session that the rules replay, in the sessions' order: the first turn warms.

    Raises:
        ConfigError: no session qualifies.
    """
    found = [cut for tree in trees if (cut := _cut(tree)) is not None]
    if not found:
        raise ConfigError(f"no session has {LEAST_TURNS} turns within {MOST_TOKENS:,} tokens")
    return found


def _cut(tree: SessionTree) -> SessionTree | None:
    root = tree.root
    turns = list(itertools.takewhile(lambda request: request.input_tokens <= MOST_TOKENS, root.requests))
    if len(turns) < LEAST_TURNS:
        return None
    first = max(int(START * len(turns)) - 1, 0)
    kept = []
    at_s = 0.0
    for number, turn in enumerate(turns[first : first + MOST_TURNS]):
        gap_s = min(max(turn.gap_s, 0.0), MOST_GAP_S) if number else 0.0
        at_s += gap_s
        output = min(max(turn.output_tokens, 1), MOST_OUTPUT)
        kept.append(dataclasses.replace(turn, start_s=at_s, duration_s=0.0, gap_s=gap_s, output_tokens=output))
    conversation = dataclasses.replace(root, requests=tuple(kept))
    return dataclasses.replace(tree, conversations=(conversation,), arrival_s=0.0)


def own_sessions(found: Sequence[Group], trees: Sequence[SessionTree]) -> list[SessionPoint]:
    """Simulate every point of some groups of kind "sessions".

    Args:
        found: see there.
        trees: recorded sessions, as loaded without looking for agents in flattened captures.

    Raises:
        ConfigError: no session qualifies, or fewer than a point replays at once.
    """
    cut = own_trees(trees)
    runs = [_Run(group, place, cut) for group in found for place in range(len(group.numbers("sessions")))]
    alone = [run.simulated(run.step_band) for run in runs]
    points = []
    for number, run in enumerate(runs):
        others = [one for one in alone if one.group != run.group.name or one.sessions != run.sessions]
        more = run_residual([one for one in others if one.platform == alone[number].platform and one.judged])
        known = more > 0.0 and alone[number].judged  # another engine's runs say nothing of this one's
        points.append(run.simulated(min(run.step_band + more, MOST_BAND), more) if known else alone[number])
    return points


def step_scale(point: SessionPoint) -> float | None:
    """By how many times longer or shorter steps the time between tokens would be as measured: interpolated between the
    ends of the band, which are simulated. None if no speed was measured or the band has no width."""
    speeds = [one for one in point.figures if one.name in ("p90_tok_s_user", "p50_tok_s_user")]
    if not speeds or not 0.0 < point.band < 1.0:
        return None
    one = speeds[-1]
    slope = (math.log(one.fast) - math.log(one.slow)) / (math.log1p(-point.band) - math.log1p(point.band))
    return math.exp((math.log(one.measured) - math.log(one.predicted)) / slope) if slope < 0 else None


def run_residual(points: Sequence[SessionPoint]) -> float:
    """By how much steps in measured runs differ from what was predicted of them, root mean square, relative; 0 of no
    points. Steps alone do not show it: clients, clocks and neighbours are part of a run."""
    scales = [scale for point in points if (scale := step_scale(point)) is not None]
    return math.sqrt(sum((scale - 1.0) ** 2 for scale in scales) / len(scales)) if scales else 0.0


class _Run:
    """One point of a group."""

    def __init__(self, group: Group, place: int, trees: Sequence[SessionTree]) -> None:
        self.group, self._place = group, place
        self.sessions = int(group.numbers("sessions")[place])
        most = int(max(group.numbers("sessions")))
        if most > len(trees):
            raise ConfigError(f"{group.name}: {most} sessions at once, {len(trees)} qualify in these traces")
        self._trees = ordered(group, trees)[: most + MORE_SESSIONS]
        self._rows = most
        self._nominal = self._replayed(1.0)
        scales = NEAR if group.judged else (0.0,)
        self._near = [figures_of((self._replayed(1.0 + one) if one else self._nominal).done) for one in scales]
        self.step_band = self._nominal.tally.band

    def _replayed(self, scale: float) -> Replayed:
        spec, seconds = group_spec(self.group, self._rows, scale), float(self.group.number("seconds"))
        found = replay(spec, self._trees, self.sessions, seconds, request_time(self.group))
        if not found.done:
            raise ConfigError(f"{self.group.name}: no simulated request ends within {seconds:g} s")
        return found

    def simulated(self, band: float, run_band: float = 0.0) -> SessionPoint:
        """The point with a band of that half-width."""
        ends = [figures_of(self._replayed(1.0 + sign * band).done) for sign in (1.0, -1.0)]
        group, figures = self.group, []
        for name in FIGURES:
            if name in group.values:
                near = tuple(one[name] for one in self._near)
                predicted, measured = statistics.median(near), group.numbers(name)[self._place]
                figures.append(SessionFigure(name, predicted, ends[0][name], ends[1][name], measured, near))
        return SessionPoint(
            group.name, group.text("platform"), group.judged, group.note, self.sessions, len(self._nominal.done),
            int(group.numbers("requests")[self._place]), tuple(figures), band, run_band,
        )  # fmt: skip


def ordered(group: Group, trees: Sequence[SessionTree]) -> list[SessionTree]:
    """Sessions as the lanes of the measurement took them: by their files' names, or in an order drawn by its seed."""
    found = list(trees)
    if "order_seed" in group.values:
        random.Random(group.number("order_seed")).shuffle(found)
    return found


def figures_of(done: Sequence[Done]) -> dict[str, float]:
    """`FIGURES` of some requests, by the definitions of the measurement."""
    gaps = sorted((one.end_ns - one.first_ns) / (one.output_tokens - 1) for one in done if one.output_tokens > 1)
    first = sorted(one.first_ns - one.sent_ns for one in done)
    span_ns = max(one.end_ns for one in done) - min(one.sent_ns for one in done)
    prompts = sum(one.prompt_tokens for one in done)
    return {
        "p90_tok_s_user": 1e9 / _quantile(gaps, 0.9),
        "p50_tok_s_user": 1e9 / _quantile(gaps, 0.5),
        "total_tok_s": (prompts + sum(one.output_tokens for one in done)) / span_ns * 1e9,
        "ttft_p50_ms": _quantile(first, 0.5) / 1e6,
        "ttft_p90_ms": _quantile(first, 0.9) / 1e6,
        "hit_rate": sum(one.cached_tokens for one in done) / prompts,
    }


def _quantile(ordered: Sequence[float], q: float) -> float:
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def request_time(group: Group) -> RequestTime | None:
    """What a request costs outside of steps, where the group says it."""
    if "request_context" not in group.values:
        return None
    milliseconds = group.numbers("request_ms")
    apart = group.values.get("request_apart") is True
    return RequestTime(group.numbers("request_context"), tuple(value * 1e6 for value in milliseconds), apart)


def group_spec(group: Group, rows: int, scale: float) -> EngineSpec:
    """The engine that a group of runs was measured on; every step takes `scale` times as long."""
    settings: dict[str, Any] = {
        "scheduler.max_running": rows,
        "scheduler.step_tokens": group.number("step_tokens"),
        "scheduler.target_itl_ms": 0.0,
        "scheduler.expected_output_tokens": 128,
    }
    if group.text("family") != OWN_FAMILY:
        settings["scheduler.recompute_share"] = 1.0  # other engines admit what has lost its pages as it comes
    target = Target(
        load_platform(group.text("platform")),
        load_shape(group.text("model")),
        formats_named(group.text("formats")),
        CostOptions(family=group.text("family"), routing=group.routing),
        settings,
    )
    spec = engine_spec(target, parse_deployment(group.text("layout")), scale=scale)
    info = dataclasses.replace(
        spec.info,
        pages=1 + group.number("cached_tokens") // PAGE_TOKENS,
        host_pages=group.number("host_pages") if "host_pages" in group.values else 0,
        copies_pages=group.values.get("copies_pages", True) is True,
    )
    return dataclasses.replace(spec, info=info)


def session_lines(points: Sequence[SessionPoint]) -> list[str]:
    """For people: each figure predicted beside measured, and how many of the judged ones lie within their band."""
    lines: list[str] = []
    for point in points:
        shown = "" if point.judged else f" (not judged: {point.note})"
        lines.append(
            f"{point.group}, {point.sessions} at once{shown}: {point.requests} requests, {point.measured_requests} "
            f"measured; steps within {point.band:.0%}, {point.run_band:.0%} of it from other runs"
        )
        for one in point.figures:
            unit, banded = FIGURES[one.name]
            least, most = one.band
            where = f", {'within' if one.inside else 'outside'} {least:,.4g} to {most:,.4g}" if banded else ""
            lines.append(f"  {unit:<56} {one.predicted:>11,.2f} {one.measured:>11,.2f} {one.error:>+8.1%}{where}")
    for platform in dict.fromkeys(point.platform for point in points if point.judged):
        mine = [one for point in points if point.judged and point.platform == platform for one in point.figures]
        banded_figures = [one for one in mine if FIGURES[one.name][1]]
        inside = sum(one.inside for one in banded_figures)
        lines.append(f"{platform} sessions: {inside} of {len(banded_figures)} judged figures within their band")
    return lines
