"""Where a prompt's tokens came from, in every dialect: a prompt of 300 tokens has two whole pages and 44 tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from longturn.config import CacheConfig, EngineConfig
from longturn.frontend.records import Usage
from longturn.server.openai_responses import usage_object
from tests.server.dialects import Scripted, client

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def usage_of(path: str, body: dict[str, Any], cached: int, config: EngineConfig | None = None) -> dict[str, Any]:
    """The usage of a plain answer; that of a streamed one is the same."""
    async with client(Scripted("Hello.", cached=cached), config) as http:
        whole = (await http.post(path, json=body)).json()["usage"]
        reply = await http.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    last = [line for line in reply.text.splitlines() if line.startswith("data: {")][-1]
    assert json.loads(last.removeprefix("data: "))["usage"] == whole
    return dict(whole)


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "hi"})], ids=["chat", "text"]
)
@pytest.mark.parametrize(("cached", "written"), [(0, 256), (128, 128), (256, 0), (299, 0)])
async def test_openai(path: str, body: dict[str, Any], cached: int, written: int) -> None:
    usage = await usage_of(path, body, cached)
    assert usage["prompt_tokens_details"] == {"cached_tokens": cached, "cache_write_tokens": written}


async def test_nothing_is_written_where_nothing_is_kept() -> None:
    config = EngineConfig(cache=CacheConfig(prefix_caching=False))
    usage = await usage_of("/v1/chat/completions", CHAT, 0, config)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0, "cache_write_tokens": 0}


def test_a_prompt_is_written_once_however_many_choices_it_has() -> None:
    """The first choice computes the prompt, the others find it; two prompts add up."""
    first, other = Usage(300, 1, 0), Usage(300, 1, 299)
    details = usage_object([first, other, Usage(130, 1, 0), other], 2, 128)["prompt_tokens_details"]
    assert details == {"cached_tokens": 0, "cache_write_tokens": 256 + 128}
