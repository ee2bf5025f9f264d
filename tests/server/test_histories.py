"""What clients send back of earlier answers."""

from __future__ import annotations

from typing import Any

from tests.server.dialects import Scripted, client

USER = [{"role": "user", "content": "go on"}]


async def test_an_answer_that_said_nothing_comes_back_as_no_text() -> None:
    """A client may send null, or nothing, for what was empty; beside calls null says that there was no text."""
    service = Scripted("ok")
    call = {"id": "c", "type": "function", "function": {"name": "run", "arguments": "{}"}}
    silent: list[dict[str, Any]] = [{}, {"content": None}, {"content": ""}, {"content": None, "tool_calls": []}]
    history = [{"role": "assistant", **said} for said in (*silent, {"content": None, "tool_calls": [call]})]
    async with client(service) as http:
        reply = await http.post("/v1/chat/completions", json={"messages": [*USER, *history, *USER]})
    assert reply.status_code == 200, reply.text
    assert [message["content"] for message in service.messages()[1:-1]] == ["", "", "", "", None]
