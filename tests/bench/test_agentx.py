"""The replay of session trees against a recording server."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import pytest

from longturn.bench.agentx import Measurement, measure
from longturn.bench.bodies import Api, Prompt, make_bodies
from longturn.bench.client import ChatClient, TargetError
from longturn.bench.failures import too_long
from longturn.bench.metrics import lag_s
from longturn.bench.presets import Rules, rules_of
from longturn.bench.records import Answer
from longturn.bench.synth import RequestKey, shared_blocks
from longturn.bench.traces.tree import SessionTree
from longturn.bench.tree_hits import replay_hit_rate
from tests.bench.fake_server import FakeServer, running
from tests.bench.make_traces import EXAMPLE, common, row, tree

RULES = replace(
    rules_of("quick", 0.6), window=(0.0, 0.0), tree_idle_s=0.02, system_idle_s=0.02, drain_s=5.0, warmup_grace_s=10.0
)


class Quiet:
    def warming_up(self, done: int, planned: int) -> None:
        pass

    def measuring(self, elapsed_s: float, done: int, failed: int, in_flight: int) -> None:
        pass


def example() -> SessionTree:
    return tree(EXAMPLE["requests"], block=64, tool_tokens=100, system_tokens=28)


async def run(
    url: str,
    trees: list[SessionTree],
    rules: Rules = RULES,
    *,
    api: Api = "completions",
    lanes: int = 1,
    ids: range | None = None,
) -> Measurement:
    async with ChatClient(url) as client:
        bodies = await make_bodies(api, trees, 1, url=url, model="fake-1", token_ids=ids)
        return await measure(
            client, bodies, trees, rules, model="fake-1", lanes=lanes, seed=1, run="r", progress=Quiet()
        )


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_prompts_have_the_recorded_tokens_and_share_the_recorded_blocks(api: Api) -> None:
    fake = FakeServer()
    found = example()
    with running(fake) as url:
        outcome = await run(url, [found], api=api)
    assert all(turn.record.answer.ok for turn in outcome.turns) and len(outcome.turns) >= 6
    assert len(fake.requests) == len(outcome.turns)
    assert all(body["ignore_eos"] and body["temperature"] == 0 and body["stream"] for body in fake.requests)
    assert all(("prompt" in body) is (api == "completions") for body in fake.requests)
    by_marker: dict[str, list[tuple[Any, list[int]]]] = {}
    for body, headers in zip(fake.requests, fake.headers, strict=True):
        by_marker.setdefault(headers["X-Session-ID"], []).append((body, fake.tokens(body)))
    sent = {turn.marker: [] for turn in outcome.turns}  # type: dict[str, list[Any]]
    for turn in sorted(outcome.turns, key=lambda turn: turn.record.answer.sent_ns):
        sent[turn.marker].append(turn)
    for marker, turns in sent.items():
        pairs = []
        for turn, (body, ids) in zip(turns, by_marker[marker], strict=True):
            request = found.conversations[turn.send.key.conversation].requests[turn.send.key.index]
            assert len(ids) == request.input_tokens == turn.record.answer.prompt_tokens
            assert body["max_tokens"] == request.output_tokens == turn.record.answer.output_tokens
            pairs.append((request, ids))
        for (one, a), (other, b) in itertools.combinations(pairs, 2):
            blocks = shared_blocks(found.trie, one.node, other.node)
            assert blocks * 64 <= common(a, b) <= blocks * 64 + 3
    firsts = [by_marker[marker][0][1] for marker in sent]
    assert len(firsts) > 1
    assert 128 <= common(firsts[0], firsts[1]) <= 131, "another replay shares the system prompt and nothing else"


async def test_an_answer_of_no_tokens_is_asked_for_one() -> None:
    fake = FakeServer()
    with running(fake) as url:
        await run(url, [tree([row(0.0, list(range(8)), out=0)])], replace(RULES, duration_s=0.1), ids=range(100, 200))
    assert {body["max_tokens"] for body in fake.requests} == {1}


async def test_due_times_follow_answers_and_lag_is_small() -> None:
    found = tree([row(0.1 * n, list(range(n + 8)), api=0.02, out=3) for n in range(4)])
    with running(FakeServer(token_s=0.005)) as url:
        outcome = await run(url, [found], replace(RULES, tree_idle_s=None, system_idle_s=None))
    turns = {(turn.send.recycle, turn.send.key.index): turn for turn in outcome.turns}
    checked = 0
    for (recycle, index), turn in turns.items():
        answer = turn.record.answer
        assert lag_s(answer) >= 0
        before = turns.get((recycle, index - 1))
        if before is not None:
            assert answer.intended_ns - before.record.answer.end_ns == 80_000_000
            checked += 1
    assert checked >= 3
    lags = sorted(lag_s(turn.record.answer) for turn in outcome.turns)
    assert lags[len(lags) // 2] < 0.2, "generous: this only shows that nobody sleeps through a due time"


async def test_no_more_than_n_trees_are_alive() -> None:
    fake = FakeServer(token_s=0.0005)
    trees = [replace(example(), id=f"t{n}", namespace=f"t{n}") for n in range(3)]
    with running(fake) as url:
        outcome = await run(url, trees, replace(RULES, duration_s=1.5), lanes=2)
    spans: dict[str, tuple[int, int]] = {}
    for turn in outcome.turns:
        answer, name = turn.record.answer, turn.record.session
        low, high = spans.get(name, (answer.sent_ns, answer.end_ns))
        spans[name] = min(low, answer.sent_ns), max(high, answer.end_ns)
    assert len(spans) > 3
    for low, _ in spans.values():
        assert sum(start <= low < end for start, end in spans.values()) <= 2
    assert {turn.record.lane for turn in outcome.turns} == {0, 1}
    assert outcome.planned_turns and set(outcome.planned_turns.values()) == {3}
    assert all(not name.endswith(".0") for name in outcome.planned_turns), "a lane's first session is no whole job"


async def test_warm_up_sends_the_past_with_one_token_and_is_not_measured() -> None:
    fake = FakeServer()
    rules = replace(RULES, window=(1.0, 1.0), warmup_requests=10, duration_s=0.2)
    with running(fake) as url:
        outcome = await run(url, [example()], rules)
    assert outcome.warmup_requests == 2
    assert [body["max_tokens"] for body in fake.requests[:3]] == [1, 1, 40]
    assert [len(fake.tokens(body)) for body in fake.requests[:3]] == [300, 200, 460]
    first = outcome.turns[0]
    assert (first.send.key.conversation, first.send.key.index) == (0, 1)
    assert first.record.answer.cached_tokens == 256, "the four blocks of the root's first prompt"


async def test_a_failed_warm_up_of_a_root_is_an_error_and_of_a_subagent_is_not() -> None:
    rules = replace(RULES, window=(1.0, 1.0), warmup_requests=10, duration_s=0.1)
    message = "warm-up of session s failed: HTTP 500"
    with running(FakeServer(fail_turns={0: "500"})) as url, pytest.raises(TargetError, match=message):
        await run(url, [example()], rules)
    with running(FakeServer(fail_turns={1: "500"})) as url:
        outcome = await run(url, [example()], rules)
    assert outcome.conduct.warmup_errors == 1 and outcome.turns
    slow = replace(rules, warmup_grace_s=0.05)
    with running(FakeServer(token_s=1.0)) as url, pytest.raises(TargetError, match=r"longer than 0\.05 s: 0 of 2"):
        await run(url, [example()], slow)


async def test_a_failure_goes_on_with_the_next_turn_and_an_overflow_ends_the_session() -> None:
    rows = [row(0.01 * n, list(range(n + 8)), api=0.005, out=2) for n in range(5)]
    fake = FakeServer(fail_turns={1: "500", 3: "overflow"})
    with running(fake) as url:
        outcome = await run(url, [tree(rows)], replace(RULES, error_limit=None))
    first = [turn for turn in outcome.turns if turn.send.recycle == 0]
    assert [(turn.send.key.index, turn.record.answer.ok) for turn in first] == [
        (0, True), (1, False), (2, True), (3, False),
    ]  # fmt: skip
    assert (outcome.conduct.overflows, outcome.conduct.skipped) == (1, 1)
    assert any(turn.send.recycle == 1 for turn in outcome.turns)


async def test_errors_above_the_limit_stop_the_run() -> None:
    rows = [row(0.0, list(range(8)), api=0.0, out=1)]
    with running(FakeServer(fail_turns=dict.fromkeys(range(0, 400, 4), "500"))) as url:
        outcome = await run(url, [tree(rows)], replace(RULES, duration_s=10.0))
    assert outcome.conduct.cancelled is not None and "requests failed, last: HTTP 500" in outcome.conduct.cancelled
    assert len(outcome.turns) < 40 and not outcome.interrupted
    with running(FakeServer(fail_turns=dict.fromkeys(range(400), "500"))) as url:
        outcome = await run(url, [tree(rows)], replace(RULES, duration_s=10.0, error_limit=None))
    assert outcome.conduct.cancelled is not None and outcome.conduct.cancelled.startswith("20 requests in a row failed")


async def test_ctrl_c_keeps_what_was_measured() -> None:
    fake = FakeServer(token_s=0.002)
    with running(fake) as url:
        task = asyncio.create_task(run(url, [example()], replace(RULES, duration_s=60.0)))
        while len(fake.requests) < 3:
            await asyncio.sleep(0.01)
        task.cancel()
        outcome = await task
    assert outcome.interrupted and outcome.conduct.cancelled == "interrupted"
    assert len(outcome.turns) >= 2 and outcome.window_s < 10


async def test_requests_in_flight_at_the_end_are_waited_for_but_not_for_ever() -> None:
    found = tree([row(0.0, list(range(8)), out=20)])
    with running(FakeServer(token_s=0.02)) as url:
        outcome = await run(url, [found], replace(RULES, duration_s=0.1))
    assert [turn.record.answer.output_tokens for turn in outcome.turns] == [20]
    assert outcome.conduct.undrained == 0
    with running(FakeServer(token_s=5.0)) as url:
        outcome = await run(url, [found], replace(RULES, duration_s=0.1, drain_s=0.1))
    assert outcome.turns == () and outcome.conduct.undrained == 1


def test_theoretical_hits_of_what_was_sent() -> None:
    found = example()
    first, second, side = (RequestKey(found.id, *place) for place in ((0, 0), (0, 1), (1, 0)))
    assert replay_hit_rate([found], [first, second, side]) == pytest.approx(4 / 14)
    assert replay_hit_rate([found], [second, second]) == pytest.approx(8 / 14)
    assert replay_hit_rate([found], []) is None


def test_which_errors_mean_that_a_prompt_is_too_long() -> None:
    for error in (
        "HTTP 400: the prompt has 9000 tokens, but the context holds 8192 with the output",
        "HTTP 400: This model's maximum context length is 8192 tokens",
        "HTTP 400: prompt of 9000 tokens does not fit the cache of 8000 tokens",
    ):
        assert too_long(error)
    for error in ("HTTP 500: context", "HTTP 400: unknown field", "timed out", "HTTP 429: too many requests"):
        assert not too_long(error)


async def test_a_bug_in_making_a_prompt_is_raised_and_hangs_nothing() -> None:
    class Broken:
        path = "/v1/completions"
        left = 3

        def prompt(self, tree: SessionTree, key: RequestKey, marker: str) -> Prompt:
            self.left -= 1
            return Prompt({"prompt": [1] * 8}, 8) if self.left > 0 else {}["gone"]

        def answered(self, tree: SessionTree, key: RequestKey, marker: str, answer: Answer) -> None:
            pass

        def forget(self, marker: str) -> None:
            pass

    with running(FakeServer()) as url:
        async with ChatClient(url) as client:
            with pytest.raises(KeyError, match="gone"):
                await measure(
                    client, Broken(), [example()], replace(RULES, duration_s=30.0), model="fake-1", lanes=1, seed=1,
                    run="r", progress=Quiet(),
                )  # fmt: skip
