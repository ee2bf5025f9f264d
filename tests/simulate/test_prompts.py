"""Page names share exactly what the prompts that `bench.synth` makes from the same ids share."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.bench.lanes import LiveTree
from longturn.bench.synth import TokenPrompts, request_keys
from longturn.bench.traces.shrink import scale_tree
from longturn.bench.traces.tree import SessionTree
from longturn.config import PAGE_TOKENS
from longturn.simulate.prompts import TracePrompts
from tests.bench.make_traces import row
from tests.bench.make_traces import tree as make_tree


def live(tree: SessionTree, lane: int) -> LiveTree:
    return LiveTree(tree, lane, 0, f"marker-{lane}", t_star_s=None)


def equal_pages(one: list[int], other: list[int]) -> int:
    """Leading whole pages of tokens that two prompts share."""
    pages = min(len(one), len(other)) // PAGE_TOKENS
    for page in range(pages):
        span = slice(page * PAGE_TOKENS, (page + 1) * PAGE_TOKENS)
        if one[span] != other[span]:
            return page
    return pages


def check(tree: SessionTree) -> None:
    made, names = TokenPrompts([tree], range(100, 4100), seed=1), TracePrompts([tree])
    prompts: list[tuple[list[int], tuple[bytes, ...]]] = []
    for lane in (0, 1):
        replay = live(tree, lane)
        for key in request_keys(tree):
            tokens = made.prompt(tree, key, replay.marker)
            request = names.request(replay, key, 5)
            assert len(request.prompt) == 4 * len(tokens)
            assert len(request.page_hashes) == len(tokens) // PAGE_TOKENS
            prompts.append((tokens, request.page_hashes))
    for (one, a), (other, b) in itertools.combinations(prompts, 2):
        shared = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert shared == equal_pages(one, other)


@st.composite
def sessions(draw: st.DrawFn) -> SessionTree:
    """Prompts that extend, shorten and branch."""
    block = draw(st.sampled_from([32, 48, 64, 128, 300]))
    taken = itertools.count()
    prompts: list[list[int]] = []
    for _ in range(draw(st.integers(1, 5))):
        base = draw(st.sampled_from(prompts)) if prompts else []
        kept = base[: draw(st.integers(0, len(base)))]
        prompts.append([*kept, *(next(taken) for _ in range(draw(st.integers(1, 8))))])
    rows = [
        row(10.0 * n, ids, api=1.0, out=3, tail=draw(st.integers(0, block - 1)), block=block)
        for n, ids in enumerate(prompts)
    ]
    system = draw(st.sampled_from([0, block, 2 * block + 1]))
    return make_tree(rows, block=block, system_tokens=min(system, len(prompts[0]) * block), tool_tokens=0)


@settings(max_examples=60, deadline=None)
@given(sessions())
def test_names_share_what_tokens_share(tree: SessionTree) -> None:
    check(tree)


@pytest.mark.parametrize("factor", [0.05, 0.3])
def test_scaled_sessions_whose_pages_hold_many_blocks(factor: float) -> None:
    rows = [row(10.0 * n, list(range(300 + 40 * n)), tail=7, block=64) for n in range(3)]
    check(scale_tree(make_tree(rows, block=64), factor))


def test_replays_share_the_system_prompt_alone() -> None:
    tree = make_tree([row(0, list(range(6)), block=128)], block=128, system_tokens=256)
    names = TracePrompts([tree])
    (key,) = request_keys(tree)
    one, other = (names.request(live(tree, lane), key, 1).page_hashes for lane in (0, 1))
    assert [a == b for a, b in zip(one, other, strict=True)] == [True, True, False, False, False, False]


def test_requests_have_names_and_outputs_of_their_own() -> None:
    tree = make_tree([row(0, [1, 2], block=64)], block=64)
    names, (key,) = TracePrompts([tree]), request_keys(tree)
    one, other = (names.request(live(tree, 0), key, 3) for _ in range(2))
    assert one.request_id != other.request_id and one.prompt != other.prompt
    assert one.page_hashes == other.page_hashes and one.sampling.max_tokens == 3
