"""How much of a ratio each of several switches accounts for.

Two configurations A and B differ in some switches; a figure m of both has the ratio m(B) / m(A). Ratios multiply, so
all arithmetic is on natural logarithms, where shares add up: a switch whose effect is log 2 of a total of log 8 has a
third of it. A switch has no single effect of its own where switches interact, so three are told:

- on alone: m(A with the switch) / m(A);
- off alone: m(B) / m(B without the switch);
- in sequence: what it adds when the switches are thrown one after the other. These alone multiply to the whole ratio,
  and depend on the order.

The interaction is the whole less the sum of the effects on alone: more than 0 where switches help one another, less
where they do the same work twice. Where every combination was measured the mean over all orders is told too (Shapley,
A Value for n-Person Games, 1953).

Runs of one configuration differ. Their spread is pooled over all configurations, since two or three runs of each say
little alone, and it is taken to be the same share of every figure. An effect whose 95 % interval (Student's t) holds 0
is noise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

Combination = frozenset[str]
"""The switches that are on, as in B; all others are as in A."""

_T_95: tuple[float, ...] = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)
"""Two-sided 95 % quantile of Student's t for 1, 2, 3 ... 30 degrees of freedom."""
_T_LARGE = 2.0


class Verdict(Enum):
    """What the spread between runs says of an effect."""

    REAL = "real"
    NOISE = "noise"
    """Its 95 % interval holds 0: no effect."""
    UNKNOWN = "unknown"
    """No configuration ran twice."""


@dataclass(frozen=True, slots=True)
class Effect:
    """One ratio, as its natural logarithm."""

    log: float
    margin: float | None
    """Half of its 95 % interval; None if no configuration ran twice."""

    @property
    def ratio(self) -> float:
        return math.exp(self.log)

    @property
    def verdict(self) -> Verdict:
        if self.margin is None:
            return Verdict.UNKNOWN
        return Verdict.NOISE if abs(self.log) <= self.margin else Verdict.REAL


@dataclass(frozen=True, slots=True)
class SwitchEffect:
    """What one switch does. None where a combination that it needs has no figure."""

    name: str
    on_alone: Effect | None
    off_alone: Effect | None
    in_sequence: Effect | None
    mean_of_orders: Effect | None
    """None unless every combination has a figure."""


@dataclass(frozen=True, slots=True)
class Attribution:
    """How the ratio of one figure comes about."""

    a: float
    """Geometric mean of A's runs."""
    b: float
    total: Effect
    switches: tuple[SwitchEffect, ...]
    """In the order of the sequence."""
    interaction: Effect | None
    """The whole less the sum of the effects on alone."""
    run_spread: float | None
    """Standard deviation of one run around its configuration's mean, as a share of the figure; None if unknown."""
    degrees_of_freedom: int

    def share(self, effect: Effect | None) -> float | None:
        """Which part of the whole logarithm an effect is; None where the whole is not told from noise."""
        if effect is None or self.total.verdict is Verdict.NOISE or self.total.log == 0:
            return None
        return effect.log / self.total.log


def needed(switches: Sequence[str]) -> list[Combination]:
    """The combinations that tell each switch on alone, off alone and in sequence: A first, then B, no one twice."""
    everything = frozenset(switches)
    sequence = [frozenset(switches[:count]) for count in range(len(switches) + 1)]
    alone = [frozenset((name,)) for name in switches]
    without = [everything - {name} for name in switches]
    return list(dict.fromkeys([frozenset(), everything, *alone, *without, *sequence]))


