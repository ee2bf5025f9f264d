from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.bench.client import TargetError
from longturn.bench.synth import RequestKey, TokenPrompts, request_keys, shared_blocks, tree_marker
from longturn.bench.synth_chat import ChatPrompts
from longturn.bench.synth_words import CANDIDATES, ChatCosts, HttpTokenize, Words, find_words, measure_costs
from longturn.bench.traces.load import load_shipped, load_traces, parse_trace, shipped_traces
from longturn.bench.traces.shrink import drop_long, scale_tree
from longturn.bench.traces.tree import SessionTree, TraceRequest
from longturn.config import ModelConfig
from longturn.errors import ConfigError, ModelError
from tests.bench.make_traces import common, row, shared, tree
from tests.bench.test_traces_split import histories

IDS = range(100, 164)


def request_of(found: SessionTree, key: RequestKey) -> TraceRequest:
    return found.conversations[key.conversation].requests[key.index]


# --- token ids -------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(histories(), st.lists(st.integers(0, 3), min_size=15, max_size=15), st.integers(0, 5))
def test_prompts_share_exactly_the_blocks_that_they_share(
    rows: list[dict[str, Any]], tails: list[int], seed: int
) -> None:
    for item, tail in zip(rows, tails, strict=False):
        item["in"] = max(1, item["in"] + tail)
    found = tree(rows)
    prompts = TokenPrompts([found], IDS, seed)
    made = {key: prompts.prompt(found, key) for key in request_keys(found)}
    for key, ids in made.items():
        assert len(ids) == request_of(found, key).input_tokens and set(ids) <= set(IDS)
    for one, other in itertools.combinations(made, 2):
        a, b = request_of(found, one), request_of(found, other)
        blocks = shared_blocks(found.trie, a.node, b.node)
        assert common(made[one], made[other]) == blocks * found.block_tokens


def test_seed_and_marker_change_content_and_nothing_else() -> None:
    (found,) = load_shipped("workshop.json")
    keys = request_keys(found)

    def make(seed: int, marker: str) -> list[list[int]]:
        prompts = TokenPrompts([found], range(5000), seed)
        return [prompts.prompt(found, key, marker) for key in keys]

    plain = make(1, "a")
    assert plain == make(1, "a")
    assert plain != make(2, "a")
    other = make(1, "b")
    # 128 tokens of system prompt are shared by every replay, and one that tells prompts apart.
    assert [common(a, b) for a, b in zip(plain, other, strict=True)] == [129, 129, 129, 129, 65, 65]


def test_sessions_do_not_share_unless_their_ids_are_common() -> None:
    sessions = load_shipped("workers.jsonl")
    prompts = TokenPrompts(sessions, range(5000), 0)
    one, two = (prompts.prompt(item, request_keys(item)[0]) for item in sessions)
    assert common(one, two) < 2
    arrivals = load_shipped("arrivals.jsonl")
    prompts = TokenPrompts(arrivals, range(5000), 0)
    made = [prompts.prompt(item, key) for item in arrivals for key in request_keys(item)]
    assert [len(ids) for ids in made] == [1300, 700, 1100, 1700, 2100, 400]
    # A last block may be partial: [0 1 4] has 76 tokens of block 4, none of which [0 1 5 6] has.
    assert [common(made[0], ids) for ids in made[1:]] == [512, 1024, 1024, 1024, 0]
    assert common(made[3], made[4]) == 3 * 512


def test_many_prompts_after_one_prefix_are_told_apart_by_several_tokens() -> None:
    data = b"\n".join(b'{"timestamp":0,"input_length":40,"output_length":1,"hash_ids":[%d]}' % n for n in range(40))
    sessions = parse_trace(data, "wide.jsonl")
    prompts = TokenPrompts(sessions, [3, 5, 9, 12], 0)
    made = [prompts.prompt(item, request_keys(item)[0]) for item in sessions]
    assert len({tuple(ids[:3]) for ids in made}) == 40  # 4 ** 3 is 64


