"""Turn N+1 continues turn N's exact tokens through Responses and Messages, in a loop of reasoning and tool calls.

The frontend is the real one with MiniMax-M3's template and parsers; the engine plays a script, spaced as no rendering
of the parsed answer would be.
"""

from __future__ import annotations

from typing import Any

import pytest

from longturn.engine.records import EngineRequest, RequestOutput, pack_tokens, unpack_tokens
from tests.frontend.fakes import FakeEngine, outputs_of
from tests.frontend.m3 import block, invoke, tag
from tests.frontend.test_parsers_output import EOS, TOKENIZER, m3_frontend
from tests.server.dialects import MESSAGES_TOOLS, RESPONSES_TOOLS, client

TURNS = 5


def wrote(turn: int) -> str:
    """What the model writes: with blanks where a template has none, and none where it has some."""
    lines = tag("path", "é.py") + tag("lines", f"{turn}.5")
    return f"<mm:think>thought {turn} \n</mm:think>\n\nStep {turn}. \n\n{block(invoke('look', lines))}\n"


class Player:
    """An engine's script, with what was asked and what was written."""

    def __init__(self) -> None:
        self.written: list[list[int]] = []

    def __call__(self, request: EngineRequest) -> list[RequestOutput]:
        text = wrote(len(self.written))
        if request.prompt.endswith(pack_tokens(TOKENIZER.encode("<mm:think>"))):
            text = text.removeprefix("<mm:think>")
        self.written.append(TOKENIZER.encode(text))
        return outputs_of(request, self.written[-1], stop_token_id=EOS)


def check(engine: FakeEngine, player: Player) -> None:
    """Every prompt begins with the prompt before it, the tokens that followed, and the end token."""
    prompts = [unpack_tokens(request.prompt) for request in engine.requests]
    assert len(prompts) == TURNS
    for number in range(1, TURNS):
        kept = [*prompts[number - 1], *player.written[number - 1], EOS]
        assert prompts[number][: len(kept)] == kept, (
            number,
            TOKENIZER.decode(kept, skip_special_tokens=False),
            TOKENIZER.decode(prompts[number], skip_special_tokens=False),
        )


@pytest.mark.parametrize("thinks", [True, False])
async def test_messages(thinks: bool) -> None:
    player = Player()
    frontend = m3_frontend(player)
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "look"}]}]
    system = [{"type": "text", "text": "You help.", "cache_control": {"type": "ephemeral"}}]
    body: dict[str, Any] = {"system": system, "tools": MESSAGES_TOOLS, "max_tokens": 500}
    if thinks:
        body["thinking"] = {"type": "adaptive"}
    async with client(frontend) as http:
        for turn in range(TURNS):
            reply = await http.post("/v1/messages", json={**body, "messages": messages})
            content = reply.json()["content"]
            kinds = [part["type"] for part in content]
            assert kinds == (["thinking", "text", "tool_use"] if thinks else ["text", "tool_use"])
            result = {"type": "tool_result", "tool_use_id": content[-1]["id"], "content": f"line {turn}"}
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    check(frontend.engine, player)  # type: ignore[arg-type]


@pytest.mark.parametrize("sends", ["all", "no reasoning", "no reasoning text", "id"])
async def test_responses(sends: str) -> None:
    player = Player()
    frontend = m3_frontend(player)
    body: dict[str, Any] = {"instructions": "You help.", "tools": RESPONSES_TOOLS}
    new: list[Any] = [{"role": "user", "content": "look"}]
    items: list[Any] = []
    async with client(frontend) as http:
        for turn in range(TURNS):
            items += new
            reply = await http.post("/v1/responses", json={**body, "input": new if sends == "id" else items})
            response = reply.json()
            assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
            echo = [item for item in response["output"] if sends != "no reasoning" or item["type"] != "reasoning"]
            if sends == "no reasoning text":
                echo[0] = {"type": "reasoning", "id": echo[0]["id"], "summary": [], "encrypted_content": None}
            items += echo
            call_id = response["output"][-1]["call_id"]
            new = [{"type": "function_call_output", "call_id": call_id, "output": f"line {turn}"}]
            if sends == "id":
                body["previous_response_id"] = response["id"]
    check(frontend.engine, player)  # type: ignore[arg-type]
