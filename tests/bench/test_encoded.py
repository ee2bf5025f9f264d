"""Prompts encoded piece by piece hold what the plain ones hold."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.bench.bodies import Bodies, ChatBodies, Prompt, RecordedBodies, TokenBodies
from longturn.bench.encoded import _Blocks, _Kept, encoded
from longturn.bench.records import Answer
from longturn.bench.synth import RequestKey, TokenPrompts, request_keys
from longturn.bench.synth_chat import ChatPrompts
from longturn.bench.synth_words import CANDIDATES, ChatCosts, Words
from longturn.bench.traces.load import load_shipped, load_traces, shipped_traces
from longturn.bench.traces.tree import SessionTree
from tests.bench.make_traces import row, shared, tree
from tests.bench.test_traces_split import histories

WORDS = tuple(dict.fromkeys(CANDIDATES.split()))
COSTS = ChatCosts(front_with_system=3, front=5, system_to_user=4, user_to_assistant=2, assistant_to_user=6, end=3)


def plain(kind: str, trees: list[SessionTree], costs: ChatCosts = COSTS) -> Bodies:
    if kind == "ids":
        return TokenBodies(TokenPrompts(trees, range(1000, 3000), 1))
    return ChatBodies(ChatPrompts(trees, Words(WORDS, tuple(range(len(WORDS)))), costs, 1))


def decoded(fields: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(fields))
    return result


def check(kind: str, trees: list[SessionTree], *, seed: int = 0, costs: ChatCosts = COSTS) -> None:
    """All requests of two replays, in recorded order and then in any."""
    known = plain(kind, trees, costs)
    fast = encoded(known)
    assert fast is not known and fast.path == known.path
    asked = [(item, key, marker) for marker in ("a", "b") for item in trees for key in request_keys(item)]
    shuffled = random.Random(seed).sample(asked, len(asked))
    for item, key, marker in itertools.chain(asked, shuffled):
        one, other = known.prompt(item, key, marker), fast.prompt(item, key, marker)
        assert decoded(other.fields) == one.fields
        assert other.tokens == one.tokens
    fast.forget("a")
    item, key, marker = asked[-1]
    assert decoded(fast.prompt(item, key, "a").fields) == known.prompt(item, key, "a").fields


@pytest.mark.parametrize("kind", ["ids", "chat"])
@settings(max_examples=80, deadline=None)
@given(histories(), st.lists(st.integers(0, 9), min_size=15, max_size=15), st.integers(0, 9))
def test_any_history(kind: str, rows: list[dict[str, Any]], tails: list[int], seed: int) -> None:
    for item, tail in zip(rows, tails, strict=False):
        item["in"] = max(1, item["in"] + tail)
    check(kind, [tree(rows, system_tokens=seed)], seed=seed)


@pytest.mark.parametrize("kind", ["ids", "chat"])
def test_shipped_sessions(kind: str) -> None:
    for name in shipped_traces():
        check(kind, load_shipped(name))


@pytest.mark.parametrize("kind", ["ids", "chat"])
def test_a_template_that_leaves_no_room_cuts_the_last_blocks(kind: str) -> None:
    rows = [row(float(n), list(range(n + 1)), block=8, tail=n % 3, out=8) for n in range(12)]
    greedy = ChatCosts(9, 11, 7, 7, 7, 30)
    check(kind, [tree(rows, block=8, system_tokens=8)], costs=greedy)


@pytest.mark.parametrize("kind", ["ids", "chat"])
def test_recorded_sessions(kind: str) -> None:
    check(kind, load_traces([shared("weka") / "trace_0504.json.gz"]))
    check(kind, load_traces([sorted(shared("weka").glob("*.gz"), key=lambda path: path.stat().st_size)[3]]))


def test_other_prompts_are_encoded_as_they_are_and_told_of_answers() -> None:
    told: list[object] = []

    class Live:
        path = "/v1/completions"

        def prompt(self, tree: SessionTree, key: RequestKey, marker: str) -> Prompt:
            return Prompt({"prompt": [1, 2], "return_token_ids": True}, 2, slack_tokens=3, prefix_tokens=1)

        def answered(self, tree: SessionTree, key: RequestKey, marker: str, answer: Answer) -> None:
            told.append((key, marker, answer))

        def forget(self, marker: str) -> None:
            told.append(marker)

    (found,) = load_shipped("workshop.json")
    key, answer = request_keys(found)[0], Answer(0, 0, 0)
    fast = encoded(Live())
    made = fast.prompt(found, key, "a")
    assert decoded(made.fields) == {"prompt": [1, 2], "return_token_ids": True}
    assert (made.tokens, made.slack_tokens, made.prefix_tokens) == (2, 3, 1)
    assert isinstance(made.fields["prompt"], msgspec.Raw) and fast.path == "/v1/completions"
    fast.answered(found, key, "a", answer)
    fast.forget("a")
    assert told == [(key, "a", answer), "a"]
    assert not isinstance(fast, RecordedBodies), "its prompts must not be made before the answers are there"


@pytest.mark.parametrize("kind", ["ids", "chat"])
def test_blocks_that_the_template_has_no_room_for_keep_the_symbols_that_tell_them_apart(kind: str) -> None:
    """With 32 words and 60 blocks after one, two symbols tell them apart, though the template leaves room for one."""
    rows = [row(float(n), [0, 1, 100 + n, 200 + n], block=8, out=8) for n in range(60)]
    found = tree(rows, block=8, split=False)
    if kind == "chat":
        known: Bodies = ChatBodies(
            ChatPrompts([found], Words(WORDS[:32], tuple(range(32))), ChatCosts(9, 13, 7, 7, 7, 3), 1)
        )
    else:
        known = TokenBodies(TokenPrompts([found], range(32), 1))
    fast = encoded(known)
    for key in request_keys(found):
        assert decoded(fast.prompt(found, key, "m").fields) == known.prompt(found, key, "m").fields


def test_kept_blocks_have_a_limit_and_can_be_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("longturn.bench.encoded._MOST_BYTES", 100)
    found = tree([row(0.0, [0, 1, 2])])
    node = found.conversations[0].requests[0].node

    def blocks(size: int) -> _Blocks:
        return _Blocks(node, bytes(size))

    def there(kept: _Kept) -> list[str]:
        return [marker for marker in "abc" if kept.nearest(found, marker, 0, node)[1]]

    kept = _Kept()
    for _ in range(3):  # the same place again is no more memory
        kept.put(found, "a", 0, blocks(40))
    kept.put(found, "b", 0, blocks(40))
    assert there(kept) == ["a", "b"]
    kept.put(found, "a", 0, blocks(30))
    kept.put(found, "c", 0, blocks(40))
    assert there(kept) == ["a", "c"], "the one unused for longest goes"
    kept.forget("c")
    kept.put(found, "b", 0, blocks(60))
    assert there(kept) == ["a", "b"], "what was forgotten takes no room"
    kept.put(found, "a", 0, blocks(200))
    assert there(kept) == ["a"], "the newest is kept, whatever its size"