def attribute(switches: Sequence[str], runs: Mapping[Combination, Sequence[float]]) -> Attribution:
    """Split the ratio between no switch and all switches.

    Args:
        switches: in the order in which the sequence throws them.
        runs: figures of each combination that was measured, one for each run, all finite and more than 0.

    Raises:
        ValueError: no switch, one is there twice, A or B has no run, or a figure is not finite and more than 0.
    """
    if not switches or len(set(switches)) != len(switches):
        raise ValueError(f"switches must be there, once each, not {list(switches)}")
    logs: dict[Combination, list[float]] = {}
    for combination, figures in runs.items():
        if not all(math.isfinite(figure) and figure > 0 for figure in figures):
            raise ValueError(f"figures must be finite and more than 0, not {list(figures)}")
        if figures:
            logs[combination] = [math.log(figure) for figure in figures]
    nothing, everything = frozenset[str](), frozenset(switches)
    for name, combination in (("A", nothing), ("B", everything)):
        if combination not in logs:
            raise ValueError(f"{name} has no run")
    measured = _Measured(logs)
    total = measured.sum([(1.0, everything), (-1.0, nothing)])
    assert total is not None
    effects = tuple(_switch(measured, switches, place) for place in range(len(switches)))
    # total - sum(m(s) - m(nothing)), with the terms of one combination together: they are not independent.
    parts = [(1.0, everything), *((-1.0, frozenset((name,))) for name in switches), (len(switches) - 1.0, nothing)]
    return Attribution(
        a=math.exp(measured.mean(nothing)),
        b=math.exp(measured.mean(everything)),
        total=total,
        switches=effects,
        interaction=measured.sum(parts) if len(switches) > 1 else Effect(0.0, measured.no_margin()),
        run_spread=measured.spread,
        degrees_of_freedom=measured.freedom,
    )


def _switch(measured: _Measured, switches: Sequence[str], place: int) -> SwitchEffect:
    name, everything = switches[place], frozenset(switches)
    alone, before = frozenset((name,)), frozenset(switches[:place])
    return SwitchEffect(
        name=name,
        on_alone=measured.sum([(1.0, alone), (-1.0, frozenset())]),
        off_alone=measured.sum([(1.0, everything), (-1.0, everything - alone)]),
        in_sequence=measured.sum([(1.0, before | alone), (-1.0, before)]),
        mean_of_orders=measured.sum(_shapley(switches, name)),
    )


def _shapley(switches: Sequence[str], name: str) -> list[tuple[float, Combination]]:
    """Weights of all combinations in the mean over all orders of what a switch adds."""
    others = [other for other in switches if other != name]
    parts: list[tuple[float, Combination]] = []
    for count in range(len(others) + 1):
        weight = 1 / (len(switches) * math.comb(len(others), count))
        for chosen in itertools.combinations(others, count):
            parts += [(weight, frozenset((*chosen, name))), (-weight, frozenset(chosen))]
    return parts


class _Measured:
    """Logarithms of all runs, and the spread that they share."""

    def __init__(self, logs: Mapping[Combination, Sequence[float]]) -> None:
        self._logs = logs
        self.freedom = sum(len(found) - 1 for found in logs.values())
        squares = sum((value - self.mean(key)) ** 2 for key, found in logs.items() for value in found)
        self.spread = math.sqrt(squares / self.freedom) if self.freedom else None

    def mean(self, combination: Combination) -> float:
        found = self._logs[combination]
        return math.fsum(found) / len(found)

    def sum(self, parts: Sequence[tuple[float, Combination]]) -> Effect | None:
        """A weighted sum of means and its margin; None if one of them was not measured."""
        weights: dict[Combination, float] = {}
        for weight, combination in parts:
            weights[combination] = weights.get(combination, 0.0) + weight
        kept = {combination: weight for combination, weight in weights.items() if weight}
        if any(combination not in self._logs for combination in kept):
            return None
        log = math.fsum(weight * self.mean(combination) for combination, weight in kept.items())
        if self.spread is None:
            return Effect(log, None)
        variance = math.fsum(weight**2 / len(self._logs[combination]) for combination, weight in kept.items())
        quantile = _T_95[self.freedom - 1] if self.freedom <= len(_T_95) else _T_LARGE
        return Effect(log, quantile * self.spread * math.sqrt(variance))

    def no_margin(self) -> float | None:
        """Margin of what is 0 by definition."""
        return None if self.spread is None else 0.0
