"""Prompts with the server's answers in them, against a server that counts one token for a role and one for a word."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.bench.agentx import measure
from longturn.bench.bodies import Api, Prompt, make_bodies, make_bodies_with
from longturn.bench.carry import SLACK_LEAST_TOKENS, LiveBodies, _Made, _recounted, with_answers
from longturn.bench.carry_forms import Piece
from longturn.bench.client import ChatClient
from longturn.bench.presets import rules_of
from longturn.bench.records import Answer
from longturn.bench.synth import RequestKey
from longturn.bench.traces.tree import SessionTree
from longturn.bench.tree_hits import replay_hit_rate
from tests.bench.fake_server import FakeServer, running
from tests.bench.make_traces import EXAMPLE, common, row, tree

APIS: tuple[Api, ...] = ("chat", "completions")
BLOCK = 16


@dataclass
class Server:
    """Counts prompts, and writes answers of words that nobody else uses."""

    fake: FakeServer = field(default_factory=FakeServer)
    seen: list[list[int]] = field(default_factory=list)
    """Every prompt with its answer, as tokens; the answer without its last token, which no server computes."""
    answers: int = 0

    async def tokenize(self, body: Any) -> list[int]:
        return self.fake.tokens(body)

    def reused(self, prompt: Prompt) -> int:
        """Tokens at the prompt's start that an unbounded cache would have."""
        ids = self.fake.tokens(prompt.fields)
        return max((common(ids, old) for old in self.seen), default=0)

    def answer(self, prompt: Prompt, tokens: int, *, drift: int = 0, error: str | None = None) -> Answer:
        """An answer of so many tokens, whose text has `drift` more of them when it is part of a prompt."""
        ids = self.fake.tokens(prompt.fields)
        self.answers += 1
        words = [f"say{self.answers}x{n}" for n in range(max(1, tokens + drift))]
        text = " ".join(words)
        written = self.fake.tokens({"prompt": text})[:tokens]
        if error is None:
            role = [] if "prompt" in prompt.fields else self.fake.tokens({"prompt": "assistant"})
            self.seen.append([*ids, *role, *written[:-1]])
        told = None if error is not None else len(ids)
        return Answer(
            0, 0, 1, text="" if error else text, prompt_tokens=told, output_tokens=None if error else tokens,
            token_ids=tuple(written) if "return_token_ids" in prompt.fields and error is None else None, error=error,
        )  # fmt: skip


async def live_bodies(server: Server, found: SessionTree, api: Api) -> LiveBodies:
    return with_answers(await make_bodies_with(server.tokenize, api, [found], 1), [found], 1)


def growing(turns: int, *, out: int = 20, tail: int = 5, first: int = 8, step: int = 4) -> SessionTree:
    """Turns that each extend the one before."""
    rows = [
        row(float(n), list(range(first + step * n)), out=out, tail=tail, block=BLOCK, api=0.1) for n in range(turns)
    ]
    return tree(rows, block=BLOCK)


def count(server: Server, prompt: Prompt) -> int:
    return len(server.fake.tokens(prompt.fields))


@pytest.mark.parametrize("api", APIS)
async def test_each_turn_is_the_turn_before_its_answer_and_new_text_of_the_recorded_length(api: Api) -> None:
    server, found = Server(), growing(5)
    bodies = await live_bodies(server, found, api)
    before: tuple[Prompt, Answer] | None = None
    for index, request in enumerate(found.root.requests):
        key = RequestKey(found.id, 0, index)
        prompt = bodies.prompt(found, key, "m")
        assert prompt.tokens == count(server, prompt) == request.input_tokens
        if before is not None:
            old, said = before
            if api == "chat":
                messages, olds = prompt.fields["messages"], old.fields["messages"]
                assert messages[: len(olds)] == olds
                assert messages[len(olds)] == {"role": "assistant", "content": said.text}
                assert [message["role"] for message in messages[len(olds) + 1 :]] == ["user"]
            else:
                ids, olds = prompt.fields["prompt"], old.fields["prompt"]
                assert ids[: len(olds) + 20] == [*olds, *(said.token_ids or ())]
            # The prompt before, less the token that is computed when there is an answer, and the answer but its last.
            assert prompt.prefix_tokens == old.tokens + 19
            assert prompt.prefix_tokens <= server.reused(prompt) + (api == "chat")
            assert (prompt.slack_tokens > 0) is (api == "chat")
        said = server.answer(prompt, request.output_tokens)
        bodies.answered(found, key, "m", said)
        before = prompt, said


