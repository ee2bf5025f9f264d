"""Metrics of whole jobs. A job is one session, or one session tree with its subagents: what a person waits for.

Request metrics can look well while jobs get slower: a cache that evicts sessions costs every turn a little, and a job
all of it. So job time is shown beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from longturn.bench.metrics import NS_PER_S, Distribution, distribution
from longturn.bench.records import TurnRecord

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Job:
    name: str
    start_ns: int
    """Its first request was sent."""
    end_ns: int
    """Its last response ended."""
    complete: bool
    """Every planned turn was answered. A job that was cut short or failed has no job time."""

    @property
    def time_s(self) -> float:
        return (self.end_ns - self.start_ns) / NS_PER_S


@dataclass(frozen=True, slots=True)
class JobMetrics:
    started: int
    completed: int
    """Completed inside the window."""
    per_hour: float | None
    per_hour_per_chip: float | None
    time_s: Distribution | None
    """Job time, the recorded pauses between turns included."""


def jobs_from_turns(records: Iterable[TurnRecord], planned_turns: Mapping[str, int]) -> list[Job]:
    """One job for each session that has a record, in the order of their starts.

    Args:
        records: the measured turns.
        planned_turns: how many turns each session should have; a session that it lacks counts as cut short.
    """
    sessions: dict[str, list[TurnRecord]] = {}
    for record in records:
        sessions.setdefault(record.session, []).append(record)
    jobs = [
        Job(
            name=name,
            start_ns=min(turn.answer.sent_ns for turn in turns),
            end_ns=max(turn.answer.end_ns for turn in turns),
            complete=sum(turn.answer.ok for turn in turns) == planned_turns.get(name, -1),
        )
        for name, turns in sessions.items()
    ]
    return sorted(jobs, key=lambda job: (job.start_ns, job.name))


def job_metrics(jobs: Sequence[Job], *, chips: int, window_ns: tuple[int, int] | None = None) -> JobMetrics:
    """Jobs per hour and the distribution of job times.

    Args:
        jobs: all that started.
        chips: accelerators (or CPU sockets) that served them.
        window_ns: steady window; only jobs that end in it are credited, so that neither the ramp at the start nor the
            drain at the end counts. First start to last end if None.

    Raises:
        ValueError: no chips, or a window that ends before it starts.
    """
    if chips < 1:
        raise ValueError(f"chips must be at least 1, not {chips}")
    if not jobs and window_ns is None:
        return JobMetrics(0, 0, None, None, None)
    low, high = window_ns or (min(job.start_ns for job in jobs), max(job.end_ns for job in jobs))
    if high < low:
        raise ValueError(f"the window ends {low - high} ns before it starts")
    done = [job for job in jobs if job.complete and low <= job.end_ns <= high]
    window_s = (high - low) / NS_PER_S
    per_hour = len(done) * SECONDS_PER_HOUR / window_s if window_s > 0 else None
    return JobMetrics(
        started=len(jobs),
        completed=len(done),
        per_hour=per_hour,
        per_hour_per_chip=None if per_hour is None else per_hour / chips,
        time_s=distribution(job.time_s for job in done),
    )