def test_vocabularies_that_cannot_do() -> None:
    sessions = [tree([row(n, [n + 1], block=1) for n in range(5)], block=1)]
    with pytest.raises(ConfigError, match="blocks of 1 tokens are too small: 5 different ones follow the same prefix"):
        TokenPrompts(sessions, [1, 2, 3], 0)
    with pytest.raises(ConfigError, match="at least 2 different tokens, not 1"):
        TokenPrompts(sessions, [1], 0)
    with pytest.raises(ConfigError, match="must all be different"):
        TokenPrompts(sessions, [1, 2, 1], 0)


def test_markers_are_of_one_replay() -> None:
    first = tree_marker("run", 0, 3, "demo")
    assert first == tree_marker("run", 0, 3, "demo") and len(first) == 12 and int(first, 16) >= 0
    assert (
        len({first, tree_marker("run", 1, 3, "demo"), tree_marker("run", 0, 4, "demo"), tree_marker("x", 0, 3, "demo")})
        == 4
    )


def test_recorded_sessions_have_the_recorded_lengths() -> None:
    found = load_traces([shared("weka") / f"trace_{number}.json.gz" for number in ("0504", "0291")])
    prompts = TokenPrompts(found, range(1000, 40_000), 42)
    for item in found:
        keys = request_keys(item)
        made = [prompts.prompt(item, key, "m") for key in keys]
        assert [len(ids) for ids in made] == [request_of(item, key).input_tokens for key in keys]
        for (one, a), (other, b) in itertools.combinations(zip(keys, made, strict=True), 2):
            blocks = shared_blocks(item.trie, request_of(item, one).node, request_of(item, other).node)
            # Equality of slices: comparing a few hundred prompts of 100k tokens one by one would take minutes.
            end = blocks * 64
            assert a[:end] == b[:end] and (len(a) == end or len(b) == end or a[end] != b[end])


# --- chat ------------------------------------------------------------------------------------------------------------


def fake_tokens(body: Mapping[str, Any]) -> list[int]:
    """A tokenizer of one token a word, but two for words with a `q`; messages cost 2 tokens before and 1 after, and a
    prompt 1 at its start and 3 at its end."""

    def words(text: str) -> list[int]:
        return [int.from_bytes(word.encode()[:7], "big") + n for word in text.split() for n in range(1 + ("q" in word))]

    if "prompt" in body:
        return words(body["prompt"])
    ids = [1]
    for message in body["messages"]:
        ids += [2, {"system": 3, "user": 4, "assistant": 5}[message["role"]], *words(message["content"]), 6]
    return [*ids, 2, 5, 7]


async def fake_tokenize(body: Mapping[str, Any]) -> Sequence[int]:
    return fake_tokens(body)


COSTS = ChatCosts(
    front_with_system=1 + 2 + 1, front=1 + 2 + 1, system_to_user=4, user_to_assistant=4, assistant_to_user=4, end=1 + 3
)
"""Of `fake_tokens`: openers included."""


async def test_words_and_costs_are_found_by_asking() -> None:
    asked = 0

    async def tokenize(body: Mapping[str, Any]) -> Sequence[int]:
        nonlocal asked
        asked += 1
        return fake_tokens(body)

    words = await find_words(tokenize)
    expected = [word for word in dict.fromkeys(CANDIDATES.split()) if "q" not in word]
    assert len({word[:7] for word in expected}) == len(words.words) == len(set(words.token_ids))
    assert set(words.words) <= set(expected) and asked < 60
    assert all(
        fake_tokens({"prompt": word}) == [token] for word, token in zip(words.words, words.token_ids, strict=True)
    )
    assert await measure_costs(tokenize, words) == COSTS


