"""Reasoning and tool calls over the OpenAI API: streamed and plain answers say the same, and the SDK reads both."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import openai
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longturn.config import EngineConfig
from longturn.engine.records import FinishReason
from longturn.frontend.parsers.output import OutputParser
from longturn.frontend.parsers.registry import output_format
from longturn.frontend.records import ChatPrompt, TextChunk, TextRequest, TokenLogprob, ToolChoice, Usage
from longturn.server import sse
from longturn.server.app import create_app
from longturn.server.ports import ServedModel
from tests.frontend.m3 import Written, block, cut, invoke, outputs, tag, tool
from tests.server.served import Start

M3 = output_format("MiniMaxM3SparseForConditionalGeneration")
TOOLS = [tool("look", {"path": "x", "lines": 3}), tool("run", {"argv": ["x"]})]
CALLS = block(
    invoke("look", tag("path", "src/main.py") + tag("lines", "20")),
    invoke("run", tag("argv", tag("item", "ls") + tag("item", "-l é😀"))),
)
EXPECTED = [("look", {"path": "src/main.py", "lines": 20}), ("run", {"argv": ["ls", "-l é😀"]})]
USER = [{"role": "user", "content": "what is in main.py?"}]


class Engine:
    """Alive, and nothing else."""

    alive = True
    restarts = 0

    def health(self) -> str:
        return "ok"

    def abort(self, request_id: str) -> bool:
        return False


class WritingService:
    """Writes a text in pieces, through M3's own parsers; a piece is a token."""

    def __init__(self, pieces: Sequence[str], finish: FinishReason = FinishReason.STOP) -> None:
        self.pieces = pieces
        self.finish = finish
        self.requests: list[TextRequest] = []

    async def generate(self, request: TextRequest) -> AsyncIterator[TextChunk]:
        self.requests.append(request)
        assert isinstance(request.prompt, ChatPrompt)
        opened = request.prompt.template_kwargs.get("thinking_mode") == "enabled"
        parser = OutputParser.of(M3, request, "<mm:think>" if opened else "")
        logprobs = request.sampling.logprobs is not None
        for number, text in enumerate(self.pieces):
            made = parser.push(text) if parser else None
            entry = TokenLogprob(number, text, text.encode(), -0.5)
            yield TextChunk(
                text if made is None else made.content,
                (number,),
                (entry,) if logprobs else (),
                reasoning="" if made is None else made.reasoning,
                tool_calls=() if made is None else made.calls,
            )
        last = parser.finish() if parser else None
        yield TextChunk(
            "" if last is None else last.content,
            finish=self.finish,
            usage=Usage(7, len(self.pieces), 0, reasoning_tokens=2),
            reasoning="" if last is None else last.reasoning,
            tool_calls=() if last is None else last.calls,
        )

    async def tokenize(self, prompt: Any, *, add_special_tokens: bool, **scope: Any) -> list[int]:
        return []

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return ""


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or ()]


async def streamed(served: Any, **options: Any) -> tuple[Any, list[Any]]:
    """The completion that the SDK itself makes of the events, and the events."""
    messages: Any = options.pop("messages", USER)
    strict = [{"type": "function", "function": {**t["function"], "strict": True}} for t in options.pop("tools", TOOLS)]
    chunks = []
    extra = {"tools": strict} if strict else {}
    async with served.sdk.chat.completions.stream(
        model="mock", messages=messages, stream_options={"include_usage": True}, **extra, **options
    ) as stream:
        async for event in stream:
            if event.type == "chunk":
                chunks.append(event.chunk)
        return await stream.get_final_completion(), chunks


