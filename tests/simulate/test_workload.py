"""Sessions stretched to medians that are only described."""

from __future__ import annotations

import statistics

import pytest

from longturn.bench.hit_rate import hit_rate
from longturn.errors import ConfigError
from longturn.simulate.workload import Stretch, stretched
from tests.simulate.sessions import tree


def medians(trees: list) -> tuple[float, float]:  # type: ignore[type-arg]
    requests = [request for one in trees for request in one.requests()]
    return (
        statistics.median(request.input_tokens for request in requests),
        statistics.median(request.output_tokens for request in requests),
    )


def test_medians_become_what_was_asked_for_and_hits_stay() -> None:
    trees = [tree(f"t{n}", turns=6, start=800 + 90 * n, step=24, out=10 + 3 * n) for n in range(5)]
    longer, by = stretched(trees, 9_000, 44)
    before, after = medians(trees), medians(longer)
    assert after[0] == pytest.approx(9_000, rel=0.15) and after[1] == 44, "blocks here have 4 tokens"
    assert by == Stretch(9_000 / before[0], 44 / before[1])
    assert hit_rate(longer).by_tokens == pytest.approx(hit_rate(trees).by_tokens, abs=1e-9)
    assert [one.requests for one in longer[0].conversations] != [one.requests for one in trees[0].conversations]
    gaps = [[request.gap_s for request in one.requests()] for one in (trees[0], longer[0])]
    assert gaps[0] == gaps[1], "pauses stay"


def test_nothing_asked_for_changes_nothing() -> None:
    trees = [tree("s", turns=3, start=100)]
    same, by = stretched(trees, None, None)
    assert same == trees and by == Stretch()


@pytest.mark.parametrize(("median_input", "complaint"), [(0, "at least 1"), (1, "would hold none")])
def test_medians_that_cannot_be(median_input: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        stretched([tree("s", start=100)], median_input, None)
