"""Everything measured at one point of a sweep: one configuration at one concurrency.

Latencies are in seconds. Latency, speed and volume belong together, since each can be bought with another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from longturn.bench.metrics import NS_PER_S, Distribution, distribution, e2e_s, itl_s, lag_s, ttft_s
from longturn.bench.records import Answer, TurnRecord


@dataclass(frozen=True, slots=True)
class Interactivity:
    """Tokens per second as one user sees them: 1 / statistic(ITL), so a percentile is the slow tail."""

    mean: float
    p50: float
    p75: float
    p90: float
    """Nine of ten responses are at least this fast."""
    p95: float
    p99: float


@dataclass(frozen=True, slots=True)
class TurnTail:
    """Latencies of the turns number `first` to `last` of their sessions, from 0, both included."""

    first: int
    last: int
    ttft_s: Distribution | None
    itl_s: Distribution | None
    e2e_s: Distribution | None


@dataclass(frozen=True, slots=True)
class PointMetrics:
    requests: int
    errors: int
    error_kinds: dict[str, int]
    """How often each error came; the text up to its first colon."""
    duration_s: float
    """First start to last end of successful requests."""
    prompt_tokens: int
    cached_tokens: int | None
    """None if the server told no such count for any request, which is not the same as 0."""
    output_tokens: int
    total_tokens_per_s_per_chip: float | None
    """Input, cached too, and output."""
    input_tokens_per_s_per_chip: float | None
    cached_tokens_per_s_per_chip: float | None
    output_tokens_per_s_per_chip: float | None
    hit_rate: float | None
    """Measured: cached prompt tokens / prompt tokens, of the requests for which the server told both."""
    ttft_s: Distribution | None
    itl_s: Distribution | None
    e2e_s: Distribution | None
    e2e_per_output_token_s: Distribution | None
    """End-to-end time / output tokens: shows an ITL that was bought with TTFT."""
    lag_s: Distribution | None
    """Of all requests, failed ones too: how late the client was."""
    interactivity: Interactivity | None
    itl_coverage: float | None
    """Share of successful requests that have an ITL; percentiles of few of them say little."""
    turns: tuple[TurnTail, ...]


def interactivity(itl: Distribution | None) -> Interactivity | None:
    """Interactivity from a distribution of ITL; None where every token came at once."""
    if itl is None or min(itl.mean, itl.p50) <= 0:
        return None
    return Interactivity(1 / itl.mean, 1 / itl.p50, 1 / itl.p75, 1 / itl.p90, 1 / itl.p95, 1 / itl.p99)


def measure(records: Sequence[TurnRecord], *, chips: int) -> PointMetrics:
    """The metrics of a run.

    Args:
        records: the measured turns; warm-up is left out by the caller.
        chips: accelerators (or CPU sockets) of the whole deployment, prefill and decode together.

    Raises:
        ValueError: no chips.
    """
    if chips < 1:
        raise ValueError(f"chips must be at least 1, not {chips}")
    answers = [record.answer for record in records]
    good = [answer for answer in answers if answer.ok]
    duration = (max(a.end_ns for a in good) - min(a.sent_ns for a in good)) / NS_PER_S if good else 0.0
    prompt = sum(answer.prompt_tokens or 0 for answer in good)
    output = sum(answer.output_tokens or 0 for answer in good)
    told = [a for a in good if a.cached_tokens is not None and a.prompt_tokens is not None]
    cached = sum(answer.cached_tokens or 0 for answer in told) if told else None
    told_prompt = sum(answer.prompt_tokens or 0 for answer in told)

    def rate(tokens: int | None) -> float | None:
        return tokens / duration / chips if tokens is not None and duration > 0 else None

    itl = distribution(map(itl_s, good))
    return PointMetrics(
        requests=len(answers),
        errors=len(answers) - len(good),
        error_kinds=_error_kinds(answers),
        duration_s=duration,
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        total_tokens_per_s_per_chip=rate(prompt + output),
        input_tokens_per_s_per_chip=rate(prompt),
        cached_tokens_per_s_per_chip=rate(cached),
        output_tokens_per_s_per_chip=rate(output),
        hit_rate=cached / told_prompt if cached is not None and told_prompt else None,
        ttft_s=distribution(map(ttft_s, good)),
        itl_s=itl,
        e2e_s=distribution(map(e2e_s, good)),
        e2e_per_output_token_s=distribution(e2e_s(a) / a.output_tokens for a in good if a.output_tokens),
        lag_s=distribution(map(lag_s, answers)),
        interactivity=interactivity(itl),
        itl_coverage=(itl.count if itl else 0) / len(good) if good else None,
        turns=turn_tails(records),
    )


def turn_tails(records: Iterable[TurnRecord]) -> tuple[TurnTail, ...]:
    """Latencies by turn number, in groups 0, 1, 2-3, 4-7, 8-15 ...: late turns are few, and a tail needs many."""
    groups: dict[int, list[TurnRecord]] = {}
    for record in records:
        if record.answer.ok:
            groups.setdefault(record.index.bit_length(), []).append(record)
    tails = []
    for bits, turns in sorted(groups.items()):
        answers = [turn.answer for turn in turns]
        first = 0 if bits == 0 else 1 << (bits - 1)
        tails.append(
            TurnTail(
                first=first,
                last=max(first, (1 << bits) - 1),
                ttft_s=distribution(map(ttft_s, answers)),
                itl_s=distribution(map(itl_s, answers)),
                e2e_s=distribution(map(e2e_s, answers)),
            )
        )
    return tuple(tails)


def _error_kinds(answers: Iterable[Answer]) -> dict[str, int]:
    kinds = Counter(answer.error.partition(":")[0] for answer in answers if answer.error is not None)
    return dict(sorted(kinds.items()))
