"""Least squares for a handful of positive constants.

Residuals are logarithms of predicted over measured time, so that a microsecond kernel counts as much as a millisecond
one, and constants are fitted as logarithms, so that they stay positive. Huber's loss keeps a misread row from bending
the fit. Levenberg and Marquardt's damping; the derivative is numerical, which is exact enough for smooth formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longturn.simulate.calibration import Residual

Array = NDArray[np.float64]

HUBER = 0.15
"""Relative error from which a row pulls no harder than linearly."""
_STEPS = 80
_NUDGE = 1e-5


@dataclass(frozen=True, slots=True)
class Solution:
    constants: Array
    log_ratio: Array
    """Of each row: log(predicted / measured)."""

    def residual(self, rows: NDArray[np.bool_] | None = None) -> Residual:
        """Relative root mean square and worst error, over all rows or some of them."""
        values = self.log_ratio if rows is None else self.log_ratio[rows]
        return residual_of(values)


def residual_of(log_ratio: Array) -> Residual:
    """Residual of log(predicted / measured) values, as relative errors."""
    if not len(log_ratio):
        return Residual(0.0, 0.0, 0)
    error = np.expm1(log_ratio)
    return Residual(round(float(np.sqrt((error**2).mean())), 4), round(float(np.abs(error).max()), 4), len(log_ratio))


def solve(predict: Callable[[Array], Array], start: Sequence[float], measured: Array) -> Solution:
    """Constants, near `start`, with which `predict` comes closest to `measured`.

    Args:
        predict: constants (all above 0) to predicted times, one for each measured one.
        start: first guess; its length is the number of constants.
        measured: times above 0.
    """
    log_measured = np.log(measured)
    point = np.log(np.asarray(start, dtype=np.float64))

    def residuals(at: Array) -> Array:
        return np.asarray(np.log(predict(np.exp(at))) - log_measured, dtype=np.float64)

    here = residuals(point)
    cost = _huber(here)
    damping = 1e-2
    for _ in range(_STEPS):
        slope = np.stack([(residuals(point + step) - here) / _NUDGE for step in np.eye(len(point)) * _NUDGE], axis=1)
        weight = np.minimum(1.0, HUBER / np.maximum(np.abs(here), 1e-12))[:, None]
        normal = (slope * weight).T @ slope
        gradient = (slope * weight).T @ here
        moved = False
        while damping < 1e12 and not moved:
            ridge = damping * np.diag(np.diag(normal) + 1e-9)
            trial = point - np.clip(np.linalg.solve(normal + ridge, gradient), -1.0, 1.0)
            there = residuals(trial)
            new = _huber(there)
            moved = bool(np.isfinite(new)) and new < cost
            damping = max(damping / 3.0, 1e-7) if moved else damping * 4.0
        if not moved:
            break
        gain = cost - new
        point, here, cost = trial, there, new
        if gain < 1e-10 * cost:
            break
    return Solution(np.exp(point), here)


def _huber(values: Array) -> float:
    size = np.abs(values)
    return float(np.where(size < HUBER, 0.5 * size**2, HUBER * (size - 0.5 * HUBER)).sum())
