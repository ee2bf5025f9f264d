"""Which experts a batch touches, and how unequal the ranks are that hold them.

Tokens of real text prefer some experts. With popularity spread log-uniformly between experts (`spread`: the most
popular one against the least), a batch of T tokens touches the sum over experts of 1 - (1 - q)^T, where q is the share
of tokens that choose it. `spread` 1 is uniform routing. The order of experts on ranks has nothing to do with
popularity, so the slowest rank is an average over shuffles, from a fixed seed: the same on every machine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longturn.errors import ConfigError

_SHUFFLES = 64
_SEED = 20260912
REFERENCE_SPREAD = 20.0


@dataclass(frozen=True, slots=True)
class Routing:
    """How tokens choose experts."""

    spread: float = REFERENCE_SPREAD
    """Popularity of the most popular expert against that of the least; 1 is uniform. The default is what reproduces
    the published tables' power-law rows (exponent 1.01) from their balanced rows; `longturn.simulate.fit` prints it."""
    balanced: bool = False
    """Every expert gets equally many tokens, as many experts as there are choices: what kernel benchmarks call
    balanced. `spread` is not used."""

    @property
    def unevenness(self) -> float:
        """0 if experts are equally popular, 1 at the spread that `ExpertConstants.uneven` is stated for."""
        return 0.0 if self.balanced else math.log(self.spread) / math.log(REFERENCE_SPREAD)


UNIFORM = Routing(spread=1.0)
BALANCED = Routing(spread=1.0, balanced=True)


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What the slowest rank has in one layer."""

    experts: float
    """Distinct experts whose weights it reads."""
    choices: float
    """Pairs of a token and one of its experts that it computes."""


def popularity(experts: int, top: int, spread: float) -> NDArray[np.float64]:
    """Share of tokens that choose each expert, `experts` values that add up to `top`, none over 1."""
    if not spread >= 1:
        raise ConfigError(f"routing spread must be at least 1, not {spread}")
    weight: NDArray[np.float64] = spread ** ((np.arange(experts) + 0.5) / experts)
    share: NDArray[np.float64] = weight / weight.sum() * top
    for _ in range(experts):
        over = share > 1.0
        if not over.any():
            break
        share[over] = 1.0
        rest = ~over & (share < 1.0)
        share[rest] *= (top - (~rest).sum()) / share[rest].sum()
    return share


def distinct_experts(tokens: float, experts: int, top: int, routing: Routing) -> float:
    """Expected experts, of all ranks, that `tokens` tokens touch."""
    if routing.balanced:
        return min(float(experts), top * tokens)
    return float((1.0 - (1.0 - popularity(experts, top, routing.spread)) ** tokens).sum())


class RoutingTable:
    """The slowest rank's load for any number of tokens: made once for a model, a routing and a number of ranks."""

    __slots__ = ("_experts", "_ranks", "_routing", "_share", "_shuffled", "_top")

    def __init__(self, experts: int, top: int, ranks: int, routing: Routing) -> None:
        if experts % ranks:
            raise ConfigError(f"{experts} experts cannot be spread over {ranks} ranks")
        self._experts, self._top, self._ranks, self._routing = experts, top, ranks, routing
        self._share = popularity(experts, top, routing.spread)
        shuffle = np.random.Generator(np.random.PCG64(_SEED))
        self._shuffled = np.stack([shuffle.permutation(self._share) for _ in range(_SHUFFLES)])

    def slowest(self, tokens: int) -> RankLoad:
        """Load of the slowest of the ranks: at least its equal share, at most everything."""
        choices = float(tokens * self._top)
        if self._routing.balanced:
            share = min(float(self._experts), choices) / self._ranks
            return RankLoad(max(share, min(1.0, choices)), max(choices / self._ranks, min(1.0, choices)))
        if self._ranks == 1:
            return RankLoad(float((1.0 - (1.0 - self._share) ** tokens).sum()), choices)
        ranked = self._shuffled.reshape(_SHUFFLES, self._ranks, -1)
        touched = 1.0 - (1.0 - ranked) ** tokens
        excess = _expected_excess(self._ranks)
        experts = _slowest_mean(touched.sum(axis=2), (touched * (1.0 - touched)).sum(axis=2), excess)
        load = _slowest_mean(tokens * ranked.sum(axis=2), (tokens * ranked * (1.0 - ranked)).sum(axis=2), excess)
        return RankLoad(
            min(experts, float(self._experts // self._ranks), choices), min(load, choices, float(tokens) * self._top)
        )


def _slowest_mean(mean: NDArray[np.float64], variance: NDArray[np.float64], excess: float) -> float:
    """Mean over shuffles of the expected maximum over ranks: the largest mean, or the spread of chance around the
    average if that is more."""
    chance = mean.mean(axis=1) + excess * np.sqrt(variance.mean(axis=1))
    return float(np.maximum(mean.max(axis=1), chance).mean())


def _expected_excess(ranks: int) -> float:
    """Expected maximum of `ranks` standard normal values (Blom's approximation)."""
    quantile = (ranks - 0.375) / (ranks + 0.25)
    return _normal_quantile(quantile)


def _normal_quantile(q: float) -> float:
    """Inverse of the normal distribution by bisection on erf: q in (0.5, 1)."""
    low, high = 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2.0
        if 0.5 * (1.0 + math.erf(middle / math.sqrt(2.0))) < q:
            low = middle
        else:
            high = middle
    return low