@pytest.mark.parametrize("api", APIS)
async def test_without_answers_prompts_are_the_recorded_ones(api: Api) -> None:
    server, found = Server(), tree(EXAMPLE["requests"], block=64, tool_tokens=100, system_tokens=28)
    recorded = await make_bodies_with(server.tokenize, api, [found], 1)
    bodies = with_answers(recorded, [found], 1)
    for place in ((0, 0), (1, 0), (0, 1)):
        key = RequestKey(found.id, *place)
        prompt, expected = bodies.prompt(found, key, "m"), recorded.prompt(found, key, "m")
        more = {"return_token_ids": True} if api == "completions" else {}
        assert prompt.fields == {**expected.fields, **more} and prompt.tokens == expected.tokens
        assert (prompt.slack_tokens, prompt.prefix_tokens) == (0, 0)


async def test_a_prompt_is_off_by_its_newest_answer_alone() -> None:
    server, found = Server(), growing(6)
    bodies = await live_bodies(server, found, "chat")
    drifts = [3, -4, 0, 7, -2]
    for index, request in enumerate(found.root.requests):
        key = RequestKey(found.id, 0, index)
        prompt = bodies.prompt(found, key, "m")
        drift = drifts[index - 1] if index else 0
        assert prompt.tokens == request.input_tokens
        assert count(server, prompt) - request.input_tokens == drift
        assert abs(drift) <= prompt.slack_tokens or not index
        if index < len(drifts):
            bodies.answered(found, key, "m", server.answer(prompt, request.output_tokens, drift=drifts[index]))


@pytest.mark.parametrize("api", APIS)
async def test_an_answer_that_failed_is_made_up_and_the_lengths_stay(api: Api) -> None:
    server, found = Server(), growing(5)
    bodies = await live_bodies(server, found, api)
    prompts = []
    for index, request in enumerate(found.root.requests):
        key = RequestKey(found.id, 0, index)
        prompt = bodies.prompt(found, key, "m")
        assert count(server, prompt) == request.input_tokens
        error = "HTTP 500: no" if index in (0, 2) else None
        bodies.answered(found, key, "m", server.answer(prompt, request.output_tokens, error=error))
        prompts.append(prompt)
    assert prompts[1].prefix_tokens == 0, "the first answer failed: this is the recorded prompt"
    assert prompts[3].prefix_tokens == 0 and prompts[4].prefix_tokens > prompts[3].tokens
    if api == "chat":
        three, four = prompts[3].fields["messages"], prompts[4].fields["messages"]
        assert four[: len(three)] == three
        assert three[-2]["role"] == "assistant" and "say" not in three[-2]["content"], "of the recorded length, made up"
        assert len(three[-2]["content"].split()) == 21, "with the opener"


async def test_a_next_prompt_too_short_for_the_answer_cuts_its_end() -> None:
    server = Server()
    rows = [row(0.0, list(range(8)), out=60, tail=5, block=BLOCK), row(5.0, list(range(10)), tail=3, block=BLOCK)]
    found = tree(rows, block=BLOCK)
    bodies = await live_bodies(server, found, "chat")
    first = bodies.prompt(found, RequestKey(found.id, 0, 0), "m")
    said = server.answer(first, 60)
    bodies.answered(found, RequestKey(found.id, 0, 0), "m", said)
    second = bodies.prompt(found, RequestKey(found.id, 0, 1), "m")
    told = second.fields["messages"][-2]["content"]
    assert said.text.startswith(told) and len(told) < len(said.text)
    assert second.tokens == 163 and abs(count(server, second) - 163) <= second.slack_tokens == SLACK_LEAST_TOKENS


