"""From one measurement of `bench agentx` to its point, and from points to a table in the terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from longturn.bench.agentx import AgentTurn, Measurement
from longturn.bench.bodies import Api
from longturn.bench.job_metrics import job_metrics, jobs_from_turns
from longturn.bench.lanes import to_ns
from longturn.bench.point_metrics import measure as point_metrics
from longturn.bench.presets import Rules
from longturn.bench.traces.tree import SessionTree
from longturn.bench.tree_hits import replay_hit_rate
from longturn.bench.validity import judge
from longturn.cli.agentx_target import Kind
from longturn.cli.points import measured_figures, tree_timeline
from longturn.cli.results import environment
from longturn.cli.terminal import table
from longturn.cli.version import longturn_version
from longturn.report.page import count_text, percent_text, rate_text, seconds_text
from longturn.report.point import Engine, Model, Platform, Point, ServerSample, Timeline, Traces, Validity

_HIT_SLACK = 0.01
"""The measured rate counts tokens, the theoretical one whole blocks: they differ a little by nature."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What all points of a sweep share."""

    configuration: str
    command: str
    engine: Engine
    model: Model
    platform: Platform
    traces: Traces
    rules: Rules
    api: Api
    target: Kind
    carry_over: str
    """`recorded` or `live`."""
    weights: str | None
    """How the engine computes with the weights, if it tells."""
    run: str
    """Name of the run, in its prompts' markers."""
    derived_system: bool = False
    """System prompts were found in captures that declare none."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Of a Longturn engine, if it tells them: what differs from its defaults."""


def overrides(rules: Rules, traces: Traces, carry_over: str, derived_system: bool = False) -> tuple[str, ...]:
    """Settings that make results under a published preset something else."""
    if not rules.comparable:
        return ()
    found = []
    if rules.duration_s < rules.least_duration_s:
        found.append(f"duration {rules.duration_s:g} s where {rules.preset} needs {rules.least_duration_s:g} s")
    if traces.scale_context != 1:
        found.append(f"context scaled by {traces.scale_context:g}")
    if carry_over != "recorded":
        found.append(f"{carry_over} carry-over")
    if derived_system:
        found.append("derived system prompts")
    return tuple(found)


def make_point(setting: Setting, trees: Sequence[SessionTree], measured: Measurement, concurrency: int) -> Point:
    """The point of one concurrency."""
    records = [turn.record for turn in measured.turns]
    chips = setting.platform.chips
    end_ns = measured.start_ns + to_ns(measured.window_s)
    jobs = job_metrics(
        jobs_from_turns(records, measured.planned_turns), chips=chips, window_ns=(measured.start_ns, end_ns)
    )
    conduct = dataclasses.replace(
        measured.conduct,
        overrides=overrides(setting.rules, setting.traces, setting.carry_over, setting.derived_system),
    )
    verdict = judge(setting.rules, [turn.asked for turn in measured.turns], conduct)
    reasons = list(verdict.reasons)
    if setting.traces.dropped_requests:
        reasons.append(
            f"max_context: {setting.traces.dropped_requests} requests of more than {setting.traces.max_context} tokens "
            "were dropped"
        )
    if setting.carry_over == "live":
        reasons.append(_carried(measured, setting.api))
    good = [turn for turn in measured.turns if turn.record.answer.ok]
    hit = replay_hit_rate(trees, (turn.send.key for turn in good), (turn.prefix_tokens for turn in good))
    figures = measured_figures(point_metrics(records, chips=chips), jobs, hit)
    if hit is not None and figures.hit_rate is not None and figures.hit_rate > hit + _HIT_SLACK:
        reasons.append(
            f"shared_system_prompts: {100 * figures.hit_rate:.1f} % of input was cached, one session alone allows "
            f"{100 * hit:.1f} %: replays of a session share its system prompt, as the rules have it"
        )
    return Point(
        configuration=setting.configuration,
        concurrency=concurrency,
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        command=setting.command,
        source="measured",
        engine=setting.engine,
        model=setting.model,
        platform=setting.platform,
        traces=setting.traces,
        validity=Validity(valid=verdict.valid, reasons=tuple(reasons)),
        metrics=figures,
        flags={
            "api": setting.api,
            "target": setting.target,
            "carry_over": setting.carry_over,
            **setting.settings,
            **({"model.weights": setting.weights} if setting.weights is not None else {}),
            "run_id": setting.run,
            "duration_s": f"{setting.rules.duration_s:g}",
            "warmup_requests": str(measured.warmup_requests),
            **({"derive_system": "true"} if setting.derived_system else {}),
            "server_state": measured.server.summary,
        },
        client=f"longturn-bench {longturn_version()} ({setting.api}, {setting.target})",
        environment=environment(),
        timeline=_timeline(measured),
        server=_server(measured),
    )


