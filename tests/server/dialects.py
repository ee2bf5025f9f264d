"""What the tests of the Responses and the Messages API share: scripted answers, and tools in each dialect."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import anthropic
import httpx

from longturn.config import EngineConfig
from longturn.engine.records import FinishReason
from longturn.frontend.parsers.output import OutputParser
from longturn.frontend.records import ChatPrompt, TextChunk, TextRequest, Usage
from longturn.server.app import create_app
from longturn.server.ports import ServedModel
from tests.frontend.m3 import block, invoke, tag, tool
from tests.server.engine_mock import MockEngine
from tests.server.served import Served
from tests.server.test_parsed_chat import M3

TOOLS = [tool("look", {"path": "x", "lines": 3}), tool("run", {"argv": ["x"]})]
RESPONSES_TOOLS: list[Any] = [{"type": "function", **entry["function"]} for entry in TOOLS]
MESSAGES_TOOLS: list[Any] = [
    {"name": entry["function"]["name"], "input_schema": entry["function"]["parameters"]} for entry in TOOLS
]
CALLS = block(
    invoke("look", tag("path", "src/main.py") + tag("lines", "20")),
    invoke("run", tag("argv", tag("item", "ls") + tag("item", "-l é😀"))),
)
EXPECTED = [("look", {"path": "src/main.py", "lines": 20}), ("run", {"argv": ["ls", "-l é😀"]})]
ANSWER = f"<mm:think>I must look.</mm:think>One moment.\n{CALLS}"


class Scripted:
    """Answers each request with the next text of a script, in pieces, as M3 would write it; a piece is a token."""

    def __init__(self, *texts: str, piece: int = 7, finish: FinishReason = FinishReason.STOP, cached: int = 0) -> None:
        self.texts = texts
        self.piece = piece
        self.finish = finish
        self.cached = cached
        self.stop_text: str | None = None
        self.fail_at: int | None = None
        self.requests: list[TextRequest] = []
        self.counted: list[Any] = []

    def messages(self) -> list[dict[str, Any]]:
        """Of the latest request."""
        prompt = self.requests[-1].prompt
        assert isinstance(prompt, ChatPrompt)
        return [dict(message) for message in prompt.messages]

    def tools(self) -> list[dict[str, Any]]:
        prompt = self.requests[-1].prompt
        assert isinstance(prompt, ChatPrompt)
        return [dict(tool) for tool in prompt.tools]

    async def generate(self, request: TextRequest) -> AsyncIterator[TextChunk]:
        text = self.texts[len(self.requests) % len(self.texts)]
        self.requests.append(request)
        parser = OutputParser.of(M3, request, "")
        pieces = [text[i : i + self.piece] for i in range(0, len(text), self.piece)]
        for number, piece in enumerate(pieces):
            if number == self.fail_at:
                raise ZeroDivisionError("a secret of the inside")
            made = parser.push(piece) if parser else None
            yield TextChunk(
                piece if made is None else made.content,
                (number,),
                prompt_token_ids=tuple(range(300)) if number == 0 else None,
                reasoning="" if made is None else made.reasoning,
                tool_calls=() if made is None else made.calls,
                behind_calls=0 if made is None else made.behind,
            )
        last = parser.finish() if parser else None
        yield TextChunk(
            "" if last is None else last.content,
            finish=self.finish,
            stop_text=self.stop_text,
            usage=Usage(300, len(pieces), self.cached, reasoning_tokens=2),
            reasoning="" if last is None else last.reasoning,
            tool_calls=() if last is None else last.calls,
            behind_calls=0 if last is None else last.behind,
        )

    async def tokenize(self, prompt: Any, *, add_special_tokens: bool, **scope: Any) -> list[int]:
        self.counted.append((prompt, add_special_tokens))
        return [1] * 11

    def detokenize(self, token_ids: Sequence[int]) -> str:
        return ""


class HealthyEngine(MockEngine):
    """Asked for its health only."""

    alive = True
    restarts = 0

    def health(self) -> str:
        return "ok"


def client(service: Any, config: EngineConfig | None = None) -> httpx.AsyncClient:
    """Of the application itself, without a socket."""
    engine: Any = HealthyEngine()
    app = create_app(service, config or EngineConfig(), engine=engine, model=ServedModel("mock", 2000))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


def claude(served: Served, **options: Any) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(**{"base_url": served.url, "api_key": "key", "max_retries": 0, **options})


def events_of(text: str) -> list[tuple[str, dict[str, Any]]]:
    """Names and data of the events of a stream, comments left out."""
    events = []
    for event in text.split("\n\n"):
        lines = [line for line in event.split("\n") if line and not line.startswith(":")]
        if lines:
            name, data = lines
            events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return events
