"""Points made by hand for tests of the schema, the store and the page of a sweep."""

from __future__ import annotations

from typing import Any

import msgspec

from longturn.report.point import (
    Engine,
    Jobs,
    Layout,
    Measured,
    Model,
    Platform,
    Point,
    Quality,
    ServerSample,
    Speculation,
    Speeds,
    Spread,
    Timeline,
    Traces,
    TreeRequest,
    TurnTail,
    Validity,
)
from longturn.report.schema import Environment


def spread(p50: float, p90: float) -> Spread:
    return Spread(
        count=60,
        mean=p50 * 1.1,
        std=(p90 - p50) / 2,
        min=p50 / 2,
        p50=p50,
        p75=(p50 + p90) / 2,
        p90=p90,
        p95=p90 * 1.2,
        p99=p90 * 1.5,
        max=p90 * 2,
    )


def speeds(itl: Spread) -> Speeds:
    return Speeds(
        mean=1000 / itl.mean, p50=1000 / itl.p50, p75=1000 / itl.p75, p90=1000 / itl.p90, p95=1000 / itl.p95,
        p99=1000 / itl.p99,
    )  # fmt: skip


def metrics(total: float | None, interactivity_p90: float, **changes: Any) -> Measured:
    itl = spread(900 / interactivity_p90, 1000 / interactivity_p90)
    ttft = 30_000 / interactivity_p90
    values: dict[str, Any] = {
        "requests": 64,
        "errors": 0,
        "duration_ms": 1_200_000.0,
        "prompt_tokens": 9_000_000,
        "cached_tokens": 8_700_000,
        "output_tokens": 30_000,
        "total_tokens_per_s": total,
        "input_tokens_per_s": None if total is None else total * 0.99,
        "cached_tokens_per_s": None if total is None else total * 0.96,
        "output_tokens_per_s": None if total is None else total * 0.01,
        "hit_rate": 8.7 / 9,
        "theoretical_hit_rate": 0.981,
        "interactivity": speeds(itl),
        "ttft_ms": spread(ttft, 2.5 * ttft),
        "itl_ms": itl,
        "e2e_ms": spread(ttft + 440 * itl.p50, 2.5 * ttft + 900 * itl.p90),
        "lag_ms": spread(0.2, 0.9),
        "itl_coverage": 1.0,
        "turns": tuple(
            TurnTail(
                first=a, last=b, ttft_ms=spread(ttft * k, 2 * ttft * k), itl_ms=itl, e2e_ms=spread(9e3 * k, 2e4 * k)
            )
            for a, b, k in ((0, 0, 2.0), (1, 1, 0.6), (2, 3, 0.7), (4, 7, 0.9), (8, 15, 1.1), (16, 31, 1.4))
        ),
        "jobs": Jobs(
            started=9,
            completed=7,
            per_hour=21.0,
            per_hour_per_chip=None if total is None else total / 4000,
            time_ms=spread(4e7 / interactivity_p90, 7e7 / interactivity_p90),
        ),
    }
    return Measured(**{**values, **changes})


def point(configuration: str, concurrency: int, total: float | None, interactivity_p90: float, **changes: Any) -> Point:
    """A point; `chip`, `quantisation` and `metrics` (a dict of changes) are shorthands."""
    chip = changes.pop("chip", "H200")
    quantisation = changes.pop("quantisation", "nvfp4")
    figures = metrics(total, interactivity_p90, **changes.pop("metrics", {}))
    values: dict[str, Any] = {
        "configuration": configuration,
        "concurrency": concurrency,
        "created": "2026-11-29T12:00:00Z",
        "command": f"longturn bench agentx --url http://host:8000 --concurrency {concurrency} --seed 42",
        "source": "measured",
        "engine": Engine(name="longturn", version="0.1.0"),
        "model": Model(name="MiniMax-M3", quantisation=quantisation, kv_cache="fp8"),
        "platform": Platform(
            chip=chip, chips=4, price_per_chip_hour=2.9, price_basis="3-year rental", power_w_per_chip=1730.0
        ),
        "traces": Traces(name="weka-062126", seed=42, preset="agentx"),
        "validity": Validity(valid=True),
        "metrics": figures,
        "layout": Layout(tensor=4),
        "flags": {"scheduler.max_tokens": "16384"},
        "speculation": Speculation(mode="synthetic", method="eagle3", draft_tokens=3, acceptance_length=2.83),
        "quality": Quality(reference="bf16", perplexity_delta=0.004, top1_agreement=0.973),
        "client": "longturn 0.1.0",
        "environment": Environment("0.1.0", "3.11.7", None, "Linux 6.1 x86_64", "A CPU", 16, 8 << 30),
    }
    return Point(**{**values, **changes})


def sweep() -> list[Point]:
    """Two configurations: one with a dominated and an invalid point."""
    on = [(1, 5200.0, 118.0), (2, 9800.0, 104.0), (4, 17400.0, 86.0), (8, 27900.0, 61.0), (16, 36800.0, 37.0)]
    off = [(1, 3900.0, 96.0), (2, 6900.0, 84.0), (4, 11200.0, 66.0), (8, 15900.0, 41.0), (16, 18300.0, 22.0)]
    points = [point("session cache", *values) for values in on]
    points += [point("plain LRU", *values) for values in off]
    points.append(point("plain LRU", 6, 9000.0, 50.0))
    points.append(
        point(
            "session cache", 32, 41000.0, 25.0,
            validity=Validity(valid=False, reasons=("context_overflow_rate 2.1 % is over 1 %",)),
            metrics={"errors": 3, "error_kinds": {"HTTP 400": 3}},
        )
    )  # fmt: skip
    return points


def timeline() -> Timeline:
    """Five requests: a subagent works beside the session, and one request fails."""
    rows = [
        ("session", 0, 0.0, 9_000.0, 15_000.0, 40_000, 0, None),
        ("agent_001", 0, 16_000.0, 18_000.0, 30_000.0, 12_000, 0, None),
        ("session", 1, 19_000.0, 20_500.0, 26_000.0, 44_000, 39_936, None),
        ("agent_001", 1, 31_000.0, None, 33_000.0, None, None, "HTTP 500: no"),
        ("session", 2, 40_000.0, 41_000.0, 52_000.0, 47_000, 43_904, None),
    ]
    return Timeline(
        session="fix-tests",
        requests=tuple(
            TreeRequest(
                agent=agent,
                index=index,
                start_ms=start,
                first_ms=first,
                end_ms=end,
                prompt_tokens=prompt,
                cached_tokens=cached,
                output_tokens=None if error else 400,
                error=error,
            )
            for agent, index, start, first, end, prompt, cached, error in rows
        ),
    )


def server() -> tuple[ServerSample, ...]:
    return tuple(
        ServerSample(at_ms=2000.0 * k, running=k % 7, waiting=max(0, k % 9 - 5), cache_used=min(1.0, k / 20))
        for k in range(30)
    )


def changed(original: Point, **changes: Any) -> Point:
    return msgspec.structs.replace(original, **changes)
