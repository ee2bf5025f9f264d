"""Response headers and metrics of reuse, through every endpoint, streamed and not, over the real frontend."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from longturn.config import EngineConfig, ServerConfig
from longturn.engine.records import EngineRequest, RequestOutput
from longturn.frontend.chat_template import ChatTemplates
from longturn.frontend.frontend import Frontend
from longturn.frontend.records import ReuseReason
from longturn.frontend.validate import ModelLimits
from longturn.server import sse
from tests.frontend.caching import CachingEngine
from tests.frontend.test_parsers_output import EOS, M3, TOKENIZER, VOCAB
from tests.server.dialects import Scripted, client, events_of

LONG = "hello world " * 200
RULES = "".join(f"Rule {number}: be brief.\n" for number in range(100))


def frontend(text: str = "It is done.") -> Frontend:
    limits = ModelLimits(100_000, VOCAB, (EOS,))
    engine = CachingEngine(lambda: TOKENIZER.encode(text), EOS)
    return Frontend(TOKENIZER, ChatTemplates.of(TOKENIZER), engine, limits, output=M3)


def longturn_headers(reply: httpx.Response) -> dict[str, str]:
    assert reply.status_code == 200, reply.text
    prefix = "x-longturn-"
    return {name.removeprefix(prefix): value for name, value in reply.headers.items() if name.startswith(prefix)}


class Endpoint:
    """One way to have a conversation."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.turns: list[str] = [f"Question. {LONG}"]

    def body(self, system: str = "You help.") -> dict[str, Any]:
        roles = ("user", "assistant")
        messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(self.turns)]
        if self.path == "/v1/chat/completions":
            return {"messages": [{"role": "system", "content": system}, *messages]}
        if self.path == "/v1/responses":
            return {"instructions": system, "input": messages}
        if self.path == "/v1/messages":
            return {"system": system, "messages": messages, "max_tokens": 99}
        names = ("user", "ai")
        text = "".join(f"]~b]{names[number % 2]}\n{text}[e~[\n" for number, text in enumerate(self.turns))
        return {"prompt": f"]~!b[]~b]system\n{system}[e~[\n{text}]~b]ai\n", "max_tokens": 99}

    def add(self, *texts: str) -> None:
        self.turns += texts


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_turn_by_turn(path: str, stream: bool) -> None:
    service, talk = frontend(), Endpoint(path)
    engine = service.engine
    assert isinstance(engine, CachingEngine)
    async with client(service) as http:

        async def ask(**changes: Any) -> dict[str, str]:
            return longturn_headers(await http.post(path, json=talk.body(**changes) | {"stream": stream}))

        first = {"cached-tokens": "0", "reuse": "first_turn"}
        if path == "/v1/completions":  # a text does not say whether it has an answer in it
            del first["reuse"]
        assert await ask() == first
        talk.add("It is done.", "And now?")
        whole = (len(engine.left[-1]) - 1) // 128 * 128
        assert whole > 0 and await ask() == {"cached-tokens": str(whole), "reuse": "extended"}
        engine.pages.clear()
        assert await ask() == {"cached-tokens": "0", "reuse": "evicted"}
        talk.add("It is done.", "And then?")
        talk.turns[2] = "Edited."
        left, made = engine.left[-1], await ask()
        ids = engine.left[-1]
        diverged = next(i for i, (a, b) in enumerate(zip(left, ids, strict=False)) if a != b)
        if path == "/v1/completions":  # nothing names a conversation there but its own text
            assert made == {"cached-tokens": str(diverged // 128 * 128), "reuse": "extended"}
        else:
            expected = {"reuse": "edited_history", "diverged-at": str(diverged)}
            assert made == {"cached-tokens": str(diverged // 128 * 128), **expected}


async def test_a_streamed_message_says_it_at_its_beginning() -> None:
    """Claude Code reads there how much was cached."""
    talk = Endpoint("/v1/messages")
    async with client(frontend()) as http:
        for number in range(2):
            reply = await http.post(talk.path, json=talk.body() | {"stream": True})
            events = dict(events_of(reply.text))
            first, last = events["message_start"]["message"]["usage"], events["message_delta"]["usage"]
            assert first == last | {"output_tokens": 0}
            assert (first["cache_read_input_tokens"] > 0) is (number == 1)
            talk.add("It is done.", "And now?")


class SlowEngine(CachingEngine):
    """Admits a request at once, and has its first token later than the head of a stream waits."""

    async def generate(self, request: EngineRequest) -> AsyncIterator[RequestOutput]:
        outputs = [output async for output in super().generate(request)]
        yield RequestOutput(request.request_id, cached_tokens=outputs[0].cached_tokens)
        await asyncio.sleep(0.2)
        for output in outputs:
            yield output


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_a_stream_whose_first_token_is_late(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "FIRST_CHUNK_GRACE_S", 0.05)
    engine, talk = SlowEngine(lambda: TOKENIZER.encode("It is done."), EOS), Endpoint(path)
    limits = ModelLimits(100_000, VOCAB, (EOS,))
    async with client(Frontend(TOKENIZER, ChatTemplates.of(TOKENIZER), engine, limits, output=M3)) as http:
        for number in range(2):
            reply = await http.post(path, json=talk.body() | {"stream": True})
            made = longturn_headers(reply)
            assert made["cached-tokens"] == ("0" if number == 0 else str((len(engine.left[0]) - 1) // 128 * 128))
            talk.add("It is done.", "And now?")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_a_volatile_header(path: str) -> None:
    talk = Endpoint(path)
    async with client(frontend()) as http:
        for number in range(3):
            system = f"x-billing: {number}\n{RULES}"
            reply = await http.post(path, json=talk.body(system))
            made = longturn_headers(reply)
            talk.add("It is done.", "More.")
            if number:
                span = re.fullmatch(r"at=(\d+); length=1; kind=header; hash=[0-9a-f]{16}", made.pop("volatile"))
                assert span is not None and int(span[1]) == len("]~!b[]~b]system\nx-billing: ")
                assert made.pop("reuse") == "volatile_header" and int(made.pop("diverged-at")) < 30
            else:
                assert made.pop("reuse") == "first_turn"
            assert made == {"cached-tokens": "0"}
            assert "billing" not in str(reply.headers)
        metrics = (await http.get("/metrics")).text
    assert 'longturn_prompt_reuse_total{model_name="mock",reason="volatile_header"} 2.0' in metrics
    assert 'longturn_prompt_reuse_total{model_name="mock",reason="first_turn"} 1.0' in metrics
    assert 'longturn_volatile_headers_total{model_name="mock"} 2.0' in metrics
    assert all(f'reason="{reason}"' in metrics for reason in ReuseReason)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_usage_says_the_same(path: str) -> None:
    talk = Endpoint(path)
    async with client(frontend()) as http:
        await http.post(talk.path, json=talk.body())
        talk.add("Never said.", "More.")
        reply = await http.post(talk.path, json=talk.body())
        usage = reply.json()["usage"]
        assert usage["reuse"] == reply.headers["x-longturn-reuse"] == "edited_history"
        assert usage["diverged_at"] == int(reply.headers["x-longturn-diverged-at"])
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
        cached = usage["cache_read_input_tokens"] if details is None else details["cached_tokens"]
        assert cached == int(reply.headers["x-longturn-cached-tokens"])
        # The Agents SDK for JavaScript refuses a response whose details are not all of them numbers.
        for part in (part for part in usage.values() if isinstance(part, dict)):
            assert all(isinstance(count, int) for count in part.values()), part


async def test_several_choices_are_one_prompt() -> None:
    talk = Endpoint("/v1/chat/completions")
    async with client(frontend()) as http:
        made = longturn_headers(await http.post(talk.path, json=talk.body() | {"n": 3}))
        assert made == {"cached-tokens": "0", "reuse": "first_turn"}


async def test_services_that_know_no_reuse_and_failures_have_no_headers() -> None:
    body = Endpoint("/v1/chat/completions").body()
    async with client(Scripted("hm")) as http:
        assert longturn_headers(await http.post("/v1/chat/completions", json=body)) == {}
        refused = await http.post("/v1/chat/completions", json=body | {"n": 0})
        assert refused.status_code == 400 and not [name for name in refused.headers if "longturn" in name]


async def test_browsers_may_read_them() -> None:
    config = EngineConfig(server=ServerConfig(cors_origins=("http://a",)))
    async with client(Scripted("hm"), config) as http:
        reply = await http.get("/health", headers={"Origin": "http://a"})
        assert "X-Longturn-Reuse" in reply.headers["access-control-expose-headers"]
