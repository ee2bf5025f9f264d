"""Events of OpenAI's APIs: what counts as output, how many tokens it has, and when."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longturn.bench.event_stream import EventStream
from longturn.bench.metrics import itl_s, ttft_s
from longturn.bench.records import Answer, Chunk


def event(delta: dict[str, Any] | None = None, **more: Any) -> bytes:
    choice = {"index": 0, **({} if delta is None else {"delta": delta}), **more}
    usage = {"usage": choice.pop("usage")} if "usage" in choice else {}
    return b"data: " + json.dumps({"id": "x", "choices": [choice], **usage}).encode() + b"\n\n"


def usage(completion: int, **more: Any) -> bytes:
    return (
        b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": completion, **more}}).encode() + b"\n\n"
    )


DONE = b"data: [DONE]\n\n"


def read(*pieces: bytes) -> Answer:
    """An answer whose pieces come 1 s apart."""
    stream = EventStream(None)
    stream.head(200, {}, 0)
    for number, piece in enumerate(pieces, 1):
        stream.data(piece, number * 10**9)
    return stream.answer(0, 0, 10**12)


def test_reasoning_text_and_tool_calls_are_output_and_an_empty_role_is_not() -> None:
    call = {"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}
    more = {"index": 0, "function": {"arguments": "{}"}}
    answer = read(
        event({"role": "assistant", "content": ""}),
        event({"reasoning_content": "a", "reasoning": "a"}),
        event({"reasoning": "b"}),
        event({"content": "c"}),
        event({"tool_calls": [call]}),
        event({"tool_calls": [more]}),
        event({}, finish_reason="tool_calls"),
        usage(5, prompt_tokens=7, prompt_tokens_details={"cached_tokens": 4}),
        DONE,
    )
    assert list(answer.chunks) == [Chunk(second * 10**9, None) for second in (2, 3, 4, 5, 6)]
    assert (answer.text, answer.finish, answer.error) == ("c", "tool_calls", None)
    assert (answer.prompt_tokens, answer.cached_tokens, answer.output_tokens) == (7, 4, 5)
    assert answer.end_ns == 9 * 10**9, "the end of the stream, not of the last output"
    assert ttft_s(answer) == 2.0
    assert itl_s(answer) == pytest.approx((9 - 2) / 4)


def test_usage_in_every_event_tells_how_many_tokens_it_bundles() -> None:
    def so_far(count: int) -> dict[str, int]:
        return {"prompt_tokens": 7, "completion_tokens": count}

    answer = read(
        event({"role": "assistant", "content": ""}, usage=so_far(0)),
        event({"content": "a b c"}, usage=so_far(3)),
        event({"content": "d"}, usage=so_far(4)),
        event({}, usage=so_far(5)),  # a token whose text is held back
        event({"content": "e f"}, usage=so_far(7)),
        event({}, finish_reason="stop", usage=so_far(7)),
        usage(7, prompt_tokens=7),
        DONE,
    )
    assert [chunk.tokens for chunk in answer.chunks] == [3, 1, 3]
    assert sum(chunk.tokens or 0 for chunk in answer.chunks) == answer.output_tokens == 7
    assert itl_s(answer) == pytest.approx((8 - 2) / (7 - 3)), "the first event's three tokens took no time after it"


def test_token_ids_tell_it_too_and_are_kept() -> None:
    answer = read(
        event(None, text="a b", token_ids=[5, 6]),
        event(None, text="", token_ids=[7]),
        event(None, text="c", token_ids=[8]),
        event(None, text="", token_ids=[], finish_reason="length"),
        usage(4),
        DONE,
    )
    assert [chunk.tokens for chunk in answer.chunks] == [2, 1, 1]
    assert answer.token_ids == (5, 6, 7, 8)


def test_several_events_in_one_piece_have_one_time() -> None:
    answer = read(event({"content": "a"}) + event({"content": "b"}), event({"content": "c"}) + DONE)
    assert [chunk.at_ns for chunk in answer.chunks] == [10**9, 10**9, 2 * 10**9]


@given(st.lists(st.integers(0, 10_000), max_size=40), st.sampled_from([b"\n", b"\r\n"]))
def test_events_may_be_cut_anywhere(places: list[int], line_end: bytes) -> None:
    events = [
        b": waiting\n\n",
        event({"role": "assistant", "content": ""}),
        event({"content": "né\n"}),
        event({"reasoning": "r"}),
        b"event: ping\nid: 3\ndata:" + event({"content": "x"})[6:],
        event({}, finish_reason="stop"),
        usage(3),
        DONE,
    ]
    data = b"".join(events).replace(b"\n", line_end)
    ends = sorted({place % len(data) for place in places} - {0})
    answer = read(*(data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)))
    assert (answer.text, answer.finish, answer.error, len(answer.chunks)) == ("né\nx", "stop", None, 3)


@pytest.mark.parametrize(
    ("pieces", "message"),
    [
        ([event({"content": "a"})], "the stream ended before the answer was complete"),
        ([b"data: {not json\n\n", DONE], "unreadable event"),
        ([b'data: {"error": {"message": "engine\\ndied"}}\n\n', DONE], "engine died"),
        ([b"data: \xff\xfe\n\n", DONE], "unreadable event"),
        ([b'data: {"choices": [{"delta": {"content": "\xff"}}]}\n\n', DONE], "unreadable event"),
    ],
)
def test_broken_streams_are_one_line(pieces: list[bytes], message: str) -> None:
    answer = read(*pieces)
    assert answer.error is not None and message in answer.error and "\n" not in answer.error


@pytest.mark.parametrize(
    ("status", "headers", "body", "message"),
    [
        (500, {}, b'{"error": {"message": "no\\nluck"}}', "HTTP 500: no luck"),
        (400, {}, b'{"error": "short"}', "HTTP 400: short"),
        (502, {}, b"<html>bad\n gateway</html>", "HTTP 502: <html>bad gateway</html>"),
        (503, {}, b"", "HTTP 503: no text"),
        (308, {"location": "https://h/v1"}, b"", "HTTP 308: the server redirects to https://h/v1: give that address"),
    ],
)
def test_refusals_are_one_line(status: int, headers: dict[str, str], body: bytes, message: str) -> None:
    stream = EventStream(None)
    stream.head(status, headers, 1)
    for byte in body:
        stream.data(bytes([byte]), 2)
    assert stream.answer(0, 0, 3).error == message


def test_chunks_are_a_sequence() -> None:
    chunks = read(event({"content": "a"}), event({"content": "b"}), DONE).chunks
    assert (len(chunks), chunks[0].at_ns, chunks[-1].at_ns) == (2, 10**9, 2 * 10**9)
    assert list(chunks[1:]) == [Chunk(2 * 10**9, None)] and Chunk(10**9, None) in chunks
    with pytest.raises(IndexError):
        chunks[2]


def test_a_stream_without_its_last_line_is_whole_once_it_said_why_it_ended() -> None:
    answer = read(event({"content": "a"}, finish_reason="stop"), event({}, finish_reason=None), usage(1))
    assert (answer.error, answer.finish, answer.end_ns) == (None, "stop", 10**12)
    assert read(event({"content": "a"})).error == "the stream ended before the answer was complete"


def test_a_count_that_falls_makes_no_negative_tokens() -> None:
    counts = [{"completion_tokens": n} for n in (3, 2, 4)]
    answer = read(*(event({"content": "a"}, usage=count) for count in counts), DONE)
    assert [chunk.tokens for chunk in answer.chunks] == [3, 0, 2]
