"""What can be asked of stored responses: their input, and those that are generated in the background."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from longturn.config import EngineConfig, ServerConfig
from longturn.errors import LongturnError
from longturn.frontend.records import TextChunk, TextRequest
from longturn.server import responses_background
from tests.server.conftest import Start
from tests.server.dialects import ANSWER, EXPECTED, RESPONSES_TOOLS, Scripted
from tests.server.test_engine_clients import until


class Gated(Scripted):
    """Answers when it is let."""

    def __init__(self, *texts: str) -> None:
        super().__init__(*texts)
        self.gate = asyncio.Event()
        self.open = 0
        self.failure: LongturnError | None = None

    async def generate(self, request: TextRequest) -> AsyncIterator[TextChunk]:
        self.open += 1
        try:
            number = 0
            async for chunk in super().generate(request):
                yield chunk
                number += 1
                if number == 2:
                    await self.gate.wait()
                    if self.failure is not None:
                        raise self.failure
        finally:
            self.open -= 1


async def test_the_input_of_a_response(start: Start) -> None:
    served = await start(service=Scripted(ANSWER, "ok"))
    responses = served.sdk.responses
    first = await responses.create(model="mock", input="what is here?", tools=RESPONSES_TOOLS)
    calls = [item for item in first.output if item.type == "function_call"]
    given: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "what is here?"}]
    given += [item.to_dict() for item in first.output]
    given += [{"type": "function_call_output", "call_id": call.call_id, "output": "a file"} for call in calls]
    second = await responses.create(model="mock", input=given, tools=RESPONSES_TOOLS, instructions="You help.")
    listed = [item async for item in responses.input_items.list(second.id, order="asc", limit=2)]
    assert [item.type for item in listed] == [
        "message", "message", "reasoning", "message", "function_call", "function_call",
        "function_call_output", "function_call_output",
    ]  # fmt: skip
    assert listed[1].content[0].text == "what is here?" and listed[3].content[0].text == "One moment."
    assert [(item.name, item.arguments) for item in listed[4:6]] == [(call.name, call.arguments) for call in calls]
    assert len(EXPECTED) == 2 and listed[6].call_id == calls[0].call_id
    newest = await responses.input_items.list(second.id, limit=1)
    assert newest.data[0].id == listed[-1].id and newest.has_more
    assert len({item.id for item in listed}) == len(listed)
    third = await responses.create(model="mock", input="and?", previous_response_id=second.id)
    assert len((await responses.input_items.list(third.id)).data) == 1, "its own, and not what came before"
    for query in ({"limit": 0}, {"limit": 101}, {"order": "x"}):
        with pytest.raises(openai.BadRequestError):
            await responses.input_items.list(second.id, **query)  # type: ignore[arg-type]
    with pytest.raises(openai.NotFoundError):
        await responses.input_items.list("resp_none")
    with pytest.raises(openai.NotFoundError):
        await responses.input_items.list(second.id, after="msg_none")


async def test_a_response_in_the_background(start: Start) -> None:
    service = Gated("Some text that is long enough", "ok")
    served = await start(service=service)
    responses = served.sdk.responses
    made = await responses.create(model="mock", input="hi", background=True)
    assert made.status == "queued" and made.background and made.output == []
    while (running := await responses.retrieve(made.id)).status == "queued":
        await asyncio.sleep(0.01)
    assert running.status == "in_progress" and running.output_text == "Some text that"
    with pytest.raises(openai.BadRequestError, match="being generated still"):
        await responses.create(model="mock", input="go on", previous_response_id=made.id)
    service.gate.set()
    while (done := await responses.retrieve(made.id)).status == "in_progress":
        await asyncio.sleep(0.01)
    assert done.status == "completed" and done.output_text == "Some text that is long enough"
    again = await responses.cancel(made.id)
    assert again.status == "completed", "there is nothing left to cancel"
    assert (await responses.create(model="mock", input="go on", previous_response_id=made.id)).output_text == "ok"


async def test_a_response_in_the_background_is_cancelled(start: Start) -> None:
    service = Gated("Some text that is long enough")
    served = await start(service=service)
    responses = served.sdk.responses
    at_once = await responses.create(model="mock", input="hi", background=True)
    assert (await responses.cancel(at_once.id)).status == "cancelled"
    made = await responses.create(model="mock", input="hi", background=True)
    while (await responses.retrieve(made.id)).status == "queued":
        await asyncio.sleep(0.01)
    cancelled = await responses.cancel(made.id)
    assert (cancelled.status, cancelled.output_text) == ("cancelled", "Some text that")
    assert service.open == 0, "the engine computes for nobody"
    assert (await responses.retrieve(made.id)).status == "cancelled"
    gone = await responses.create(model="mock", input="hi", background=True)
    await responses.delete(gone.id)
    with pytest.raises(openai.NotFoundError):
        await responses.retrieve(gone.id)
    await until(lambda: service.open == 0)


async def test_what_goes_wrong_in_the_background_is_told(start: Start) -> None:
    service = Gated("Some text that is long enough")
    service.failure = LongturnError("the model could not be computed")
    service.gate.set()
    served = await start(service=service)
    made = await served.sdk.responses.create(model="mock", input="hi", background=True)
    while (done := await served.sdk.responses.retrieve(made.id)).status in ("queued", "in_progress"):
        await asyncio.sleep(0.01)
    assert done.status == "failed" and done.error is not None and "could not be computed" in done.error.message


async def test_what_cannot_be_in_the_background(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    service = Gated("Some text that is long enough")
    served = await start(service=service)
    create = served.sdk.responses.create
    for options in ({"stream": True}, {"store": False}):
        with pytest.raises(openai.BadRequestError) as caught:
            await create(model="mock", input="hi", background=True, **options)
        assert caught.value.param == "background"
    service.gate.set()
    plain = await create(model="mock", input="hi")
    service.gate.clear()
    with pytest.raises(openai.BadRequestError, match="not generated in the background"):
        await served.sdk.responses.cancel(plain.id)
    monkeypatch.setattr(responses_background, "MOST", 1)
    await create(model="mock", input="hi", background=True)
    with pytest.raises(openai.RateLimitError):
        await create(model="mock", input="hi", background=True)


async def test_other_clients_see_nothing_of_it(start: Start) -> None:
    config = EngineConfig(server=ServerConfig(api_keys=("one", "two")))
    service = Gated("Some text that is long enough")
    served = await start(config=config, service=service)
    one, two = (openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0) for key in ("one", "two"))
    made = await one.responses.create(model="mock", input="hi", background=True)
    for ask in (two.responses.retrieve, two.responses.cancel, two.responses.delete):
        with pytest.raises(openai.NotFoundError):
            await ask(made.id)
    assert (await one.responses.cancel(made.id)).status == "cancelled"
    with pytest.raises(openai.NotFoundError):
        await two.responses.input_items.list(made.id)
