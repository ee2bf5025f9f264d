"""Which layouts a sweep tries."""

from __future__ import annotations

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
