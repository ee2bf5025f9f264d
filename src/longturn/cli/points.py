"""From measured metrics (seconds) to the figures of a point's file (milliseconds)."""

from __future__ import annotations

from collections.abc import Iterable

from longturn.bench.job_metrics import JobMetrics
from longturn.bench.metrics import Distribution
from longturn.bench.point_metrics import Interactivity, PointMetrics
from longturn.bench.records import TurnRecord
from longturn.report.point import Jobs, Measured, Speeds, Spread, Timeline, TreeRequest, TurnTail


def measured_figures(
    metrics: PointMetrics, jobs: JobMetrics | None = None, theoretical_hit_rate: float | None = None
) -> Measured:
    """The figures as the file has them."""
    return Measured(
        requests=metrics.requests,
        errors=metrics.errors,
        error_kinds=metrics.error_kinds,
        duration_ms=round(metrics.duration_s * 1000, 3),
        prompt_tokens=metrics.prompt_tokens,
        cached_tokens=metrics.cached_tokens,
        output_tokens=metrics.output_tokens,
        total_tokens_per_s=metrics.total_tokens_per_s_per_chip,
        input_tokens_per_s=metrics.input_tokens_per_s_per_chip,
        cached_tokens_per_s=metrics.cached_tokens_per_s_per_chip,
        output_tokens_per_s=metrics.output_tokens_per_s_per_chip,
        hit_rate=metrics.hit_rate,
        theoretical_hit_rate=theoretical_hit_rate,
        ttft_ms=_spread_ms(metrics.ttft_s),
        itl_ms=_spread_ms(metrics.itl_s),
        e2e_ms=_spread_ms(metrics.e2e_s),
        e2e_per_output_token_ms=_spread_ms(metrics.e2e_per_output_token_s),
        lag_ms=_spread_ms(metrics.lag_s),
        itl_coverage=metrics.itl_coverage,
        interactivity=_speeds(metrics.interactivity),
        turns=tuple(
            TurnTail(
                first=tail.first,
                last=tail.last,
                ttft_ms=_spread_ms(tail.ttft_s),
                itl_ms=_spread_ms(tail.itl_s),
                e2e_ms=_spread_ms(tail.e2e_s),
            )
            for tail in metrics.turns
        ),
        jobs=_jobs(jobs),
    )


def _speeds(speeds: Interactivity | None) -> Speeds | None:
    if speeds is None:
        return None
    return Speeds(mean=speeds.mean, p50=speeds.p50, p75=speeds.p75, p90=speeds.p90, p95=speeds.p95, p99=speeds.p99)


def _jobs(jobs: JobMetrics | None) -> Jobs | None:
    if jobs is None:
        return None
    return Jobs(
        started=jobs.started,
        completed=jobs.completed,
        per_hour=jobs.per_hour,
        per_hour_per_chip=jobs.per_hour_per_chip,
        time_ms=_spread_ms(jobs.time_s),
    )


def tree_timeline(session: str, records: Iterable[tuple[str, TurnRecord]], start_ns: int) -> Timeline:
    """One session tree, request by request.

    Args:
        session: the tree's name.
        records: its turns, each with the name of the agent that sent it.
        start_ns: start of the measurement on the records' clock.
    """

    def ms(at_ns: int) -> float:
        return round((at_ns - start_ns) / 1e6, 3)

    requests = [
        TreeRequest(
            agent=agent,
            index=record.index,
            start_ms=ms(record.answer.sent_ns),
            first_ms=ms(record.answer.chunks[0].at_ns) if record.answer.chunks else None,
            end_ms=ms(record.answer.end_ns),
            prompt_tokens=record.answer.prompt_tokens,
            cached_tokens=record.answer.cached_tokens,
            output_tokens=record.answer.output_tokens,
            error=record.answer.error,
        )
        for agent, record in records
    ]
    return Timeline(session=session, requests=tuple(sorted(requests, key=lambda one: one.start_ms)))


def _spread_ms(seconds: Distribution | None) -> Spread | None:
    """Milliseconds, rounded to the nanosecond: what is finer is rounding of the arithmetic."""
    if seconds is None:
        return None

    def ms(value: float) -> float:
        return round(value * 1000, 6)

    return Spread(
        count=seconds.count,
        mean=ms(seconds.mean),
        std=ms(seconds.std),
        min=ms(seconds.min),
        p50=ms(seconds.p50),
        p75=ms(seconds.p75),
        p90=ms(seconds.p90),
        p95=ms(seconds.p95),
        p99=ms(seconds.p99),
        max=ms(seconds.max),
    )