@pytest.mark.parametrize("api", APIS)
async def test_a_compacted_history_keeps_what_was_recorded_of_it(api: Api) -> None:
    server = Server()
    ids = [list(range(8)), list(range(14)), [*range(9), *range(50, 60)]]
    rows = [row(float(5 * n), part, out=20, tail=5, block=BLOCK) for n, part in enumerate(ids)]
    found = tree(rows, block=BLOCK, split=False)
    bodies = await live_bodies(server, found, api)
    tokens: list[list[int]] = []
    for index in range(3):
        key = RequestKey(found.id, 0, index)
        prompt = bodies.prompt(found, key, "m")
        tokens.append(server.fake.tokens(prompt.fields))
        assert abs(len(tokens[-1]) - found.root.requests[index].input_tokens) <= prompt.slack_tokens
        bodies.answered(found, key, "m", server.answer(prompt, 20))
    assert common(tokens[0], tokens[1]) >= len(tokens[0]) - 1
    assert 9 * BLOCK - 2 <= common(tokens[1], tokens[2]) <= 9 * BLOCK, (
        "nine blocks, less what a new message starts with"
    )


@pytest.mark.parametrize("api", APIS)
async def test_replays_are_apart_and_can_be_forgotten(api: Api) -> None:
    server, found = Server(), growing(2)
    bodies = await live_bodies(server, found, api)
    first, second = (RequestKey(found.id, 0, index) for index in (0, 1))
    one = bodies.prompt(found, first, "m")
    bodies.answered(found, first, "m", server.answer(one, 20))
    bodies.prompt(found, first, "other")
    assert bodies.prompt(found, second, "other").prefix_tokens == 0
    assert bodies.prompt(found, second, "m").prefix_tokens > 0
    assert bodies.prompt(found, second, "m").fields == bodies.prompt(found, second, "m").fields
    bodies.forget("m")
    assert bodies.prompt(found, second, "m").prefix_tokens == 0


async def test_an_agent_that_starts_from_another_ones_answer_has_it_too() -> None:
    server = Server()
    main = [list(range(8)), list(range(12)), list(range(20))]
    rows: list[dict[str, Any]] = [row(float(10 * n), ids, out=20, block=BLOCK, api=1.0) for n, ids in enumerate(main)]
    fork = row(12.0, [*range(11), *range(70, 75)], out=9, block=BLOCK, api=1.0)
    rows.insert(2, {"t": 12.0, "type": "subagent", "agent_id": "a", "status": "completed", "requests": [fork]})
    found = tree(rows, block=BLOCK, split=False)
    bodies = await live_bodies(server, found, "completions")
    prompts = {}
    for place in ((0, 0), (0, 1), (1, 0), (0, 2)):
        key = RequestKey(found.id, *place)
        prompts[place] = bodies.prompt(found, key, "m")
        bodies.answered(found, key, "m", server.answer(prompts[place], 20))
    child, parent = prompts[1, 0].fields["prompt"], prompts[0, 1].fields["prompt"]
    assert common(child, parent) == 11 * BLOCK
    assert len(child) == 16 * BLOCK