@pytest.mark.parametrize("pieces", [1, 5, 1000])
async def test_streamed_and_plain_answers_are_the_same(start: Start, pieces: int) -> None:
    text = f"<mm:think>I must look.</mm:think>One moment.\n{CALLS}"
    service = WritingService([text[i : i + pieces] for i in range(0, len(text), pieces)])
    served = await start(service=service)
    plain = await served.chat(tools=TOOLS)
    message = plain.choices[0].message
    assert (message.content, message.reasoning_content, message.reasoning) == (
        "One moment.",
        "I must look.",
        "I must look.",
    )
    assert calls_of(message) == EXPECTED and plain.choices[0].finish_reason == "tool_calls"
    assert all(call.type == "function" and call.id for call in message.tool_calls)
    assert plain.usage.completion_tokens_details.reasoning_tokens == 2
    whole, chunks = await streamed(served)
    (choice,) = whole.choices
    assert (choice.message.content, choice.finish_reason) == ("One moment.", "tool_calls")
    assert calls_of(choice.message) == EXPECTED
    assert len({call.id for call in choice.message.tool_calls}) == 2
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(getattr(delta, name, "") for delta in deltas) == "I must look."
    # Each event has one kind of content: clients that look for one thing first would miss the other.
    kinds = [sum(map(bool, (delta.content, getattr(delta, "reasoning", ""), delta.tool_calls))) for delta in deltas]
    assert max(kinds) == 1
    # And one call, once, as OpenAI's server has it: some clients read the first piece of each event alone.
    assert max(len(delta.tool_calls or ()) for delta in deltas) == 1
    assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == 2


async def test_an_answer_that_only_calls_has_no_content(start: Start) -> None:
    served = await start(service=WritingService([CALLS]))
    message = (await served.chat(tools=TOOLS)).choices[0].message
    assert message.content is None and calls_of(message) == EXPECTED
    assert "reasoning" not in message.model_dump()


async def test_a_call_that_is_cut_off_is_the_beginning_of_one(start: Start) -> None:
    text = f"<mm:think>a</mm:think>b {CALLS[: CALLS.index('main.py')]}"
    served = await start(service=WritingService(list(text), FinishReason.LENGTH))
    plain = (await served.chat(tools=TOOLS)).choices[0]
    assert (plain.finish_reason, plain.message.content) == ("length", "b")
    assert [call.function.arguments for call in plain.message.tool_calls] == ['{"path":"src/']
    async with served.sdk.chat.completions.with_streaming_response.create(
        model="mock", messages=USER, tools=TOOLS, stream=True
    ) as reply:
        lines = [line async for line in reply.iter_lines() if line.startswith("data: {")]
    parts = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert "".join(part["delta"].get("content", "") for part in parts) == plain.message.content
    assert parts[-1]["finish_reason"] == "length"


async def test_whole_calls_before_the_limit_end_with_length(start: Start) -> None:
    served = await start(service=WritingService([CALLS, "\nand then"], FinishReason.LENGTH))
    choice = (await served.chat(tools=TOOLS)).choices[0]
    assert (choice.finish_reason, calls_of(choice.message)) == ("length", EXPECTED)


@pytest.mark.parametrize("options", [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}])
async def test_without_tools_there_are_no_calls(start: Start, options: dict[str, Any]) -> None:
    served = await start(service=WritingService([f"<mm:think>a</mm:think>b{CALLS}"]))
    choice = (await served.chat(**options)).choices[0]
    assert (choice.message.content, choice.message.tool_calls) == (f"b{CALLS}", None)
    assert (choice.message.reasoning_content, choice.finish_reason) == ("a", "stop")


async def test_several_choices_each_have_their_own_calls(start: Start) -> None:
    served = await start(service=WritingService(["x", CALLS]))
    reply = await served.chat(tools=TOOLS, n=2)
    assert [calls_of(choice.message) for choice in reply.choices] == [EXPECTED] * 2
    assert len({call.id for choice in reply.choices for call in choice.message.tool_calls}) == 4
    assert reply.usage.completion_tokens_details.reasoning_tokens == 4
    whole, _ = await streamed(served, n=2)
    assert [calls_of(choice.message) for choice in whole.choices] == [EXPECTED] * 2
    assert [choice.finish_reason for choice in whole.choices] == ["tool_calls"] * 2


async def test_every_token_has_its_logprob_and_id_once(start: Start) -> None:
    pieces = ["<mm:think>", "a", "</mm:think>", "b", *CALLS]
    served = await start(service=WritingService(pieces))
    extra = {"return_token_ids": True}
    plain = (await served.chat(tools=TOOLS, logprobs=True, extra_body=extra)).choices[0]
    _, chunks = await streamed(served, logprobs=True, extra_body=extra)
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    entries = [entry.token for part in parts if part.logprobs for entry in part.logprobs.content]
    assert entries == [entry.token for entry in plain.logprobs.content] == pieces
    ids = [token for part in parts for token in part.model_dump().get("token_ids") or ()]
    assert ids == plain.model_dump()["token_ids"] == list(range(len(pieces)))


