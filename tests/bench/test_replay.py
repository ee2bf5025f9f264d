from __future__ import annotations

import asyncio
from typing import Any

import pytest

from longturn.bench.client import ChatClient
from longturn.bench.metrics import lag_s
from longturn.bench.records import TurnRecord
from longturn.bench.replay import Replay, ReplayOptions, replay
from longturn.bench.session import Message, Session, Turn
from tests.bench.fake_server import PAGE, FakeServer, running


class Quiet:
    """Progress that remembers."""

    def __init__(self) -> None:
        self.started: list[tuple[str, str]] = []
        self.done: list[tuple[int, int]] = []

    def turn_started(self, session: str, label: str) -> None:
        self.started.append((session, label))

    def turn_ended(self, record: TurnRecord, done: int, planned: int) -> None:
        self.done.append((done, planned))

    def tick(self) -> None:
        pass


def session(name: str = "s", turns: int = 3, pause_s: float = 0.0) -> Session:
    return Session(
        format=1,
        id=name,
        messages=(Message("system", "one two three four five six seven eight nine"),),
        turns=tuple(
            Turn(f"t{n}", (Message("user", f"question {n} with a few words"),), 4, f"answer {n}", pause_s)
            for n in range(turns)
        ),
    )


async def run(url: str, sessions: list[Session], progress: Quiet | None = None, **options: Any) -> Replay:
    async with ChatClient(url) as client:
        return await replay(client, "fake-1", sessions, ReplayOptions(**options), progress or Quiet())


async def test_prompts_are_the_recording_and_hits_are_whole_pages() -> None:
    fake = FakeServer()
    recorded = session()
    progress = Quiet()
    with running(fake) as url:
        outcome = await run(url, [recorded], progress)
    assert not outcome.partial
    assert [request["messages"] for request in fake.requests] == [recorded.prompt(n) for n in range(3)]
    assert all(request["ignore_eos"] and request["temperature"] == 0 for request in fake.requests)
    assert progress.started == [("s", "t0"), ("s", "t1"), ("s", "t2")]
    assert progress.done == [(1, 3), (2, 3), (3, 3)]
    for index, record in enumerate(outcome.records):
        words = sum(1 + len(m["content"].split()) for m in recorded.prompt(index))
        earlier = sum(1 + len(m["content"].split()) for m in recorded.prompt(index - 1)) if index else 0
        assert record.answer.prompt_tokens == words
        assert (
            record.answer.cached_tokens == (earlier - 1) // PAGE * PAGE if index else record.answer.cached_tokens == 0
        )


async def test_pauses_follow_the_end_of_the_turn_before() -> None:
    with running(FakeServer(token_s=0.01)) as url:
        outcome = await run(url, [session(pause_s=0.4)], pause_scale=0.25)
    for earlier, later in zip(outcome.records, outcome.records[1:], strict=False):
        assert later.answer.intended_ns - earlier.answer.end_ns == 100_000_000
    assert all(0 <= lag_s(record.answer) for record in outcome.records)


async def test_lanes_bound_the_sessions_alive() -> None:
    fake = FakeServer(token_s=0.005)
    with running(fake) as url:
        outcome = await run(url, [session("a"), session("b")], lanes=2, copies=2)
    assert fake.most_alive == 2
    assert outcome.planned_turns == 12
    assert {record.session for record in outcome.records} == {"a#1", "a#2", "b#1", "b#2"}
    assert {record.lane for record in outcome.records} == {0, 1}


async def test_copies_have_caches_of_their_own_unless_shared() -> None:
    fake = FakeServer()
    with running(fake) as url:
        await run(url, [session()], copies=2)
        salts = {request["cache_salt"] for request in fake.requests}
        assert len(salts) == 2
        apart = await run(url, [session(turns=1)])
        assert apart.records[0].answer.cached_tokens == 0, "an earlier run must not fill this one's cache"
        await run(url, [session(turns=1)], separate_caches=False)
        shared = await run(url, [session(turns=1)], separate_caches=False)
    assert "cache_salt" not in fake.requests[-1]
    assert shared.records[0].answer.cached_tokens == 2 * PAGE  # of 17 tokens


async def test_a_failed_turn_ends_its_session_only() -> None:
    fake = FakeServer(fail_turns={1: "500"})
    with running(fake) as url:
        outcome = await run(url, [session("a"), session("b")])
    assert outcome.partial
    assert not outcome.interrupted
    assert [(r.session, r.index, r.answer.ok) for r in outcome.records] == [
        ("a", 0, True),
        ("a", 1, False),
        ("b", 0, True),
        ("b", 1, True),
        ("b", 2, True),
    ]


async def test_cancelling_keeps_what_was_measured() -> None:
    fake = FakeServer(token_s=0.02)
    with running(fake) as url:
        task = asyncio.create_task(run(url, [session(turns=50)]))
        while len(fake.requests) < 3:
            await asyncio.sleep(0.01)
        task.cancel()
        outcome = await task
    assert outcome.interrupted
    assert outcome.partial
    assert len(outcome.records) == 2


@pytest.mark.parametrize("free", [True, False])
async def test_free_output_sends_no_ignore_eos(free: bool) -> None:
    fake = FakeServer()
    with running(fake) as url:
        await run(url, [session(turns=1)], fixed_output=not free)
    assert ("ignore_eos" in fake.requests[0]) is not free
