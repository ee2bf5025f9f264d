"""Expected experts and the slowest rank, against counting draws."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from longturn.errors import ConfigError
from longturn.simulate.cost.routing import BALANCED, UNIFORM, Routing, RoutingTable, distinct_experts, popularity


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(1, 4.0), (2, 7.9), (4, 15.3), (8, 28.7), (16, 51.0), (32, 81.7), (64, 111.0), (128, 125.8)],
)
def test_uniform_routing_by_the_closed_form(tokens: int, expected: float) -> None:
    """128 experts, 4 a token: 128 (1 - (31/32)^tokens)."""
    assert distinct_experts(tokens, 128, 4, UNIFORM) == pytest.approx(expected, abs=0.25)


def test_popularity_adds_up_and_spreads_as_said() -> None:
    share = popularity(128, 4, 20.0)
    assert share.sum() == pytest.approx(4.0)
    assert share.max() / share.min() == pytest.approx(20.0, rel=0.05)
    extreme = popularity(8, 4, 1e6)
    assert extreme.sum() == pytest.approx(4.0)
    assert extreme.max() <= 1.0


def draw(tokens: int, share: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """How often each expert is chosen when each token picks it independently with its share."""
    return rng.binomial(tokens, share)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("tokens", [1, 8, 64, 2048])
def test_the_slowest_rank_against_drawing(ranks: int, tokens: int) -> None:
    rng = np.random.Generator(np.random.PCG64(7))
    share = popularity(128, 4, 20.0)
    touched, loads = [], []
    for _ in range(400):
        counts = draw(tokens, rng.permutation(share), rng).reshape(ranks, -1)
        touched.append((counts > 0).sum(axis=1).max())
        loads.append(counts.sum(axis=1).max())
    found = RoutingTable(128, 4, ranks, Routing()).slowest(tokens)
    # One token cannot be on more than its four experts: there the model is bounded and the draws are not.
    tolerance = 0.35 if tokens == 1 else 0.12
    assert found.experts == pytest.approx(np.mean(touched), rel=tolerance)
    assert found.choices == pytest.approx(np.mean(loads), rel=tolerance)


def test_more_tokens_never_load_a_rank_less() -> None:
    table = RoutingTable(128, 4, 4, Routing())
    loads = [table.slowest(tokens) for tokens in range(1, 700)]
    for before, after in itertools.pairwise(loads):
        assert after.experts >= before.experts - 1e-9
        assert after.choices >= before.choices - 1e-9


def test_bounds() -> None:
    for routing in (Routing(), UNIFORM, BALANCED):
        for ranks in (1, 4):
            table = RoutingTable(128, 4, ranks, routing)
            for tokens in (1, 3, 100, 5000):
                load = table.slowest(tokens)
                assert tokens * 4 / ranks <= load.choices + 1e-9
                assert load.choices <= tokens * 4
                assert load.experts <= min(128 / ranks, tokens * 4) + 1e-9


def test_the_same_every_time() -> None:
    first, second = (RoutingTable(128, 4, 8, Routing()).slowest(77) for _ in range(2))
    assert first == second


def test_experts_must_divide() -> None:
    with pytest.raises(ConfigError, match="128 experts cannot be spread over 3"):
        RoutingTable(128, 4, 3, UNIFORM)
