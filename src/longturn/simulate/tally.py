"""Where simulated time goes: totals of all steps, and parts by kernel from every so many of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from longturn.simulate.cost.step import StepShape
from longturn.simulate.pricing import StepModel

SAMPLE_EVERY = 16
"""A breakdown costs as much as the step's price: every 16th step is enough for shares of millions."""
MOST_BAND = 0.95
"""Of those that runs are repeated with: a step is not made faster than a twentieth of its time."""


@dataclass(slots=True)
class Tally:
    """Of one engine, or of several added up."""

    model: StepModel
    steps: int = 0
    busy_ns: int = 0
    rows: int = 0
    chunk_tokens: int = 0
    sampled_ns: float = 0.0
    """Time of the sampled steps, as their parts add up."""
    band_ns: float = 0.0
    """Of the sampled steps, half-widths of their uncertainty."""
    parts_ns: dict[str, float] = field(default_factory=dict)
    """Of the sampled steps, by kernel."""

    def add(self, step: StepShape, step_ns: int) -> None:
        """A step (or a round of them, see `pricing`) that took `step_ns`."""
        if not step_ns:
            return
        self.busy_ns += step_ns
        self.rows += step.rows
        if step.chunks:
            self.chunk_tokens += step.chunk_tokens
        if self.steps % SAMPLE_EVERY == 0:
            parts = self.model.parts_ns(step)
            total = sum(parts.values())
            self.sampled_ns += total
            self.band_ns += total * self.model.band(step)
            for name, value in parts.items():
                self.parts_ns[name] = self.parts_ns.get(name, 0.0) + value
        self.steps += 1

    def clear(self) -> None:
        """Forget everything so far."""
        self.steps = self.busy_ns = self.rows = self.chunk_tokens = 0
        self.sampled_ns = self.band_ns = 0.0
        self.parts_ns = {}

    @property
    def band(self) -> float:
        """Relative half-width of the uncertainty of all steps' time together."""
        return self.band_ns / self.sampled_ns if self.sampled_ns else 0.0

    def shares(self) -> Mapping[str, float]:
        """Share of each kernel, and of the host, in the time of steps."""
        return {name: value / self.sampled_ns for name, value in self.parts_ns.items()} if self.sampled_ns else {}


def merged(tallies: Iterable[Tally]) -> Tally:
    """The sum of some tallies, at least one."""
    first, *others = tallies
    total = Tally(first.model, first.steps, first.busy_ns, first.rows, first.chunk_tokens, first.sampled_ns,
                  first.band_ns, dict(first.parts_ns))  # fmt: skip
    for one in others:
        total.steps += one.steps
        total.busy_ns += one.busy_ns
        total.rows += one.rows
        total.chunk_tokens += one.chunk_tokens
        total.sampled_ns += one.sampled_ns
        total.band_ns += one.band_ns
        for name, value in one.parts_ns.items():
            total.parts_ns[name] = total.parts_ns.get(name, 0.0) + value
    return total
