"""Accepted drafts: means, positions, and streams that depend on seed and request alone."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longturn.errors import ConfigError
from longturn.simulate.acceptance import Acceptance, survival_of, synthetic_survival
from longturn.simulate.drafts import drafter_names, load_drafter

LENGTHS = [1.79, 2.39, 2.78, 3.02]


def gains(acceptance: Acceptance, name: str, tokens: int) -> list[int]:
    progress = acceptance.progress(name, tokens)
    return [after - before for before, after in itertools.pairwise(progress)]


def test_positions_by_hand() -> None:
    assert survival_of(LENGTHS, 3) == pytest.approx((0.79, 0.60, 0.39))
    assert synthetic_survival(2.78, 3) == pytest.approx((1.0, 0.78, 0.0))
    assert survival_of([1.5, 2.2, 2.3], 3) == pytest.approx((0.6, 0.6, 0.1)), "the first two share their mean"
    # The last length is shorter than the one before: nothing survives there, and the others make up the mean.
    shares = survival_of([1.8, 2.4, 2.3], 3)
    assert shares == pytest.approx((0.8 * 1.3 / 1.4, 0.6 * 1.3 / 1.4, 0.0))


@pytest.mark.parametrize("name", drafter_names())
def test_every_shipped_drafter_has_positions_that_make_up_its_length(name: str) -> None:
    drafts = 1
    while True:
        try:
            drafter = load_drafter(name, drafts)
        except ConfigError:
            break
        for shares in (survival_of(drafter.acceptance, drafts), synthetic_survival(drafter.accepted(), drafts)):
            assert len(shares) == drafts and list(shares) == sorted(shares, reverse=True)
            assert all(0.0 <= share <= 1.0 for share in shares)
            assert 1.0 + sum(shares) == pytest.approx(drafter.accepted())
        drafts += 1
    assert drafts > 5


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8))
def test_any_lengths_give_falling_shares_with_the_right_sum(shares: list[float]) -> None:
    lengths = [1.0 + sum(shares[: number + 1]) for number in range(len(shares))]
    found = survival_of(lengths, len(lengths))
    assert all(0.0 <= later <= earlier <= 1.0 for earlier, later in itertools.pairwise(found))
    assert 1.0 + sum(found) == pytest.approx(lengths[-1])


@pytest.mark.parametrize("survival", [survival_of(LENGTHS, 3), synthetic_survival(2.78, 3)])
def test_each_position_is_accepted_as_often_as_it_survives(survival: tuple[float, ...]) -> None:
    drawn = gains(Acceptance(survival, 7), "r", 60_000)[:-1]
    for position, share in enumerate(survival):
        assert sum(gain > position + 1 for gain in drawn) / len(drawn) == pytest.approx(share, abs=0.015)
    assert sum(drawn) / len(drawn) == pytest.approx(2.78, abs=0.03)


def test_a_stream_depends_on_seed_and_request_alone() -> None:
    one = Acceptance(survival_of(LENGTHS, 3), 7)
    assert one.progress("a", 400) == one.progress("a", 400)
    assert one.progress("a", 100)[:-1] == one.progress("a", 400)[: len(one.progress("a", 100)) - 1]
    assert one.progress("a", 400) != one.progress("b", 400)
    assert one.progress("a", 400) != Acceptance(one.survival, 8).progress("a", 400)
    told = "from longturn.simulate.acceptance import *; print(Acceptance((0.79, 0.6, 0.39), 7).progress('a', 50))"
    source = str(Path(__file__).parents[2] / "src")
    shown = {
        subprocess.run(
            [sys.executable, "-c", told], env={"PYTHONPATH": source, "PYTHONHASHSEED": seed}, capture_output=True,
            check=True, text=True,
        ).stdout
        for seed in ("0", "1")
    }  # fmt: skip
    assert shown == {f"{Acceptance((0.79, 0.6, 0.39), 7).progress('a', 50)}\n"}


@given(st.integers(1, 300), st.integers(0, 5))
def test_progress_ends_with_what_was_asked_for(tokens: int, drafts: int) -> None:
    progress = Acceptance((0.7,) * drafts, 3).progress("r", tokens)
    assert progress[0] == 1 and progress[-1] == tokens
    assert all(1 <= after - before <= drafts + 1 for before, after in itertools.pairwise(progress))
    if not drafts:
        assert progress == tuple(range(1, tokens + 1))


def test_lengths_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="no acceptance length is known for 3 drafts"):
        survival_of([1.8, 2.4], 3)
    with pytest.raises(ConfigError, match=r"cannot have an acceptance length of 3\.4"):
        survival_of([1.8, 3.4], 2)
    with pytest.raises(ConfigError, match=r"cannot have an acceptance length of 0\.5"):
        synthetic_survival(0.5, 2)
