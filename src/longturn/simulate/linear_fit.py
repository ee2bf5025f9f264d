"""Constants of `linear` from steps that were measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longturn.errors import ConfigError
from longturn.simulate.cost.formulas import pairs
from longturn.simulate.cost.step import StepShape
from longturn.simulate.fit.solver import Array, solve
from longturn.simulate.linear import LinearModel, StepConstants

FEWEST_STEPS = 12
_START_NS = (2e6, 3e5, 20.0, 2e5, 1e5, 5.0)
"""First guesses for a small model on a CPU; the fit moves them by orders of magnitude if it must."""


@dataclass(frozen=True, slots=True)
class TimedStep:
    step: StepShape
    ns: float
    """Median of some repetitions."""


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One measured request that ran alone."""

    cached_tokens: int
    prompt_tokens: int
    ttft_ns: float
    output_tokens: int = 0
    output_ns: float = 0.0
    """From the first to the last of them."""


def fit_steps(steps: Sequence[TimedStep], host_ns: float) -> StepConstants:
    """Constants whose relative errors are least, and how large those are.

    Args:
        steps: decode steps of several sizes and contexts, chunks of several lengths and starts, and both together.
        host_ns: between two steps, measured apart.

    Raises:
        ConfigError: too few steps, or none with chunks, or none with rows.
    """
    if len(steps) < FEWEST_STEPS:
        raise ConfigError(f"fitting needs at least {FEWEST_STEPS} measured steps, not {len(steps)}")
    with_chunks = sum(bool(one.step.chunks) for one in steps)
    if not with_chunks or not any(one.step.rows for one in steps):
        raise ConfigError("fitting needs steps with decode rows and steps with chunks")
    table = np.array([_features(one.step) for one in steps])

    def predict(constants: Array) -> Array:
        return np.asarray(table @ constants, dtype=np.float64)

    solution = solve(predict, _START_NS, np.array([one.ns for one in steps]))
    residual = solution.residual()
    fixed, row, context, chunk, token, pair = (float(f"{value:.6g}") for value in solution.constants)
    return StepConstants(
        fixed_ns=fixed,
        row_ns=row,
        context_ns=context,
        chunk_ns=chunk,
        chunk_token_ns=token,
        pair_ns=pair,
        host_ns=float(f"{host_ns:.6g}"),
        request_ns=0.0,
        rms=residual.rms,
        worst=residual.worst,
        steps=len(steps),
    )


def fit_request_ns(constants: StepConstants, requests: Sequence[TimedRequest], step_tokens: int) -> float:
    """What requests that ran alone waited for their first token beside their steps, median.

    Args:
        constants: of steps.
        requests: measured, at concurrency 1.
        step_tokens: largest chunk.

    Raises:
        ConfigError: no requests.
    """
    if not requests:
        raise ConfigError("no measured request has a first token")
    model = LinearModel(constants)
    left = []
    for request in requests:
        ns = constants.host_ns  # before the first step, which finds the device idle
        for start in range(request.cached_tokens, request.prompt_tokens, step_tokens):
            count = min(step_tokens, request.prompt_tokens - start)
            ns += model.step_ns(StepShape(chunks=((start, count),), samples=1))
        left.append(request.ttft_ns - ns)
    return max(0.0, statistics.median(left))


def fit_run(constants: StepConstants, requests: Sequence[TimedRequest]) -> float:
    """By how much, relative, time between tokens of requests that ran alone differs from what steps alone say, median.

    Raises:
        ConfigError: no request has two tokens.
    """
    model = LinearModel(constants)
    ratios = []
    for request in requests:
        if request.output_tokens > 1:
            context = request.prompt_tokens + request.output_tokens // 2
            step = StepShape(rows=1, row_tokens=1, context_tokens=context, samples=1)
            ratios.append(request.output_ns / (request.output_tokens - 1) / model.step_ns(step))
    if not ratios:
        raise ConfigError("no measured request has two tokens")
    return abs(statistics.median(ratios) - 1.0)


def _features(step: StepShape) -> tuple[float, ...]:
    scored = sum(pairs(float(start + count)) - pairs(float(start)) for start, count in step.chunks)
    return (
        1.0,
        float(step.rows),
        float(step.context_tokens),
        float(bool(step.chunks)),
        float(step.chunk_tokens),
        scored,
    )
