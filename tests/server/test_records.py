"""Encoders against decoders: what is streamed adds up to what is not, and records survive the wire."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longturn.engine.protocols import ExecutorInfo
from longturn.engine.records import (
    EngineRequest,
    EngineStats,
    FinishReason,
    RequestOutput,
    RequestTimes,
    SamplingParams,
    StepOutputs,
    TokenLogprobs,
    pack_tokens,
)
from longturn.frontend.engine_pump import Abort, Rejection, Stop
from longturn.frontend.records import TextChunk, TokenLogprob, Usage
from longturn.frontend.wire import StartupError, decode_command, decode_event, encode_message
from longturn.server.openai_responses import Answer, EventWriter, whole_answer
from longturn.server.openai_routes import mix64

SAMPLING = SamplingParams(
    5, 1, 0.5, 3, 0.9, 0.1, (1 << 63) - 1, 0.1, -0.2, 1.1, ((3, -1.5), (4, 2.0)), 2, (7, 8)
)  # fmt: skip
COMMANDS = [
    EngineRequest("r", pack_tokens([1, -2, 2**31 - 1]), (b"\x00\xff", b"h"), SAMPLING, "s", -3),
    Abort("r"),
    Stop(),
]
EVENTS = [
    ExecutorInfo(1, 2, 3, 4, 5, "cpu"),
    StartupError("no model", 3),
    Rejection("r", "no", "param", "code", 429),
    StepOutputs(
        (
            RequestOutput(
                "r",
                (1, 2),
                (TokenLogprobs(-0.25, (3, 4), (-1.0, -2.5)),),
                FinishReason.STOP,
                9,
                128,
                RequestTimes(1, 2, 3, 2**62),
                "why",
                1,
            ),
            RequestOutput("q"),
        ),
        EngineStats(running=3, busy_ns=2**60),
    ),
]


@pytest.mark.parametrize("message", COMMANDS, ids=lambda m: type(m).__name__)
def test_commands_survive_the_wire(message: Any) -> None:
    assert decode_command(encode_message(message)) == message


@pytest.mark.parametrize("message", EVENTS, ids=lambda m: type(m).__name__)
def test_events_survive_the_wire(message: Any) -> None:
    assert decode_event(encode_message(message)) == message


tokens = st.builds(
    lambda i, text, logprob: TokenLogprob(i, text, text.encode(), logprob, ((i, text, text.encode(), logprob),)),
    st.integers(0, 9),
    st.text(max_size=3),
    st.floats(-9, 0),
)
chunks = st.builds(
    lambda texts: TextChunk("".join(t.text for t in texts), tuple(t.token_id for t in texts), tuple(texts)),
    st.lists(tokens, max_size=3),
)
choices = st.lists(chunks, min_size=1, max_size=5).map(
    lambda parts: [
        dataclasses.replace(parts[0], prompt_token_ids=(1, 2)),
        *parts[1:],
        TextChunk(finish=FinishReason.STOP, stop_text="\n", usage=Usage(2, 7, 0)),
    ]
)


@given(st.lists(choices, min_size=1, max_size=3), st.sampled_from(["chat.completion", "text_completion"]))
def test_a_stream_adds_up_to_the_whole_answer(parts: list[list[TextChunk]], kind: str) -> None:
    answer = Answer("id", kind, 1, 'a "quoted" model', 1, len(parts), True, True, True)
    whole = json.loads(whole_answer(answer, parts))
    writer = EventWriter(answer)
    stream = writer.opening()
    for index, choice in enumerate(parts):
        for chunk in choice:
            stream += writer.chunk(index, chunk)
    stream += writer.closing()
    events = stream.split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    assert all(event.startswith(b"data: ") and b"\n" not in event for event in events[:-1])
    objects = [json.loads(event[6:]) for event in events[:-2]]
    assert objects[-1]["usage"] == whole["usage"] and objects[-1]["choices"] == []
    assert all(event["usage"] is None and event["model"] == whole["model"] for event in objects[:-1])
    for choice in whole["choices"]:
        mine = [c for event in objects for c in event["choices"] if c["index"] == choice["index"]]
        logprobs = [c["logprobs"] for c in mine if c.get("logprobs")]
        if kind == "chat.completion":
            assert "".join(c["delta"].get("content", "") for c in mine) == choice["message"]["content"]
            assert [t for part in logprobs for t in part["content"]] == choice["logprobs"]["content"]
            assert [c["delta"].get("role") for c in mine] == ["assistant"] + [None] * (len(mine) - 1)
        else:
            assert "".join(c["text"] for c in mine) == choice["text"]
            for key, values in choice["logprobs"].items():
                assert [v for part in logprobs for v in part[key]] == values
        assert [t for c in mine for t in c.get("token_ids", ())] == choice["token_ids"]
        assert [c["finish_reason"] for c in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        assert mine[-1]["stop_reason"] == choice["stop_reason"] == "\n"


def test_seeds_are_splitmix64() -> None:
    # The first outputs of the published generator (Vigna's splitmix64.c) for the seed 1234567.
    assert [mix64(1234567, n) for n in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]