def _carried(measured: Measurement, api: Api) -> str:
    """How far the answers came into the prompts, and what that did to the prompts' lengths."""
    good = [turn for turn in measured.turns if turn.record.answer.ok]
    later = [turn for turn in good if turn.send.key.index]
    off = [
        abs(turn.record.answer.prompt_tokens - turn.asked.input_tokens)
        for turn in good
        if turn.record.answer.prompt_tokens is not None
    ]
    why = ""
    if api == "completions" and good and not any(turn.record.answer.token_ids for turn in good):
        why = ": the server ignores `return_token_ids`, so recorded text stands in"
    return (
        f"live_carry_over: {sum(turn.prefix_tokens > 0 for turn in later)} of {len(later)} later turns hold the answer "
        f"before them, prompts are at most {max(off, default=0)} tokens off their recorded length{why}"
    )


def _timeline(measured: Measurement) -> Timeline | None:
    """The tree with the most requests, as the most telling."""
    trees: dict[str, list[AgentTurn]] = {}
    for turn in measured.turns:
        trees.setdefault(turn.record.session, []).append(turn)
    if not trees:
        return None
    name = max(trees, key=lambda session: len(trees[session]))
    return tree_timeline(name, ((turn.agent, turn.record) for turn in trees[name]), measured.start_ns)


def _server(measured: Measurement) -> tuple[ServerSample, ...]:
    """The server's state over the measurement and its drain."""
    return tuple(
        ServerSample(
            at_ms=round((state.at_ns - measured.start_ns) / 1e6, 1),
            running=state.running,
            waiting=state.waiting,
            cache_used=None if state.cache_used is None else round(state.cache_used, 4),
        )
        for state in measured.server.states
    )


def points_table(points: Sequence[Point]) -> str:
    """Latency, speed and volume of each concurrency."""
    head = ["trees", "requests", "failed", "hit rate", "possible", "TTFT p50", "p90", "ITL p50", "p90", "e2e p90"]
    head += ["tok/s/user p90", "tok/s/chip", "output", "jobs", "valid"]
    rows = []
    for point in points:
        found = point.metrics
        ttft, itl, e2e, speeds = found.ttft_ms, found.itl_ms, found.e2e_ms, found.interactivity
        rows.append(
            [
                str(point.concurrency),
                count_text(found.requests),
                count_text(found.errors),
                percent_text(found.hit_rate),
                percent_text(found.theoretical_hit_rate),
                seconds_text(ttft.p50 if ttft else None),
                seconds_text(ttft.p90 if ttft else None),
                seconds_text(itl.p50 if itl else None),
                seconds_text(itl.p90 if itl else None),
                seconds_text(e2e.p90 if e2e else None),
                rate_text(speeds.p90 if speeds else None),
                rate_text(found.total_tokens_per_s),
                rate_text(found.output_tokens_per_s),
                str(found.jobs.completed if found.jobs else 0),
                "yes" if point.validity.valid else "no",
            ]
        )
    return table(head, rows)


def reasons_text(points: Sequence[Point]) -> str:
    """Why points are invalid and what to know of the others, each reason once."""
    where: dict[str, list[int]] = {}
    for point in points:
        for reason in point.validity.reasons:
            where.setdefault(reason, []).append(point.concurrency)
    return "\n".join(f"at {', '.join(map(str, trees))}: {reason}" for reason, trees in where.items())