def random_tree(seed: int) -> SessionTree:
    """A root and an agent in the background, whose prompts grow, shrink and turn elsewhere."""
    draw = random.Random(seed)
    new = itertools.count()

    def turns(start: list[int], t: float, turns: int) -> list[dict[str, Any]]:
        ids, rows = start, []
        for n in range(turns):
            keep = len(ids) if draw.random() < 0.7 else draw.randrange(len(ids) + 1)
            ids = [*ids[:keep], *(next(new) for _ in range(draw.randrange(0 if keep == len(ids) else 1, 6)))]
            more = {"out": draw.choice([0, 1, 5, 40, 90]), "tail": draw.randrange(BLOCK), "block": BLOCK, "api": 0.1}
            rows.append(row(t + n, ids, **more))
        return rows

    root = turns([next(new) for _ in range(draw.randrange(4, 9))], 0.0, draw.randrange(1, 7))
    start = list(draw.choice(root)["hash_ids"]) if draw.random() < 0.5 else [next(new) for _ in range(4)]
    start = start[: draw.randrange(1, len(start) + 1)]
    agent = {"t": 0.5, "type": "subagent", "agent_id": "a", "status": "completed", "requests": turns(start, 0.6, 3)}
    more = {"tool_tokens": draw.choice([0, 20]), "system_tokens": draw.choice([0, 20])}
    return tree([root[0], agent, *root[1:]], block=BLOCK, split=False, **more)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(APIS), st.booleans())
async def test_random_sessions(seed: int, api: Api, drifting: bool) -> None:
    try:
        found = random_tree(seed)
    except Exception as error:
        assert "hash_ids" in str(error)
        return
    draw, server = random.Random(seed), Server()
    bodies = await live_bodies(server, found, api)
    left = dict.fromkeys(range(len(found.conversations)), 0)
    measured, prefixes = [], []
    while left:
        number = draw.choice(sorted(left))
        key = RequestKey(found.id, number, left[number])
        request = found.conversations[number].requests[key.index]
        prompt = bodies.prompt(found, key, "m")
        counted = count(server, prompt)
        drift = draw.choice([-1, 0, 2]) if drifting and api == "chat" else 0
        if prompt.tokens == request.input_tokens:
            assert abs(counted - request.input_tokens) <= prompt.slack_tokens
        else:
            assert prompt.tokens > request.input_tokens, "only where not even empty messages fit"
            assert counted == prompt.tokens and not prompt.prefix_tokens
        if api == "chat":
            roles = [message["role"] for message in prompt.fields["messages"]]
            assert roles[-1] == "user" and all(one != other for one, other in itertools.pairwise(roles))
            assert "system" not in roles[1:] and "assistant" not in roles[:1]
        if not drifting and prompt.slack_tokens == 0:
            # What is promised to be cached is: a message's opener and role may stand where an answer's text would.
            assert prompt.prefix_tokens <= server.reused(prompt) + 3
        if draw.random() < 0.8:
            error = "HTTP 500: no" if draw.random() < 0.2 else None
            said = server.answer(prompt, max(1, request.output_tokens), drift=drift, error=error)
            bodies.answered(found, key, "m", said)
        measured.append(key)
        prefixes.append(prompt.prefix_tokens)
        left[number] += 1
        if left[number] == len(found.conversations[number].requests):
            del left[number]
    plain, live = replay_hit_rate([found], measured), replay_hit_rate([found], measured, prefixes)
    assert (plain is None and live is None) or (plain is not None and live is not None and plain <= live <= 1)


def test_hits_of_carried_answers_by_hand() -> None:
    found = growing(2)
    keys = [RequestKey(found.id, 0, 0), RequestKey(found.id, 0, 1)]
    assert replay_hit_rate([found], keys) == pytest.approx(8 / 20)
    # 8 blocks and a tail of 5, an answer of 20 without its last: 152 tokens are 9 whole blocks.
    assert replay_hit_rate([found], keys, [0, 8 * BLOCK + 5 + 19]) == pytest.approx(9 / 20)
    assert replay_hit_rate([found], keys, [0, 3]) == pytest.approx(8 / 20), "never less than recorded"


class Quiet:
    def warming_up(self, done: int, planned: int) -> None:
        pass

    def measuring(self, elapsed_s: float, done: int, failed: int, in_flight: int) -> None:
        pass


