"""The record of one point: one configuration measured at one concurrency, with what is needed to measure it again.

A point stands alone in its file: points of many runs, machines and engines are put on one page, so each carries its own
conditions. Times are milliseconds, rates tokens per second and chip, ratios 0..1. Reading is strict as for replays.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from longturn.report.schema import Environment, RecordFile, kind_of

POINT_KIND = "longturn-point"
POINT_VERSION = 1


class Spread(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Distribution of one quantity."""

    count: int
    mean: float
    std: float
    min: float
    p50: float
    p75: float
    p90: float
    p95: float
    p99: float
    max: float


class Speeds(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Interactivity, tokens per second: 1 / statistic(ITL), so a percentile is the slow tail."""

    mean: float
    p50: float
    p75: float
    p90: float
    p95: float
    p99: float


class TurnTail(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The turns number `first` to `last` (from 0) of their sessions."""

    first: int
    last: int
    ttft_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None


class Jobs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Whole sessions, or session trees."""

    started: int
    completed: int
    per_hour: float | None
    per_hour_per_chip: float | None
    time_ms: Spread | None


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The figures of a point."""

    requests: int
    errors: int
    duration_ms: float
    """First start to last end of successful measured requests."""
    prompt_tokens: int
    output_tokens: int
    total_tokens_per_s: float | None
    """Input, cached too, and output; per chip as the others."""
    input_tokens_per_s: float | None
    output_tokens_per_s: float | None
    interactivity: Speeds | None
    ttft_ms: Spread | None
    itl_ms: Spread | None
    """Of the full response: (end - first output) / (output tokens - tokens of the first event)."""
    e2e_ms: Spread | None
    cached_tokens: int | None = None
    """None if the server reports no such count, which is not the same as 0."""
    cached_tokens_per_s: float | None = None
    hit_rate: float | None = None
    theoretical_hit_rate: float | None = None
    """What an unbounded cache of one session tree would reach on the same requests."""
    e2e_per_output_token_ms: Spread | None = None
    lag_ms: Spread | None = None
    """How much later than scheduled the client sent."""
    itl_coverage: float | None = None
    """Share of successful requests that have an ITL."""
    error_kinds: dict[str, int] = {}
    turns: tuple[TurnTail, ...] = ()
    jobs: Jobs | None = None


class Engine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    version: str


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    quantisation: str
    """Weights as served: `bf16`, `mxfp8`, `nvfp4`, `q4_1` ..."""
    kv_cache: str | None = None
    """Data type of the KV cache, where it differs from the model's."""
    revision: str | None = None


class Platform(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    chip: str
    chips: int
    """All chips of the deployment, prefill and decode together."""
    name: str | None = None
    price_per_chip_hour: float | None = None
    currency: str = "USD"
    price_basis: str | None = None
    """What the price is: `3-year rental`, `owned`, with its date."""
    power_w_per_chip: float | None = None
    power_basis: str | None = None
    """`provisioned`, `measured at the board` ..."""


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Parallel layout."""

    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    data: int = 1
    prefill_chips: int = 0
    """More than 0 where prefill and decode are on chips of their own."""


class Traces(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    seed: int
    preset: str | None = None
    digest: str | None = None
    """Hash of the trace files."""
    scale_context: float = 1.0
    max_context: int | None = None
    """Longer requests were dropped."""
    dropped_requests: int = 0


class Speculation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    mode: Literal["off", "real", "synthetic"] = "off"
    """Synthetic: tokens are accepted at a fixed rate, so speed is real and text is not."""
    method: str | None = None
    draft_tokens: int | None = None
    acceptance_length: float | None = None


class Quality(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Against a reference precision of the same model."""

    reference: str
    perplexity_delta: float | None = None
    """Relative: +0.01 is 1 % worse."""
    top1_agreement: float | None = None
    mean_kl: float | None = None
    max_kl: float | None = None


class Validity(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    valid: bool
    reasons: tuple[str, ...] = ()
    """Why it is invalid; for a valid point, what a reader should know before comparing it."""


class TreeRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One request of the tree in a `Timeline`. Times since the start of the measurement."""

    agent: str
    """The conversation that sent it: the session itself, or one of its subagents."""
    index: int
    start_ms: float
    first_ms: float | None
    """First output."""
    end_ms: float
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None
    error: str | None = None


class Timeline(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One session tree of the run, request by request."""

    session: str
    requests: tuple[TreeRequest, ...]


class ServerSample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """State of the server at one moment. None where it does not tell."""

    at_ms: float
    """Since the start of the measurement."""
    running: int | None = None
    """Requests being computed."""
    waiting: int | None = None
    cache_used: float | None = None
    """Share of the pages that running requests hold."""


class Bound(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A point's figures at one end of its uncertainty."""

    interactivity: Speeds | None
    total_tokens_per_s: float | None
    output_tokens_per_s: float | None
    ttft_ms: Spread | None


class Band(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How uncertain a point is that was not measured."""

    relative: float
    """Half-width of the uncertainty of a step's time."""
    slow: Bound
    """What all steps taking that much longer makes of it."""
    fast: Bound
    basis: str
    """Where the half-width comes from."""


class Point(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    configuration: str
    """Name of the curve to which the point belongs."""
    concurrency: int
    """Live session trees."""
    created: str
    """UTC, ISO 8601."""
    command: str
    """What a reader types to measure it again."""
    source: Literal["measured", "simulated", "published"]
    engine: Engine
    model: Model
    platform: Platform
    traces: Traces
    validity: Validity
    metrics: Measured
    layout: Layout = Layout()
    flags: dict[str, str] = {}
    """Settings that differ from the engine's defaults."""
    speculation: Speculation = Speculation()
    quality: Quality | None = None
    client: str | None = None
    """Load client and its version: results of different clients are not comparable unseen."""
    environment: Environment | None = None
    timeline: Timeline | None = None
    server: tuple[ServerSample, ...] = ()
    band: Band | None = None
    """Of a simulated point."""
    kind: str = POINT_KIND
    version: int = POINT_VERSION


def is_point(data: bytes) -> bool:
    """Whether the data says that it is a point, readable or not by this version."""
    return kind_of(data) == POINT_KIND


def point_id(data: bytes) -> str:
    """Name of a point: 16 hex digits of the hash of its JSON as it lies in the file."""
    return hashlib.sha256(data).hexdigest()[:16]


def _problems(point: Point) -> Iterator[tuple[str, str]]:
    """Figures that no measurement gives; a page must not draw them."""
    if not point.configuration.strip():
        yield "configuration", "is empty"
    for place, count in (("concurrency", point.concurrency), ("platform.chips", point.platform.chips)):
        if count < 1:
            yield place, f"must be at least 1, not {count}"
    rates: dict[str, Any] = {
        "platform.price_per_chip_hour": point.platform.price_per_chip_hour,
        "platform.power_w_per_chip": point.platform.power_w_per_chip,
        "metrics.total_tokens_per_s": point.metrics.total_tokens_per_s,
        "metrics.input_tokens_per_s": point.metrics.input_tokens_per_s,
        "metrics.cached_tokens_per_s": point.metrics.cached_tokens_per_s,
        "metrics.output_tokens_per_s": point.metrics.output_tokens_per_s,
    }
    speeds = point.metrics.interactivity
    rates |= {f"metrics.interactivity.{k}": v for k, v in msgspec.structs.asdict(speeds).items()} if speeds else {}
    band = point.band
    if band is not None:
        if not 0 <= band.relative < 1:
            yield "band.relative", f"must be 0 or more and below 1, not {band.relative}"
        for end, bound in (("slow", band.slow), ("fast", band.fast)):
            if bound.interactivity is not None:
                speeds_of = msgspec.structs.asdict(bound.interactivity)
                rates |= {f"band.{end}.interactivity.{k}": v for k, v in speeds_of.items()}
            rates[f"band.{end}.total_tokens_per_s"] = bound.total_tokens_per_s
            rates[f"band.{end}.output_tokens_per_s"] = bound.output_tokens_per_s
    for place, value in rates.items():
        if value is not None and not (math.isfinite(value) and value >= 0):
            yield place, f"must be 0 or more, not {value}"
    for place, share in (("hit_rate", point.metrics.hit_rate), ("itl_coverage", point.metrics.itl_coverage)):
        if share is not None and not 0 <= share <= 1:
            yield f"metrics.{place}", f"must be between 0 and 1, not {share}"
    if not point.validity.valid and not point.validity.reasons:
        yield "validity.reasons", "is empty, though the point is invalid"


_FILE = RecordFile(Point, POINT_KIND, POINT_VERSION, _problems)
point_to_json, point_from_json, save_point, load_point = _FILE.to_json, _FILE.from_json, _FILE.save, _FILE.load
