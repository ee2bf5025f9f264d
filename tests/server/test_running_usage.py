"""`continuous_usage_stats`: usage so far in every event of a stream, read by the load client that asks for it."""

from __future__ import annotations

from typing import Any

import pytest

from longturn.bench.client import ChatClient
from tests.server.served import Start

OPTIONS = {"include_usage": True, "continuous_usage_stats": True}


async def events_of(stream: Any) -> list[Any]:
    return [event async for event in stream]


async def test_every_event_of_a_chat_has_the_usage_so_far(start: Start) -> None:
    served = await start()
    events = await events_of(await served.chat("hello", max_tokens=6, seed=0, stream=True, stream_options=OPTIONS))
    counts = [event.usage.completion_tokens for event in events[1:]]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 6
    for event in events[1:]:
        assert event.usage.prompt_tokens == 5
        assert event.usage.total_tokens == 5 + event.usage.completion_tokens
    assert events[0].usage is None, "the role comes before any token"


async def test_prompts_count_once_for_several_choices(start: Start) -> None:
    served = await start()
    stream = await served.sdk.completions.create(
        model="mock", prompt=["one", "three"], n=2, max_tokens=3, seed=0, stream=True, stream_options=OPTIONS
    )
    events = await events_of(stream)
    last, final = events[-2].usage, events[-1].usage
    assert (last.prompt_tokens, last.completion_tokens) == (8, 12)
    assert (final.prompt_tokens, final.completion_tokens) == (8, 12)


@pytest.mark.parametrize("options", [{"include_usage": True}, {"continuous_usage_stats": True}, {}])
async def test_without_both_options_there_is_no_running_usage(start: Start, options: dict[str, bool]) -> None:
    served = await start()
    events = await events_of(await served.chat("hello", max_tokens=4, seed=0, stream=True, stream_options=options))
    assert all(event.usage is None for event in events if event.choices)


async def test_the_load_client_counts_tokens_by_it(start: Start) -> None:
    served = await start()
    body = {"model": "mock", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 9, "seed": 0}
    async with ChatClient(served.url) as client:
        answer = await client.send({**body, "stream_options": {"continuous_usage_stats": True}})
    assert answer.error is None
    tokens = [chunk.tokens for chunk in answer.chunks]
    assert None not in tokens and sum(count or 0 for count in tokens) == answer.output_tokens == 9
