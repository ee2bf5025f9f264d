"""Conversations that a client wants the server to hold: refused, so that none is answered without its beginning."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic import beta_async_tool

from tests.frontend.m3 import block, invoke, tag
from tests.server.dialects import MESSAGES_TOOLS, Scripted, claude, client
from tests.server.served import Start

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 5, "tools": MESSAGES_TOOLS}


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_thread_is_refused_in_the_words_that_clients_know(thread: dict[str, str], stream: bool) -> None:
    service = Scripted("x")
    async with client(service) as http:
        reply = await http.post("/v1/messages", json={**BODY, "thread": thread, "stream": stream})
    error = reply.json()["error"]
    assert reply.status_code == 400 and not service.requests
    assert (error["type"], error["param"]) == ("invalid_request_error", "thread")
    assert error["details"] == {"error_code": "thread_unsupported_request"}


async def test_other_errors_have_no_details() -> None:
    async with client(Scripted("x")) as http:
        reply = await http.post("/v1/messages", json={**BODY, "compaction": {"instructions": "be brief"}})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "compaction"
    assert "details" not in reply.json()["error"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_run_of_tools_by_the_sdk(start: Start, stream: bool) -> None:
    """It asks for a thread and would send the results alone; refused, it sends the whole conversation."""
    served = await start(service=Scripted(f"I look.{block(invoke('look', tag('path', 'a.py')))}", "Done."))

    @beta_async_tool
    async def look(path: str) -> str:
        """Look at a file."""
        return f"the text of {path}"

    async with claude(served) as sdk:
        options: dict[str, Any] = {"model": "mock", "max_tokens": 99, "tools": [look], "stream": stream}
        runner = sdk.beta.messages.tool_runner(messages=[{"role": "user", "content": "what is in a.py?"}], **options)
        last: Any = None
        async for turn in runner:
            last = await turn.get_final_message() if stream else turn
    assert [part.text for part in last.content] == ["Done."]
    sent = served.service.messages()
    assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
    assert (sent[0]["content"], sent[2]["content"]) == ("what is in a.py?", "the text of a.py")
    assert [tool["function"]["name"] for tool in served.service.tools()] == ["look"]
