"""How late the replay sends, in made-up time: prompts that take long to make must not make it late."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from longturn.bench.agentx import Measurement, measure
from longturn.bench.bodies import Bodies, Prompt, RecordedBodies
from longturn.bench.metrics import lag_s
from longturn.bench.presets import Rules, rules_of
from longturn.bench.records import Answer, Chunk
from longturn.bench.synth import RequestKey
from longturn.bench.traces.tree import SessionTree
from tests.bench.make_traces import EXAMPLE, row, tree
from tests.bench.test_agentx import Quiet
from tests.bench.virtual_time import VirtualLoop, run_virtually

RULES = replace(rules_of("quick", 60.0), tree_idle_s=None, system_idle_s=None, warmup_requests=3, drain_s=100.0)
PROMPT_S = 0.03
"""Making one takes as long as a cold prompt of a few hundred thousand tokens."""


class Target:
    """Answers after some time of its own."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._random = random.Random(1)
        self.sent: list[tuple[int, int]] = []

    async def send(
        self, body: Mapping[str, Any], *, intended_ns: int | None = None, session_id: str | None = None, path: str = ""
    ) -> Answer:
        sent = self._loop.now_ns()
        self.sent.append((body["prompt"], sent))
        await asyncio.sleep(0.1 + self._random.random())
        end = self._loop.now_ns()
        intended = sent if intended_ns is None else intended_ns
        tokens = body["max_tokens"]
        return Answer(intended, sent, end, sent, (Chunk(end, 1),), "", 1, 0, tokens, finish="length")


class Recorded(RecordedBodies):
    path = ""

    def prompt(self, tree: SessionTree, key: RequestKey, marker: str) -> Prompt:
        return Prompt({"prompt": f"{marker}:{key.conversation}:{key.index}"}, 1)


class Dependent:
    """Prompts that cannot be made before the answer to the one before is there."""

    path = ""

    def prompt(self, tree: SessionTree, key: RequestKey, marker: str) -> Prompt:
        return Recorded().prompt(tree, key, marker)

    def answered(self, tree: SessionTree, key: RequestKey, marker: str, answer: Answer) -> None:
        pass

    def forget(self, marker: str) -> None:
        pass


def sessions() -> list[SessionTree]:
    """Pauses from nothing to seconds, subagents that join, agents that run beside each other, short sessions."""
    generator = random.Random(3)
    found = [tree(EXAMPLE["requests"], block=64)]
    for number in range(4):
        rows, at = [], 0.0
        for turn in range(12):
            rows.append(row(at, list(range(turn + 2)), api=0.5, out=5))
            at += 0.5 + generator.choice([0.0, 0.0, 0.001, 0.02, 0.3, 4.0])
        rows.append(row(1.0, [0, 1, *range(50, 55)], api=3.0, out=5))
        rows.sort(key=lambda item: item["t"])
        found.append(replace(tree(rows), id=f"s{number}", namespace=f"s{number}"))
    return found


def run(bodies: Bodies, lanes: int, rules: Rules = RULES) -> tuple[Measurement, Target, int]:
    async def main(loop: VirtualLoop) -> tuple[Measurement, Target, int]:
        target = Target(loop)
        measured = await measure(
            target, bodies, sessions(), rules, model="m", lanes=lanes, seed=2, run="r", progress=Quiet(),
            clock_ns=loop.now_ns,
        )  # fmt: skip
        return measured, target, loop.pieces

    return run_virtually(PROMPT_S, main)


@pytest.mark.parametrize("lanes", [1, 4, 12])
def test_every_turn_is_sent_within_a_millisecond_of_its_time(lanes: int) -> None:
    measured, target, pieces = run(Recorded(), lanes)
    lags = [lag_s(turn.record.answer) for turn in measured.turns]
    assert len(lags) > 40 * lanes and measured.conduct.cancelled is None
    assert min(lags) >= 0 and max(lags) < 0.001
    assert any(turn.send.recycle for turn in measured.turns), "sessions that follow others are among them"
    assert len(target.sent) == len(measured.turns) + measured.warmup_requests
    assert pieces <= len(target.sent) + 3 * lanes, "each prompt is made once, but for those that the end left over"
    names = [name for name, _ in target.sent[measured.warmup_requests :]]
    assert len(set(names)) == len(names)


def test_pauses_are_kept_to_the_millisecond() -> None:
    measured, _, _ = run(Recorded(), 4)
    trees = {found.id: found for found in sessions()}
    ends = {(turn.marker, turn.send.key): turn.record.answer.end_ns for turn in measured.turns}
    checked = 0
    for turn in measured.turns:
        key = turn.send.key
        conversation = trees[key.tree_id].conversations[key.conversation]
        joins = any(child.join_before == key.index for child in trees[key.tree_id].conversations if child.parent == 0)
        before = ends.get((turn.marker, replace(key, index=key.index - 1)))
        if before is not None and not joins:
            pause = (turn.record.answer.sent_ns - before) / 1e9
            assert pause == pytest.approx(conversation.requests[key.index].gap_s, abs=0.001)
            checked += 1
    assert checked > 100


def test_prompts_that_need_the_answer_are_late_by_their_making_and_say_so() -> None:
    measured, _, _ = run(Dependent(), 1)
    lags = [lag_s(turn.record.answer) for turn in measured.turns]
    assert PROMPT_S <= max(lags) < 3 * PROMPT_S
    paused = [turn for turn in measured.turns if turn.send.key.index and turn.send.key.conversation == 0]
    assert any(lag_s(turn.record.answer) < 0.001 for turn in paused), "a pause is time enough"


def test_the_same_seed_sends_the_same_at_the_same_times() -> None:
    assert run(Recorded(), 4)[1].sent == run(Recorded(), 4)[1].sent
