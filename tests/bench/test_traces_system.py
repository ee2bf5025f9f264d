"""System prompts of captures that declare none."""

from __future__ import annotations

import dataclasses
import statistics

from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.bench.traces.load import load_traces
from longturn.bench.traces.system_prefix import derive_system
from longturn.bench.traces.tree import SessionTree
from tests.bench.make_traces import row, shared, tree


def prompts(*lists: list[int], **more: int) -> SessionTree:
    """A session of unrelated requests with these blocks."""
    return tree([row(100.0 * n, ids, api=1.0) for n, ids in enumerate(lists)], split=False, **more)


def derived(found: SessionTree) -> list[int]:
    return [item.system_tokens for item in derive_system(found).conversations]


def test_what_prompts_have_in_common_before_they_part() -> None:
    user = list(range(10, 20))
    assert derived(prompts([0, 1, 2, *user], [0, 1, 2, *user, 20, 21], [0, 1, 2, 30, 31])) == [3 * 4]
    # Two agents of one kind, found in a flattened capture, have the same prompt.
    both = tree(
        [row(0.0, [0, 1, *user], api=60.0), row(5.0, [0, 1, *range(40, 52)], api=50.0), row(100.0, [0, 1, *user, 60])]
    )
    assert len(both.conversations) == 2 and derived(both) == [2 * 4, 2 * 4]


def test_what_tells_nothing_keeps_nothing() -> None:
    straight = prompts([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 6, 7])
    assert derived(straight) == [0]
    assert derived(prompts([0, 1, 2], [5, 6, 7])) == [0], "nothing in common"
    rewritten = prompts(list(range(10)), [*range(8), 20, 21, 22])
    assert derived(rewritten) == [0], "the end of a message was written anew"
    assert derived(prompts([5])) == [0]


def test_a_capture_that_declares_a_length_keeps_it() -> None:
    found = prompts([0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 1, 30], system_tokens=20)
    assert derive_system(found) is found


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.lists(st.integers(5, 9), min_size=2, max_size=5))
def test_agents_with_one_system_prompt_get_it(system: int, users: list[int]) -> None:
    head = list(range(system))
    lists = [[*head, *range(100 * n, 100 * n + width)] for n, width in enumerate(users, 1)]
    assert derived(prompts(*lists)) == [system * 4]


def test_recorded_captures_agree_with_what_they_declare() -> None:
    """The declared lengths are the oracle: hidden, and derived again."""
    differences = []
    for path in sorted(shared("weka").glob("*.gz")):
        if path.stat().st_size > 40_000:
            continue
        (found,) = load_traces([path])
        hidden = dataclasses.replace(
            found, conversations=tuple(dataclasses.replace(item, system_tokens=0) for item in found.conversations)
        )
        length = derive_system(hidden).root.system_tokens
        if length:
            differences.append((length - found.root.system_tokens) / found.block_tokens)
    assert len(differences) >= 20
    assert sum(difference <= 0 for difference in differences) >= 0.9 * len(differences)
    assert -60 < statistics.median(differences) <= 0