@pytest.mark.parametrize("api", APIS)
async def test_a_replay_carries_answers_through_subagents_new_sessions_and_failures(api: Api) -> None:
    fake = FakeServer(fail_turns={4: "500", 9: "500"})
    found = tree(EXAMPLE["requests"], block=64, tool_tokens=100, system_tokens=28)
    rules = replace(rules_of("quick", 0.6), window=(0.0, 0.0), tree_idle_s=0.02, system_idle_s=0.02, error_limit=None)
    with running(fake) as url:
        async with ChatClient(url) as client:
            bodies = with_answers(await make_bodies(api, [found], 1, url=url, model="fake-1"), [found], 1)
            outcome = await measure(
                client, bodies, [found], rules, model="fake-1", lanes=2, seed=1, run="r", progress=Quiet()
            )
    sent: dict[str, list[dict[str, Any]]] = {}
    for body, headers in zip(fake.requests, fake.headers, strict=True):
        sent.setdefault(headers["X-Session-ID"], []).append(body)
    answers = {(turn.marker, turn.send.key): turn.record.answer for turn in outcome.turns}
    assert len(sent) > 3 and sum(not answer.ok for answer in answers.values()) == 2
    carried = 0
    for turn in outcome.turns:
        answer = turn.record.answer
        before = answers.get((turn.marker, replace(turn.send.key, index=turn.send.key.index - 1)))
        if answer.ok:
            assert abs((answer.prompt_tokens or 0) - turn.asked.input_tokens) <= turn.asked.input_slack
            assert answer.prompt_tokens == turn.asked.input_tokens, "the fake server's words are one token anywhere"
        if before is None or not before.ok:
            assert turn.prefix_tokens == 0
            continue
        (body,) = [body for body in sent[turn.marker] if body["max_tokens"] == 40]  # only the root's second turn has 40
        if api == "chat":
            assert {"role": "assistant", "content": before.text} in body["messages"]
        else:
            assert body["prompt"][300:370] == list(before.token_ids or ()) and len(before.token_ids or ()) == 70
        assert turn.prefix_tokens == 300 + 69
        carried += 1
    assert carried > 2
    assert len(bodies._replays) <= 2, "what has ended is forgotten"


async def test_a_first_prompt_takes_no_answer_from_an_agent_that_has_none() -> None:
    """A fork shares 10 blocks with the root's second turn, which holds an answer, and 12 with another agent's first."""
    server = Server()
    rows: list[dict[str, Any]] = [
        row(float(n), list(range(count)), out=20, block=BLOCK) for n, count in ((0, 8), (5, 12))
    ]
    plain = row(6.0, [*range(10), 70, 71, 72, 73], out=9, block=BLOCK)
    fork = row(7.0, [*range(10), 70, 71, 80, 81, 82, 83], out=9, block=BLOCK)
    for name, request in (("a", plain), ("b", fork)):
        rows.append(
            {"t": request["t"], "type": "subagent", "agent_id": name, "status": "completed", "requests": [request]}
        )
    found = tree(rows, block=BLOCK, split=False)
    bodies = await live_bodies(server, found, "completions")
    first, second, other, forked = (RequestKey(found.id, *place) for place in ((0, 0), (0, 1), (1, 0), (2, 0)))
    bodies.prompt(found, first, "m")
    # The other agent starts before the root's answer is there: its prompt is the recorded one.
    made = bodies.prompt(found, other, "m").fields["prompt"]
    bodies.answered(found, first, "m", server.answer(bodies.prompt(found, first, "m"), 20))
    parent = bodies.prompt(found, second, "m").fields["prompt"]
    child = bodies.prompt(found, forked, "m").fields["prompt"]
    assert common(child, parent) == 10 * BLOCK > common(child, made)


def test_a_recount_is_the_newest_answers() -> None:
    pieces = (Piece("user", 10), Piece("assistant", 5, live=True), Piece("user", 4), Piece("assistant", 7, live=True))
    found = _recounted(_Made(pieces, 30, prefix_tokens=2, counted=False), 33)
    assert [piece.tokens for piece in found.pieces] == [10, 5, 4, 10]
    assert (found.tokens, found.prefix_tokens, found.counted) == (33, 2, True)
    assert [piece.tokens for piece in _recounted(found, 20).pieces] == [10, 5, 4, 0], "no fewer than none"
