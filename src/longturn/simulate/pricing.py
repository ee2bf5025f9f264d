"""From step plans to their times: what a simulated executor asks of a cost model.

With a drafter, a step of the engine is a verified step: every decode row computes its last token and its drafts. How
many tokens it gains is settled elsewhere (`acceptance`); the engine counts one a step, so that it thinks of an answer
as so many steps long. Contexts are short by what was accepted beside, some hundred tokens of an answer at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from longturn.engine.records import RowWork
from longturn.simulate.cost.model import StepCost
from longturn.simulate.cost.options import KERNELS
from longturn.simulate.cost.step import StepShape


class StepModel(Protocol):
    """Times of steps, pure. `PlatformModel` has the cost model of a platform's kernels, `linear` one of whole steps."""

    @property
    def tokens_per_row(self) -> int:
        """Tokens that a decode row computes in a step: 1, or 1 and its drafts."""
        ...

    @property
    def attend_limit(self) -> int:
        """Most tokens that a query of a sparse layer attends to; 0 if there are none."""
        ...

    def step_ns(self, step: StepShape) -> int:
        """How long a step takes; the host's time counts where it is longer than the device's."""
        ...

    def exposed_ns(self, step: StepShape) -> int:
        """Host time before a step that finds the device idle."""
        ...

    def parts_ns(self, step: StepShape) -> Mapping[str, float]:
        """Device time by kernel, and under `host` what the host adds to it."""
        ...

    def band(self, step: StepShape) -> float:
        """Relative half-width of the uncertainty of `step_ns`."""
        ...


class PlatformModel:
    """Steps of one replica on a platform with kernel calibrations."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        drafter = cost.options.drafter
        self.tokens_per_row = 1 if drafter is None else 1 + drafter.drafts
        self.attend_limit = cost.shape.attend_limit
        self._host = cost.options.host

    def step_ns(self, step: StepShape) -> int:
        return self._cost.step_ns(step)

    def exposed_ns(self, step: StepShape) -> int:
        # Not overlapped, it is part of every step already.
        return self._host.ns(step.rows + len(step.chunks)) if self._host.overlap else 0

    def parts_ns(self, step: StepShape) -> Mapping[str, float]:
        found = self._cost.breakdown(step)
        parts = dict(zip(KERNELS, map(float, found.ns), strict=True))
        parts["host"] = float(found.step_ns - found.device_ns)
        return parts

    def band(self, step: StepShape) -> float:
        found = self._cost.breakdown(step)
        return found.band_ns / found.step_ns if found.step_ns else 0.0


def shape_of(work: Sequence[RowWork], tokens_per_row: int, attend_limit: int) -> StepShape:
    """The shape of a plan's work: decode rows, and chunks of prompts."""
    rows = context = attended = samples = 0
    chunks: list[tuple[int, int]] = []
    for item in work:
        if item.count == 1 and item.samples:
            rows += 1
            seen = item.start + tokens_per_row
            context += seen
            attended += seen if seen < attend_limit else attend_limit
        else:
            chunks.append((item.start, item.count))
            samples += item.samples
    tokens = rows * tokens_per_row
    return StepShape(rows, tokens, context, attended * tokens_per_row, tuple(chunks), tokens + samples)


def shapes_after(work: Sequence[RowWork], steps: int, tokens_per_row: int, attend_limit: int) -> list[StepShape]:
    """Shapes of the steps after one that decodes, if its rows go on: as `shape_of` has them."""
    rows, tokens = len(work), len(work) * tokens_per_row
    seen = [item.start + tokens_per_row for item in work]
    context = sum(seen)
    growing = [one for one in seen if one < attend_limit]
    full = (rows - len(growing)) * attend_limit
    found = []
    for more in range(1, steps + 1):
        attended = full + sum(min(one + more, attend_limit) for one in growing)
        found.append(StepShape(rows, tokens, context + more * rows, attended * tokens_per_row, (), tokens))
    return found