async def test_template_arguments_reach_the_template(start: Start) -> None:
    service = WritingService(["a thought</mm:think>b"])
    served = await start(service=service)
    extra = {"chat_template_kwargs": {"thinking_mode": "enabled"}}
    message = (await served.chat(reasoning_effort="high", extra_body=extra)).choices[0].message
    assert (message.content, message.reasoning_content) == ("b", "a thought")
    prompt = service.requests[0].prompt
    assert isinstance(prompt, ChatPrompt)
    assert prompt.template_kwargs == {"thinking_mode": "enabled", "reasoning_effort": "high"}


async def test_no_reasoning_effort_is_no_thinking(start: Start) -> None:
    service = WritingService(["b"])
    served = await start(service=service)
    await served.chat(reasoning_effort="none")
    await served.chat(reasoning_effort="none", extra_body={"chat_template_kwargs": {"enable_thinking": True}})
    kwargs = [request.prompt.template_kwargs for request in service.requests if isinstance(request.prompt, ChatPrompt)]
    assert kwargs == [
        {"reasoning_effort": "none", "enable_thinking": False},
        {"reasoning_effort": "none", "enable_thinking": True},
    ]


async def test_the_choice_of_tools_reaches_the_frontend(start: Start) -> None:
    service = WritingService([CALLS])
    served = await start(service=service)
    named = {"type": "function", "function": {"name": "run"}}
    for options in (
        {},
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        {"tools": TOOLS, "tool_choice": named},
        {"tools": TOOLS, "tool_choice": "none"},
    ):
        await served.chat(**options)
    assert [(request.parse_tools, request.tool_choice) for request in service.requests] == [
        (False, ToolChoice("none")),
        (True, ToolChoice("auto")),
        (True, ToolChoice("required", parallel=False)),
        (True, ToolChoice("required", ("run",), parallel=False)),
        (False, ToolChoice("none")),
    ]
    with pytest.raises(openai.BadRequestError, match="'walk', which is none of the tools"):
        await served.chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "walk"}})


async def test_reasoning_tokens_are_there_when_0(start: Start) -> None:
    served = await start()
    async with served.http() as http:
        for path, body in (("chat/completions", {"messages": USER}), ("completions", {"prompt": "x"})):
            reply = (await http.post(f"/v1/{path}", json={**body, "max_tokens": 1})).json()
            assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_a_stream_stays_alive_while_a_call_is_written(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.0)
    served = await start(service=WritingService(list(CALLS)))
    async with served.http() as http:
        reply = await http.post("/v1/chat/completions", json={"messages": USER, "tools": TOOLS, "stream": True})
    before_call = reply.text[: reply.text.index('"tool_calls"')]
    assert before_call.count(": waiting\n\n") > 50


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(outputs(), st.lists(st.integers(0, 10_000), max_size=12))
async def test_any_output_cut_anywhere(made: Written, at: list[int]) -> None:
    engine: Any = Engine()
    app = create_app(WritingService(cut(made.text, at)), EngineConfig(), engine=engine, model=ServedModel("mock", 2000))
    body = {"messages": USER, "tools": made.tools}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        plain = (await http.post("/v1/chat/completions", json=body)).json()["choices"][0]
        reply = await http.post("/v1/chat/completions", json={**body, "stream": True})
    events = [json.loads(e.removeprefix("data: ")) for e in reply.text.split("\n\n") if e.startswith("data: {")]
    deltas = [event["choices"][0]["delta"] for event in events]
    content = "".join(delta.get("content", "") for delta in deltas)
    calls: dict[int, tuple[str, str]] = {}
    for delta in deltas:
        assert len(delta.get("tool_calls", ())) <= 1
        for call in delta.get("tool_calls", ()):
            name, arguments = calls.get(call["index"], ("", ""))
            function = call["function"]
            calls[call["index"]] = (name + function.get("name", ""), arguments + function["arguments"])
    assert (plain["message"]["content"] or "") == content == made.content
    plain_calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in plain["message"].get("tool_calls", ())
    ]
    assert list(calls.values()) == plain_calls
    assert [(name, json.loads(arguments)) for name, arguments in plain_calls] == made.calls
    assert plain["finish_reason"] == events[-1]["choices"][0]["finish_reason"] == "tool_calls"
