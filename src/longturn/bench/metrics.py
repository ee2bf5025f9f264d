"""The metrics, as pure functions over records.

Definitions:
- TTFT: request sent to first output. Output is text, reasoning or a tool call part, not an empty role event.
- ITL: inter-token latency of the full response, (end - first output) / (output tokens - tokens of the first event).
  Gaps between events are not it: an event may bundle tokens, and a parser may hold back text.
- Output speed: 1 / ITL.
- Interactivity pXX: 1 / pXX(ITL). That is the slow tail: at P90, nine of ten responses are at least that fast. It is
  not the 90th percentile of output speed, which is the fast tail.
- Throughput counts input (cached too) and output over first start to last end of successful requests.
- Hit rate: cached prompt tokens / prompt tokens.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from longturn.bench.records import Answer

NS_PER_S = 1e9


def percentile(values: Sequence[float], p: float) -> float:
    """Percentile `p` (0..100) with linear interpolation between the two nearest ranks.

    Raises:
        ValueError: no values, or `p` outside 0..100.
    """
    if not values:
        raise ValueError("a percentile needs at least one value")
    if not 0 <= p <= 100:
        raise ValueError(f"p must be between 0 and 100, not {p}")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * p / 100
    low = math.floor(rank)
    high = math.ceil(rank)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean, spread and percentiles of one quantity, in that quantity's own unit."""

    count: int
    total: float
    mean: float
    std: float
    """Population standard deviation: the values are the whole run, not a sample of one."""
    min: float
    p50: float
    p75: float
    p90: float
    p95: float
    p99: float
    max: float


def distribution(values: Iterable[float | None]) -> Distribution | None:
    """The distribution of the values that exist; None if there are none."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    p50, p75, p90, p95, p99 = (percentile(known, p) for p in (50, 75, 90, 95, 99))
    total, mean = math.fsum(known), statistics.fmean(known)
    spread = statistics.pstdev(known, mean)
    return Distribution(len(known), total, mean, spread, known[0], p50, p75, p90, p95, p99, known[-1])


def ttft_s(answer: Answer) -> float | None:
    """Seconds from send to first output; None if there was none."""
    if not answer.ok or not answer.chunks:
        return None
    return (answer.chunks[0].at_ns - answer.sent_ns) / NS_PER_S


def e2e_s(answer: Answer) -> float:
    """Seconds from send to the end of the stream."""
    return (answer.end_ns - answer.sent_ns) / NS_PER_S


def lag_s(answer: Answer) -> float:
    """Seconds by which the client sent later than its schedule."""
    return (answer.sent_ns - answer.intended_ns) / NS_PER_S


def itl_s(answer: Answer) -> float | None:
    """Seconds per output token after the first event; None where there is no later token to time."""
    if not answer.ok or not answer.chunks or answer.output_tokens is None:
        return None
    first = answer.chunks[0]
    # Without the server's word the first event counts as one token, as the field's tools do.
    later_tokens = answer.output_tokens - (1 if first.tokens is None else first.tokens)
    if later_tokens < 1:
        return None
    return (answer.end_ns - first.at_ns) / NS_PER_S / later_tokens


def output_tokens_per_s(answer: Answer) -> float | None:
    """Output speed of one response, 1 / ITL."""
    itl = itl_s(answer)
    return 1 / itl if itl else None


def interactivity_tokens_per_s(answers: Iterable[Answer], p: float) -> float | None:
    """1 / pXX(ITL): at p=90 nine of ten responses are at least this fast. None if no response has an ITL."""
    itls = [itl for answer in answers if (itl := itl_s(answer)) is not None]
    tail = percentile(itls, p) if itls else 0.0
    return 1 / tail if tail > 0 else None


@dataclass(frozen=True, slots=True)
class Summary:
    """Totals of a run. Latencies in seconds; None where nothing could be measured."""

    requests: int
    errors: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    hit_rate: float | None
    duration_s: float
    total_tokens_per_s: float | None
    output_tokens_per_s: float | None
    ttft_sum_s: float
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    itl_p50_s: float | None
    itl_p90_s: float | None
    e2e_p50_s: float | None
    e2e_p90_s: float | None
    interactivity_p50: float | None
    interactivity_p90: float | None
    lag_max_s: float


def summarise(answers: Sequence[Answer]) -> Summary:
    """Totals over the successful answers; errors are only counted."""
    good = [answer for answer in answers if answer.ok]
    ttfts = [value for answer in good if (value := ttft_s(answer)) is not None]
    itls = [value for answer in good if (value := itl_s(answer)) is not None]
    e2es = [e2e_s(answer) for answer in good]
    prompt = sum(answer.prompt_tokens or 0 for answer in good)
    cached = sum(answer.cached_tokens or 0 for answer in good)
    output = sum(answer.output_tokens or 0 for answer in good)
    duration = (max(a.end_ns for a in good) - min(a.sent_ns for a in good)) / NS_PER_S if good else 0.0
    return Summary(
        requests=len(answers),
        errors=len(answers) - len(good),
        prompt_tokens=prompt,
        cached_tokens=cached,
        output_tokens=output,
        hit_rate=cached / prompt if prompt else None,
        duration_s=duration,
        total_tokens_per_s=(prompt + output) / duration if duration > 0 else None,
        output_tokens_per_s=output / duration if duration > 0 else None,
        ttft_sum_s=sum(ttfts),
        ttft_p50_s=_percentile_or_none(ttfts, 50),
        ttft_p90_s=_percentile_or_none(ttfts, 90),
        itl_p50_s=_percentile_or_none(itls, 50),
        itl_p90_s=_percentile_or_none(itls, 90),
        e2e_p50_s=_percentile_or_none(e2es, 50),
        e2e_p90_s=_percentile_or_none(e2es, 90),
        interactivity_p50=interactivity_tokens_per_s(good, 50),
        interactivity_p90=interactivity_tokens_per_s(good, 90),
        lag_max_s=max((lag_s(answer) for answer in answers), default=0.0),
    )


def _percentile_or_none(values: Sequence[float], p: float) -> float | None:
    return percentile(values, p) if values else None
