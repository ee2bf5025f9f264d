"""From step plans to their times: what a simulated executor asks of a cost model.

Speculation. The engine moves a row by one token a step. An engine with a drafter moves it by as many as are accepted,
so as many of our steps as the mean acceptance length has stand for one verified step: they are one *round*. A round's
first step pays for verifying; the others of it bring their tokens at once and pay for nothing but what their chunks add
to the round. So chunks and rows of a round are one set of matrix products, tokens come in bursts, and a round costs
what the verified step costs. Rounds have whole numbers of steps whose mean is the acceptance length. A prompt's end
ends the round, since the row that begins there is verified in the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

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
    def accepted(self) -> float:
        """Mean tokens that a decode row gains in a step; 1 without speculation."""
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
        self.accepted = 1.0 if drafter is None else drafter.accepted()
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


class Price(NamedTuple):
    ns: int
    """By how much this step ends later than the one before it."""
    told_ns: int
    """What the engine is told that it took: verifying spread evenly over the steps of a round, so that the scheduler
    learns what a token costs."""


class Pricer:
    """Prices the steps of one engine, in the order of their launch."""

    __slots__ = ("_chunks", "_credit", "_left", "_limit", "_model", "_paid_ns", "_rows", "_samples", "_scale", "_shape",
                 "_tokens", "_verify_ns")  # fmt: skip

    def __init__(self, model: StepModel, *, scale: float = 1.0) -> None:
        """
        Args:
            model: of steps.
            scale: all steps take this many times as long: for the ends of an uncertainty band.
        """
        self._model = model
        self._scale = scale
        self._tokens = model.tokens_per_row
        self._limit = model.attend_limit
        self._credit = 0.0
        """Steps that rounds so far fell short of the acceptance length."""
        self._left = 0
        """Steps that this round may still have."""
        self._rows = StepShape()
        """Decode rows of this round, from its step with the most."""
        self._chunks: tuple[tuple[int, int], ...] = ()
        self._samples = 0
        self._paid_ns = 0
        self._verify_ns = -1
        """What this round's rows would take without chunks; -1 where it was not asked for."""
        self._shape = StepShape()

    @property
    def round(self) -> tuple[StepShape, int]:
        """The round so far as one step, and its time."""
        return self._shape, self._paid_ns

    @property
    def ends_round(self) -> bool:
        """Whether the next step begins another round."""
        return self._left == 0

    def price(self, work: Sequence[RowWork], idle: bool) -> Price:
        """The next step.

        Args:
            work: of its plan.
            idle: the device has nothing to do: a new round begins, after host time that nothing hides.
        """
        rows, chunks, samples = self._read(work)
        begins = idle or self._left == 0
        if begins:
            self._begin()
        self._left -= 1
        if rows.rows > self._rows.rows:
            self._rows = rows
            self._verify_ns = -1
        self._chunks += chunks
        self._samples += samples
        most = self._rows
        shape = StepShape(
            most.rows, most.row_tokens, most.context_tokens, most.attended_tokens, self._chunks,
            most.samples + self._samples,
        )  # fmt: skip
        model = self._model
        if not begins and not chunks and shape.rows == self._shape.rows:
            total_ns = self._paid_ns
        else:
            total_ns = round(model.step_ns(shape) * self._scale)
        ns = told_ns = max(0, total_ns - self._paid_ns)
        if rows.rows and model.accepted != 1.0:
            if self._verify_ns < 0:
                self._verify_ns = round(model.step_ns(most) * self._scale) if self._chunks else total_ns
            told_ns = round(self._verify_ns / model.accepted)
            if chunks:
                told_ns += max(0, ns - (self._verify_ns if begins else 0))
        self._shape, self._paid_ns = shape, max(total_ns, self._paid_ns)
        if samples:
            # A row whose prompt ends here is verified with the next round at the earliest.
            if most.rows:
                self._credit += self._left
            self._left = 0
        if idle:
            ns += model.exposed_ns(shape)
        return Price(ns, told_ns)

    def _begin(self) -> None:
        self._credit += self._model.accepted
        self._left = max(1, int(self._credit))
        self._credit -= self._left
        self._rows = StepShape()
        self._chunks = ()
        self._samples = 0
        self._paid_ns = 0
        self._verify_ns = -1

    def _read(self, work: Sequence[RowWork]) -> tuple[StepShape, tuple[tuple[int, int], ...], int]:
        """Decode rows, chunks, and how many chunks end their prompt."""
        each, limit = self._tokens, self._limit
        rows = context = attended = samples = 0
        chunks: list[tuple[int, int]] = []
        for item in work:
            if item.count == 1 and item.samples:
                rows += 1
                seen = item.start + each
                context += seen
                attended += seen if seen < limit else limit
            else:
                chunks.append((item.start, item.count))
                samples += item.samples
        return StepShape(rows, rows * each, context, attended * each, (), rows * each), tuple(chunks), samples
