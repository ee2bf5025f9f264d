"""Our own measured agent sessions, simulated by the same rules: those in the head of `benchmarks/gpu_sessions.py`.

Sessions with at least ten turns before the first prompt of more than 120,000 tokens, those turns alone; each starts at
40 % of them with the turn before computed; pauses are cut at 3 s and answers at 1,200 tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from longturn.bench.lanes import to_ns
from longturn.bench.presets import Rules
from longturn.bench.traces.tree import SessionTree
from longturn.config import PAGE_TOKENS
from longturn.engine.protocols import ExecutorInfo
from longturn.errors import ConfigError
from longturn.simulate.cost.options import CostOptions
from longturn.simulate.deployment import Target, engine_spec, parse_deployment
from longturn.simulate.formats import formats_named
from longturn.simulate.platform import load_platform
from longturn.simulate.published_data import Group
from longturn.simulate.replicas import EngineSpec
from longturn.simulate.runner import Run, simulate
from longturn.simulate.shapes import load_shape

MOST_TOKENS, LEAST_TURNS, START, MOST_GAP_S, MOST_OUTPUT, MOST_TURNS = 120_000, 10, 0.4, 3.0, 1200, 24


@dataclass(frozen=True, slots=True)
class SessionFigures:
    """One point. Each figure with the ends of its band: all steps slower, and faster."""

    group: str
    sessions: int
    requests: int
    """Simulated."""
    p90_tok_s_user: tuple[float, float, float]
    """Predicted, with slower steps, with faster steps."""
    total_tok_s: tuple[float, float, float]
    measured_requests: int
    measured_p90_tok_s_user: float
    measured_total_tok_s: float


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
        # The start point lies just behind the first turn, however short the pause after it.
        at_s += max(gap_s, 1e-3) if number else 0.0
        output = min(max(turn.output_tokens, 1), MOST_OUTPUT)
        kept.append(dataclasses.replace(turn, start_s=at_s, duration_s=0.0, gap_s=gap_s, output_tokens=output))
    conversation = dataclasses.replace(root, requests=tuple(kept))
    return dataclasses.replace(tree, conversations=(conversation,), arrival_s=0.0)


def own_sessions(group: Group, trees: Sequence[SessionTree]) -> list[SessionFigures]:
    """Simulate every point of a group of kind "sessions".

    Args:
        group: see there.
        trees: recorded sessions, as loaded without looking for agents in flattened captures.

    Raises:
        ConfigError: no session qualifies, or fewer than a point replays at once.
    """
    cut = own_trees(trees)
    found = []
    for place, count in enumerate(map(int, group.numbers("sessions"))):
        if count > len(cut):
            raise ConfigError(f"{group.name}: {count} sessions at once, {len(cut)} qualify in these traces")
        nominal, band, requests = _figures(group, cut[:count], 1.0)
        ends = [_figures(group, cut[:count], 1.0 + sign * band)[0] for sign in (1.0, -1.0)]
        speed, rate = zip(nominal, *ends, strict=True)
        found.append(
            SessionFigures(
                group.name,
                count,
                requests,
                speed,
                rate,
                int(group.numbers("requests")[place]),
                group.numbers("p90_tok_s_user")[place],
                group.numbers("total_tok_s")[place],
            )
        )
    return found


def _figures(group: Group, trees: Sequence[SessionTree], scale: float) -> tuple[tuple[float, float], float, int]:
    """(P90 tok/s/user, total tok/s) of requests that ended in time, the band of steps, and how many requests."""
    seconds = float(group.number("seconds"))
    # The start point lies between the first turn, which warms, and the second.
    share = 1e-9
    rules = Rules(
        preset="own", duration_s=seconds, least_duration_s=0.0, window=(share, share), seed=0, warmup_requests=0,
        warmup_grace_s=None, tree_idle_s=None, system_idle_s=None, error_limit=None, drain_s=600.0, comparable=False,
    )  # fmt: skip
    done = simulate(_spec(group, len(trees), scale), Run(trees, rules, len(trees), 0))
    end_ns = done.measurement.start_ns + to_ns(seconds)
    answers = [turn.record.answer for turn in done.measurement.turns]
    ended = [answer for answer in answers if answer.ok and answer.end_ns <= end_ns]
    if not ended:
        raise ConfigError(f"{group.name}: no simulated request ends within {seconds:g} s")
    gaps = sorted(
        (answer.end_ns - answer.chunks[0].at_ns) / (answer.output_tokens - 1)
        for answer in ended
        if answer.output_tokens is not None and answer.output_tokens > 1
    )
    speed = 1e9 / gaps[min(len(gaps) - 1, int(0.9 * len(gaps)))]
    span_ns = max(answer.end_ns for answer in ended) - min(answer.sent_ns for answer in ended)
    tokens = sum((answer.prompt_tokens or 0) + (answer.output_tokens or 0) for answer in ended)
    return (speed, tokens / span_ns * 1e9), done.tally.band, len(ended)


def _spec(group: Group, rows: int, scale: float) -> EngineSpec:
    settings = {
        "scheduler.max_running": rows,
        "scheduler.step_tokens": group.number("step_tokens"),
        "scheduler.target_itl_ms": 0.0,
    }
    target = Target(
        load_platform(group.text("platform")),
        load_shape(group.text("model")),
        formats_named(group.text("formats")),
        CostOptions(family=group.text("family")),
        settings,
    )
    spec = engine_spec(target, parse_deployment(group.text("layout")), scale=scale)
    info: ExecutorInfo = dataclasses.replace(spec.info, pages=1 + group.number("cached_tokens") // PAGE_TOKENS)
    return dataclasses.replace(spec, info=info)
