"""The session benchmark's driver in virtual time: against closed forms, and what must hold of any replay."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from longturn.bench.traces.tree import SessionTree
from longturn.engine.loop import Engine
from longturn.engine.pacing import StepTimeModel
from longturn.simulate import own_replay
from longturn.simulate.own_replay import Done, RequestTime, replay
from longturn.simulate.own_sessions import own_trees
from longturn.simulate.replicas import EngineSpec
from tests.simulate.sessions import PlainModel, spec, tree

MS = 1_000_000


def engine(model: PlainModel | None = None, *, pages: int = 4096, host_pages: int = 0) -> EngineSpec:
    made = spec(model, pages=pages, copy_ns=MS if host_pages else 0)
    return dataclasses.replace(made, info=dataclasses.replace(made.info, copies_pages=True, host_pages=host_pages))


def sessions(count: int = 3) -> list[SessionTree]:
    """Sessions of twelve turns, the first of which is left out; blocks are of 4 tokens, so a turn adds 256."""
    return own_trees([tree(f"t{n}", turns=12, start=320 + 32 * n, step=64, out=10) for n in range(count)])


def pauses(done: tuple[Done, ...]) -> list[int]:
    return [after.sent_ns - before.end_ns for before, after in itertools.pairwise(done)]


def test_one_session_by_hand() -> None:
    """A turn of 256 new tokens in one chunk, then a row a step, each turn a pause after the one before."""
    model = PlainModel(fixed=2 * MS, row=MS, token=1_000)
    (only,) = sessions(1)
    assert len({turn.gap_s for turn in only.root.requests[1:]}) == 1
    done = replay(engine(model), [only], 1, 9.0).done
    turns = only.root.requests[1:]
    assert len(done) == len(turns)
    assert [one.prompt_tokens for one in done] == [turn.input_tokens for turn in turns][: len(done)]
    for one, turn in zip(done, turns, strict=False):
        # The pages of the last prompt are found whole; what its answer wrote is not part of this prompt.
        assert one.cached_tokens == (turn.input_tokens - 256) // 128 * 128
        new = one.prompt_tokens - one.cached_tokens
        assert one.first_ns - one.sent_ns == 2 * MS + 1_000 * new
        assert one.end_ns - one.first_ns == (turn.output_tokens - 1) * 3 * MS
    assert pauses(done) == [round(turn.gap_s * 1e9) for turn in turns[1 : len(done)]]


def test_the_first_pause_is_waited_for_and_what_only_warms_is_not_counted() -> None:
    (only,) = sessions(1)
    gap_s = only.root.requests[1].gap_s
    assert gap_s > 0.5
    assert not replay(engine(), [only], 1, gap_s * 0.9).done
    assert len(replay(engine(), [only], 1, gap_s * 1.1 + 0.1).done) == 1


def test_lanes_take_sessions_in_order_and_compute_their_first_turn() -> None:
    found = sessions(3)
    done = replay(engine(PlainModel(token=10_000)), found, 1, 60.0).done
    turns = [turn for session in itertools.islice(itertools.cycle(found), 9) for turn in session.root.requests[1:]]
    assert len(found[0].root.requests) < len(done) < len(turns)
    assert [one.prompt_tokens for one in done] == [turn.input_tokens for turn in turns][: len(done)]
    each = len(found[0].root.requests) - 1
    between = done[each].sent_ns - done[each - 1].end_ns
    first = found[1].root.requests[0].input_tokens
    assert between > round(found[1].root.requests[1].gap_s * 1e9) + 10_000 * first, "nothing is shared with the last"
    assert done[each].cached_tokens > 0


@pytest.mark.parametrize(("pages", "host_pages", "lanes"), [(4096, 0, 2), (60, 0, 3), (60, 200, 3)])
def test_turns_that_are_taken_together_change_nothing(
    pages: int, host_pages: int, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = own_trees([tree(f"t{n}", turns=12, start=320 + 32 * n, step=64, out=90 + 41 * n) for n in range(4)])
    times = RequestTime((0.0,), (3.3 * MS,), apart=False)
    run = engine(PlainModel(fixed=MS), pages=pages, host_pages=host_pages), found, lanes, 20.0, times
    calls: list[int] = []
    results = []
    step = Engine.step

    def counted(self: Engine) -> Any:
        calls[-1] += 1
        return step(self)

    monkeypatch.setattr(Engine, "step", counted)
    for one_by_one in (False, True):
        if one_by_one:
            monkeypatch.setattr(own_replay, "ahead_of", lambda *_: None)
        calls.append(0)
        results.append(replay(*run))
    assert results[0] == results[1] and results[0].done and calls[0] < calls[1] / 2


def test_two_replays_are_the_same_and_longer_steps_never_serve_more() -> None:
    found = sessions(3)
    once, again = (replay(engine(), found, 2, 30.0).done for _ in range(2))
    assert once == again and len(once) > 10
    slow = replay(dataclasses.replace(engine(), scale=30.0), found, 2, 30.0).done
    assert 0 < len(slow) < len(once)


def test_what_only_warms_says_nothing_of_the_time_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it is measured: there such steps are passed over and report no time."""
    told: list[tuple[int, int]] = []
    learn = StepTimeModel.observe

    def observe(model: StepTimeModel, elapsed_ns: int, decodes: int, tokens: int, pairs: float) -> None:
        told.append((elapsed_ns, tokens))
        learn(model, elapsed_ns, decodes, tokens, pairs)

    monkeypatch.setattr(StepTimeModel, "observe", observe)
    (only,) = sessions(1)
    replay(engine(PlainModel(host=MS)), [only], 1, 9.0)
    warm = -(-only.root.requests[0].input_tokens // 512)
    assert [elapsed for elapsed, _ in told[:warm]] == [0] * warm
    assert all(elapsed > 0 for elapsed, _ in told[warm:]) and any(tokens for _, tokens in told[warm:])


@pytest.mark.parametrize("apart", [True, False])
def test_what_a_request_costs_the_host_delays_its_first_token(apart: bool) -> None:
    (only,) = sessions(1)
    plain = replay(engine(), [only], 1, 20.0).done
    times = RequestTime((0.0, 10_000.0), (5.0 * MS, 105.0 * MS), apart)
    later = replay(engine(), [only], 1, 20.0, times).done
    for one, other in zip(plain, later, strict=False):
        added = 5 * MS + one.prompt_tokens * 10_000
        assert other.first_ns - other.sent_ns == pytest.approx(one.first_ns - one.sent_ns + added, abs=2)
        assert other.end_ns - other.first_ns == one.end_ns - one.first_ns


def test_others_steps_go_on_while_a_request_is_on_its_way_elsewhere() -> None:
    found = sessions(2)
    cost = 700.0 * MS

    def slowest(apart: bool) -> float:
        done = replay(engine(PlainModel(fixed=20 * MS)), found, 2, 30.0, RequestTime((0.0,), (cost,), apart)).done
        return max((one.end_ns - one.first_ns) / (one.output_tokens - 1) for one in done)

    assert slowest(True) < slowest(False)


def test_pages_that_left_for_host_memory_come_back() -> None:
    """A pool too small for both sessions: with host memory their prompts stay hits, and loading takes time."""
    found = sessions(2)
    small = replay(engine(pages=60), found, 2, 30.0).done
    tiered = replay(engine(pages=60, host_pages=200), found, 2, 30.0).done
    roomy = replay(engine(), found, 2, 30.0).done

    def hits(done: tuple[Done, ...]) -> float:
        return sum(one.cached_tokens for one in done) / sum(one.prompt_tokens for one in done)

    assert hits(small) < hits(tiered) <= hits(roomy)
