"""Which prompts are made before they are due, and what happens to those that are not needed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from longturn.bench.bodies import Prompt, RecordedBodies
from longturn.bench.lanes import NS_PER_S, LiveTree, Send
from longturn.bench.prompts_ahead import PromptsAhead
from longturn.bench.synth import RequestKey
from longturn.bench.traces.tree import SessionTree
from tests.bench.make_traces import row, tree

TREE = tree([row(float(n), [0, 1, 2]) for n in range(4)])
TOKENS = 60_000_000


class Bodies(RecordedBodies):
    path = ""

    def prompt(self, tree: SessionTree, key: RequestKey, marker: str) -> Prompt:
        return Prompt({"prompt": key.index}, TOKENS)


@dataclass
class Planned:
    """Stands for a schedule."""

    sends: list[Send]
    end_ns: int = 10 * NS_PER_S
    closed: bool = False
    lanes: list[LiveTree] = field(default_factory=lambda: [LiveTree(TREE, 0, 0, "m", t_star_s=None)])

    def upcoming(self) -> list[Send]:
        return self.sends

    def following(self, within_ns: int) -> list[tuple[LiveTree, Send]]:
        return []


def send(index: int, due_s: float) -> Send:
    return Send(0, 0, RequestKey(TREE.id, 0, index), round(due_s * NS_PER_S))


async def ahead(plan: Planned) -> PromptsAhead:
    return PromptsAhead(Bodies(), plan, lambda task: None)  # type: ignore[arg-type]


async def test_prompts_are_made_that_are_due_soon_and_will_be_sent() -> None:
    plan = Planned([send(0, 1.0), send(1, 4.0), send(2, 10.5)])
    prompts = await ahead(plan)
    first = prompts.make_next(0)
    assert first is not None and (await first).fields == {"prompt": 0}
    assert prompts.make_next(0) is None, "the second is due in 4 s"
    second = prompts.make_next(3 * NS_PER_S)
    assert second is not None
    assert prompts.make_next(3 * NS_PER_S) is None, "one is being made"
    await second
    assert await prompts.take(plan.sends.pop(0), plan.lanes[0]) is first.result()
    assert prompts.make_next(9 * NS_PER_S) is None, "the third is due after the end"
    await prompts.close()


async def test_prompts_that_wait_have_a_limit() -> None:
    plan = Planned([send(n, 1.0) for n in range(3)])
    prompts = await ahead(plan)
    for _ in range(2):
        task = prompts.make_next(0)
        assert task is not None
        await task
    assert prompts.make_next(0) is None, "120 million tokens wait"
    await prompts.take(plan.sends.pop(0), plan.lanes[0])
    assert prompts.make_next(0) is not None
    await prompts.close()


async def test_prompts_of_a_session_that_ended_are_dropped() -> None:
    prompts = await ahead(Planned([send(n, 1.0) for n in range(3)]))
    for _ in range(2):
        task = prompts.make_next(0)
        assert task is not None
        await task
    prompts.drop(0, 1)
    assert prompts.make_next(0) is None, "another session of the lane"
    prompts.drop(0, 0)
    making = prompts.make_next(0)
    assert making is not None
    prompts.drop(0, 0)
    with pytest.raises(asyncio.CancelledError):
        await making
    await prompts.close()
