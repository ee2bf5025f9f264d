"""Which layouts a sweep tries, and how many sessions one of them holds at a speed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from longturn.simulate.deployment import Deployment
from longturn.simulate.layout import Layout


def candidates(most_chips: int) -> list[Deployment]:
    """Every power of two up to `most_chips`: attention and experts split alike, experts spread over the same chips, or
    attention data parallel. One replica each: figures are per chip, and replicas behind a session router add up."""
    found: list[Deployment] = []
    chips = 1
    while chips <= most_chips:
        layouts = [Layout(chips, chips, 1)]
        if chips > 1:
            layouts += [Layout(chips, chips, chips), Layout(chips, 1, chips)]
        if chips > 2:
            layouts.append(Layout(chips, chips, chips // 2))
        found += [Deployment(1, layout) for layout in layouts]
        chips *= 2
    return found


def most_sessions(loads: Iterable[tuple[int, float]], speed: float) -> tuple[int, bool] | None:
    """How many sessions at once one deployment serves at a speed or faster.

    Args:
        loads: sessions at once and the speed that each has; between two of them it is taken to fall in a line.
        speed: wanted.

    Returns:
        The sessions, and whether there may be room for more than the largest load that was tried; None if the smallest
        one is slower already.
    """
    known = sorted(loads)
    if not known or known[0][1] < speed:
        return None
    for (fewer, faster), (more, slower) in itertools.pairwise(known):
        if slower < speed:
            return math.floor(fewer + (more - fewer) * (faster - speed) / (faster - slower)), False
    return known[-1][0], True
