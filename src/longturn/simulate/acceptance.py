"""How many drafts of a row are accepted: drawn per request and step, from how often each position survives.

A draft counts if all before it were accepted, so one number describes a position: the share of verified steps in which
its draft and all before it are accepted. One draw a step settles it, from a stream of the request's own. So the tokens
that a request gains do not depend on what else runs, and a comparison of two machines compares equal luck.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from longturn.errors import ConfigError

RULES = ("positions", "synthetic")
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Of one drafter with a fixed number of drafts. Without drafts every step brings one token."""

    survival: tuple[float, ...] = ()
    """Share of steps in which the first 1, 2, ... drafts are all accepted."""
    seed: int = 0

    @property
    def mean(self) -> float:
        """Tokens a row gains in a step, its own included."""
        return 1.0 + sum(self.survival)

    def progress(self, name: str, tokens: int) -> tuple[int, ...]:
        """Tokens that a request has after each step that samples for it, until it has `tokens` of them.

        Args:
            name: of the request; with the seed it settles every draw.
            tokens: at least 1. The step that ends its prompt brings the first, and nothing was drafted for it.
        """
        if not self.survival:
            return tuple(range(1, tokens + 1))
        draw = random.Random(f"{self.seed}:{name}").random
        survival = self.survival
        found = [1]
        total = 1
        while total < tokens:
            luck = draw()
            total += 1
            for share in survival:
                if luck >= share:
                    break
                total += 1
            found.append(min(total, tokens))
        return tuple(found)


def survival_of(lengths: Sequence[float], drafts: int) -> tuple[float, ...]:
    """How often each position survives, from mean acceptance lengths.

    A position survives as often as one draft more adds tokens: the differences of the lengths measured with 1, 2, ...
    drafts. Where noise makes one larger than the one before it, both share their mean; what is then below 0 is 0, and
    the others are less in proportion, so that their sum is the length measured with `drafts`.

    Args:
        lengths: mean tokens a step with 1, 2, ... drafts, the target's own included.
        drafts: proposed in a step.

    Raises:
        ConfigError: no length is known for so many drafts, or the lengths cannot be.
    """
    if not 0 < drafts <= len(lengths):
        raise ConfigError(f"no acceptance length is known for {drafts} drafts")
    total = lengths[drafts - 1] - 1.0
    pools: list[tuple[float, int]] = []
    before = 1.0
    for length in lengths[:drafts]:
        mean, count = length - before, 1
        before = length
        while pools and pools[-1][0] < mean:
            earlier, several = pools.pop()
            mean, count = (mean * count + earlier * several) / (count + several), count + several
        pools.append((mean, count))
    if total < 0.0 or pools[0][0] > 1.0 + _ROUNDING:
        raise ConfigError(f"{drafts} drafts cannot have an acceptance length of {lengths[drafts - 1]}")
    shares = [max(0.0, mean) for mean, count in pools for _ in range(count)]
    factor = total / sum(shares) if total > 0.0 else 0.0
    return tuple(min(1.0, share * factor) for share in shares)


def synthetic_survival(length: float, drafts: int) -> tuple[float, ...]:
    """The benchmark's rule for synthetic acceptance: the whole part of a length always, the rest as a coin toss.

    Args:
        length: mean tokens a step, the target's own included.
        drafts: proposed in a step.

    Raises:
        ConfigError: so many drafts cannot have that length.
    """
    if not 1.0 <= length <= drafts + 1.0:
        raise ConfigError(f"{drafts} drafts cannot have an acceptance length of {length}")
    return tuple(min(1.0, max(0.0, length - 1.0 - number)) for number in range(drafts))
