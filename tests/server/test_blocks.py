"""Blocks of an answer do not depend on how it is cut into chunks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longturn.engine.records import FinishReason
from longturn.errors import LongturnError
from longturn.frontend.records import TextChunk, ToolCallDelta, Usage
from longturn.server.blocks import AnswerBlocks, Block

USAGE = Usage(3, 4, 0)


def played(chunks: list[TextChunk], *, reasoning: bool = True) -> AnswerBlocks:
    """The answer, with every event checked against it."""
    answer = AnswerBlocks(reasoning=reasoning)
    seen: dict[int, str] = {}
    open_block: Block | None = None
    for chunk in chunks:
        for event in answer.push(chunk):
            if event.kind == "opened":
                assert open_block is None and event.block.index == len(seen)
                open_block, seen[event.block.index] = event.block, ""
            else:
                assert event.block is open_block
                seen[event.block.index] += event.text
                open_block = None if event.kind == "closed" else open_block
    assert open_block is None
    assert [seen[block.index] for block in answer.blocks] == [block.text for block in answer.blocks]
    return answer


def shape(answer: AnswerBlocks) -> list[tuple[Any, ...]]:
    return [(block.kind, block.name, block.call_id, block.text, block.whole) for block in answer.blocks]


pieces = st.lists(st.text(max_size=5), max_size=4)
calls = st.lists(st.text("abc", min_size=1, max_size=3), max_size=3)


@settings(max_examples=200, deadline=None)
@given(pieces, pieces, calls, pieces, st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]), st.data())
def test_any_cut(
    thoughts: list[str],
    texts: list[str],
    names: list[str],
    behind: list[str],
    finish: FinishReason,
    data: st.DataObject,
) -> None:
    small = [TextChunk(reasoning=text) for text in thoughts]
    small += [TextChunk(text=text) for text in texts]
    for index, name in enumerate(names):
        small.append(TextChunk(tool_calls=(ToolCallDelta(index, f"id{index}", name, "{"),)))
        small.append(TextChunk(tool_calls=(ToolCallDelta(index, arguments="}"),)))
    small += [TextChunk(text=text, behind_calls=len(text) if names else 0) for text in behind]
    merged: list[TextChunk] = []
    for chunk in small:
        if merged and data.draw(st.booleans()):
            last = merged.pop()
            chunk = TextChunk(
                last.text + chunk.text,
                reasoning=last.reasoning + chunk.reasoning,
                tool_calls=last.tool_calls + chunk.tool_calls,
                behind_calls=last.behind_calls + chunk.behind_calls,
            )
        merged.append(chunk)
    end = TextChunk(finish=finish, usage=USAGE)
    whole, cut = played([*small, end]), played([*merged, end])
    assert shape(whole) == shape(cut)
    assert whole.usage == USAGE and whole.called == bool(names)
    before, late = "".join(texts if names else (*texts, *behind)), "".join(behind if names else ())
    expected = [("reasoning", "", "", "".join(thoughts))] if any(thoughts) else []
    expected += [("text", "", "", before)] if before else []
    expected += [("call", name, f"id{index}", "{}") for index, name in enumerate(names)]
    expected += [("text", "", "", late)] if late.strip() else []
    assert [entry[:4] for entry in shape(whole)] == expected
    # Whole arguments are whole, whatever ended the answer behind them.
    cut_off = finish is FinishReason.LENGTH and bool(expected) and expected[-1][0] != "call"
    assert [entry[4] for entry in shape(whole)] == [
        not (cut_off and index == len(expected) - 1) for index in range(len(expected))
    ]


@pytest.mark.parametrize("finish", [FinishReason.STOP, FinishReason.LENGTH])
def test_arguments_that_are_no_object_are_not_whole(finish: FinishReason) -> None:
    answer = played([TextChunk(tool_calls=(ToolCallDelta(0, "id", "f", '{"a": '),)), TextChunk(finish=finish)])
    assert shape(answer) == [("call", "f", "id", '{"a": ', False)]


def test_reasoning_can_be_left_out() -> None:
    answer = played([TextChunk("b", reasoning="a"), TextChunk(finish=FinishReason.STOP)], reasoning=False)
    assert shape(answer) == [("text", "", "", "b", True)]


@pytest.mark.parametrize(("finish", "status"), [(FinishReason.ERROR, 500), (FinishReason.ABORT, 400)])
def test_what_ended_without_an_answer_is_an_error(finish: FinishReason, status: int) -> None:
    with pytest.raises(LongturnError) as caught:
        played([TextChunk("a"), TextChunk(finish=finish)])
    assert caught.value.http_status == status, "clients try 5xx again"
