"""Results made by hand for tests of the schema and the page."""

from __future__ import annotations

from longturn.report.schema import Environment, Result, Run, Totals, TurnResult


def turn(index: int, ttft_ms: float | None, cached: int | None, label: str = "read_file", **more: object) -> TurnResult:
    values = {
        "session": "s",
        "index": index,
        "label": label,
        "prompt_tokens": 1000 + 300 * index,
        "cached_tokens": cached,
        "output_tokens": 40,
        "ttft_ms": ttft_ms,
        "itl_ms": 20.0,
        "e2e_ms": 900.0,
        "lag_ms": 0.4,
    }
    return TurnResult(**{**values, **more})  # type: ignore[arg-type]


def totals(ttft_sum_ms: float, cached: int) -> Totals:
    return Totals(
        requests=2,
        errors=0,
        prompt_tokens=2300,
        cached_tokens=cached,
        output_tokens=80,
        hit_rate=cached / 2300,
        duration_ms=5000.0,
        ttft_sum_ms=ttft_sum_ms,
        ttft_p50_ms=ttft_sum_ms / 2,
        ttft_p90_ms=ttft_sum_ms / 2,
        itl_p50_ms=20.0,
        itl_p90_ms=25.0,
        e2e_p50_ms=900.0,
        e2e_p90_ms=950.0,
        interactivity_p50=50.0,
        interactivity_p90=40.0,
        total_tokens_per_s=476.0,
        output_tokens_per_s=16.0,
        lag_max_ms=0.4,
    )


def result(**changes: object) -> Result:
    on = Run("cache on", "longturn serve", (turn(0, 2000.0, 0), turn(1, 400.0, 896)), totals(2400.0, 896), False)
    off = Run("cache off", "longturn serve --set x", (turn(0, 2000.0, 0), turn(1, 2800.0, 0)), totals(4800.0, 0), False)
    values = {
        "title": "A session",
        "created": "2026-11-29T12:00:00Z",
        "command": "longturn demo",
        "model": "tiny",
        "sessions": ("s",),
        "description": "Two turns.",
        "lanes": 1,
        "pause_scale": 0.25,
        "fixed_output": True,
        "separate_caches": True,
        "environment": Environment("0.1.0", "3.11.7", "2.13.0", "Linux 6.1 x86_64", "A CPU", 2, 8 << 30),
        "runs": (on, off),
    }
    return Result(**{**values, **changes})  # type: ignore[arg-type]