async def test_tokenizers_that_cannot_do() -> None:
    async def letters(body: Mapping[str, Any]) -> Sequence[int]:
        return list(body["prompt"].encode())

    async def uneven(body: Mapping[str, Any]) -> Sequence[int]:
        return fake_tokens(body) + [0] * (len(body.get("messages", ())) // 4)

    with pytest.raises(TargetError, match="only 0 of the words"):
        await find_words(letters)
    with pytest.raises(
        TargetError, match=r"adds \[4, 4, 4, 4, 4, 4, 5\] tokens around messages where \[4, 4, 4, 4, 4, 4, 4\]"
    ):
        await measure_costs(uneven, await find_words(fake_tokenize))


def tail_of(found: SessionTree, key: RequestKey) -> int:
    request = request_of(found, key)
    return max(0, request.input_tokens - found.trie.depth(request.node) * found.block_tokens)


def check_chat(
    found: SessionTree, prompts: ChatPrompts, count: Any, costs: ChatCosts, marker: str = ""
) -> list[list[dict[str, str]]]:
    """Lengths, roles and shared prefixes of all prompts of a session."""
    made = []
    for key in request_keys(found):
        prompt = prompts.prompt(found, key, marker)
        messages = list(prompt.messages)
        made.append(messages)
        roles = [message["role"] for message in messages]
        start = 1 if roles[0] == "system" else 0
        assert roles[start:] == ["user", "assistant"] * ((len(roles) - start) // 2) + ["user"]
        ids = count({"messages": messages})
        assert len(ids) == prompt.tokens
        assert prompt.tokens == request_of(found, key).input_tokens
    tokens = [count({"messages": messages}) for messages in made]
    for (one, a), (other, b) in itertools.combinations(zip(request_keys(found), tokens, strict=True), 2):
        blocks = shared_blocks(found.trie, request_of(found, one).node, request_of(found, other).node)
        if blocks:
            more = common(a, b) - blocks * found.block_tokens
            # A tail that is shorter than the prompt's end makes the last block give way to it.
            short = max(costs.end - tail_of(found, one), costs.end - tail_of(found, other), 0)
            assert -short <= more <= max(costs.system_to_user, costs.user_to_assistant, costs.assistant_to_user)
    return made


@pytest.mark.parametrize("name", shipped_traces())
async def test_chat_prompts_have_the_recorded_lengths_and_sharing(name: str) -> None:
    words = await find_words(fake_tokenize)
    sessions = load_shipped(name)
    prompts = ChatPrompts(sessions, words, COSTS, 7)
    for found in sessions:
        check_chat(found, prompts, fake_tokens, COSTS)


async def test_the_roles_of_blocks() -> None:
    (found,) = load_shipped("workshop.json")
    prompts = ChatPrompts([found], await find_words(fake_tokenize), COSTS, 7)
    made = check_chat(found, prompts, fake_tokens, COSTS)
    roles = [[message["role"] for message in messages] for messages in made]
    pair = ["user", "assistant"]
    # Compaction goes back to the system prompt; the subagent's first block is its system prompt.
    assert roles[0] == ["system", "user"]
    assert roles[1] == ["system", *pair, "user"] and roles[2] == ["system", *pair * 2, "user"]
    assert roles[3] == ["system", "user"]
    assert roles[4] == ["system", "user"] and roles[5] == ["system", *pair, "user"]
    assert made[1][:1] == made[0][:1] and made[2][:3] == made[1][:3]
    # 70 tokens are two blocks of 64, of which the template takes a part.
    assert len(made[1][2]["content"].split()) == 1 + 128 - COSTS.user_to_assistant
    system = prompts.prompt(found, request_keys(found)[0], "x").messages[0]
    assert system == made[0][0]
    assert prompts.prompt(found, request_keys(found)[0], "x").messages[1] != made[0][1]


async def test_prompts_shorter_than_the_template_are_as_short_as_they_can_be() -> None:
    found = tree([row(0, [], tail=3), row(2, [1], tail=2)])
    words = await find_words(fake_tokenize)
    made = [ChatPrompts([found], words, COSTS, 0).prompt(found, key) for key in request_keys(found)]
    assert [item.tokens for item in made] == [8, 8]
    assert all(item.messages == ({"role": "user", "content": "The"},) for item in made)


@settings(max_examples=60, deadline=None)
@given(histories(), st.lists(st.integers(0, 31), min_size=15, max_size=15))
def test_chat_prompts_of_any_history(rows: list[dict[str, Any]], tails: list[int]) -> None:
    for item, tail in zip(rows, tails, strict=False):
        item["in"] = len(item["hash_ids"]) * 32 + tail
        item["out"] = 40
        if item["in"] < 32:
            item["in"] += 32  # the template alone takes eight
    found = tree(rows, block=32)
    words = Words(tuple(f"w{n}" for n in range(64)), tuple(range(64)))
    check_chat(found, ChatPrompts([found], words, COSTS, 0), fake_tokens, COSTS)


async def test_the_embedded_model_counts_what_was_recorded() -> None:
    from longturn.frontend.chat_template import ChatTemplates
    from longturn.frontend.records import ChatPrompt
    from longturn.frontend.tokenizer import load_tokenizer
    from longturn.source import resolve_source

    try:
        tokenizer = load_tokenizer(resolve_source(ModelConfig()))
    except ModelError as error:
        pytest.skip(str(error))
    templates = ChatTemplates.of(tokenizer)

    def count(body: Mapping[str, Any]) -> list[int]:
        text = body["prompt"] if "prompt" in body else templates.render(ChatPrompt(tuple(body["messages"])))
        return tokenizer.encode(text)

    async def tokenize(body: Mapping[str, Any]) -> Sequence[int]:
        return count(body)

    words = await find_words(tokenize)
    assert len(words.words) > 200
    costs = await measure_costs(tokenize, words)
    for name in shipped_traces():
        sessions = [scale_tree(found, 0.5) for found in load_shipped(name)]
        prompts = ChatPrompts(sessions, words, costs, 1)
        for found in sessions:
            if found.id == "workers":
                continue  # its title call has 65 tokens, less than this model's own system prompt and the template
            check_chat(found, prompts, count, costs, "00ff")


# --- /tokenize -------------------------------------------------------------------------------------------------------


async def test_tokenize_over_http() -> None:
    bodies: list[Any] = []

    async def answer(http: web.Request) -> web.Response:
        bodies.append(await http.json())
        if http.headers.get("Authorization") != "Bearer k":
            return web.json_response({"error": "no"}, status=401)
        return web.json_response({"count": 3, "tokens": [4, 5, 6]} if "prompt" in bodies[-1] else {"count": 3})

    app = web.Application()
    app.router.add_post("/tokenize", answer)
    async with TestServer(app) as server:
        url = str(server.make_url("/v1"))
        async with HttpTokenize(url, "m", api_key="k") as tokenize:
            assert await tokenize({"prompt": "x"}) == [4, 5, 6]
            assert bodies == [{"model": "m", "prompt": "x"}]
            with pytest.raises(TargetError, match="/tokenize sent no token list"):
                await tokenize({"messages": []})
        async with HttpTokenize(url, "m") as tokenize:
            with pytest.raises(TargetError, match="/tokenize answered 401"):
                await tokenize({"prompt": "x"})
    async with HttpTokenize(url, "m") as tokenize:
        with pytest.raises(TargetError, match="no answer from http://"):
            await tokenize({"prompt": "x"})
    await asyncio.sleep(0)


def test_dropping_long_requests_leaves_prompts_that_can_be_made() -> None:
    (found,) = load_shipped("workshop.json")
    (small,), dropped = drop_long([found], 800)
    assert dropped == 1
    prompts = TokenPrompts([small], range(5000), 0)
    assert [len(prompts.prompt(small, key)) for key in request_keys(small)] == [300, 560, 400, 200, 520]
