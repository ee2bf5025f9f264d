"""Items sent by their ids: the conversation is the same as with the items themselves."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from longturn.config import EngineConfig, ServerConfig
from longturn.server.response_store import ResponseStore
from tests.server.dialects import ANSWER, RESPONSES_TOOLS, Scripted
from tests.server.served import Start

ASKED = {"role": "user", "content": "what is here?"}


def references(items: list[Any]) -> list[Any]:
    return [{"type": "item_reference", "id": item.id} for item in items]


async def test_a_turn_of_references(start: Start) -> None:
    served = await start(service=Scripted(ANSWER, "Two files.", "Two files."))
    create = served.sdk.responses.create
    options: dict[str, Any] = {"model": "mock", "tools": RESPONSES_TOOLS}
    first = await create(input=[ASKED], **options)
    assert [item.type for item in first.output] == ["reasoning", "message", "function_call", "function_call"]
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "a file"} for item in first.output[2:]
    ]
    await create(input=[ASKED, *[item.to_dict() for item in first.output], *results], **options)
    whole = served.service.messages()
    second = await create(input=[ASKED, *references(first.output), *results], **options)
    assert served.service.messages() == whole
    # What was sent by reference is a part of the conversation that goes on.
    await create(input="thanks", previous_response_id=second.id, **options)
    assert served.service.messages()[: len(whole)] == whole


async def test_items_that_are_not_there(start: Start) -> None:
    config = EngineConfig(server=ServerConfig(api_keys=("key", "other")))
    served = await start(service=Scripted("a"), config=config)
    create = served.sdk.responses.create
    kept = await create(model="mock", input="x")
    unkept = await create(model="mock", input="x", store=False)
    deleted = await create(model="mock", input="x")
    await served.sdk.responses.delete(deleted.id)
    async with served.client(api_key="other") as other:
        for ask, item in ((create, unkept), (create, deleted), (other.responses.create, kept)):
            with pytest.raises(openai.NotFoundError) as caught:
                await ask(model="mock", input=[ASKED, *references(item.output)])
            assert caught.value.code == "item_not_found" and caught.value.param == "input[1].id"
            assert item.output[0].id in caught.value.message
    with pytest.raises(openai.BadRequestError, match=r"'input\[0\]\.id'"):
        await create(model="mock", input=[{"type": "item_reference"}])
    assert (await create(model="mock", input=references(kept.output))).status == "completed"


def test_a_forgotten_response_takes_its_items_along() -> None:
    store = ResponseStore(6000, 60)
    for name in "abc":
        store.put(None, name, b"{}" * 500, ({"role": "user", "content": name},), None, (f"{name}1", f"{name}2"))
    assert store.holder(None, "a2") is None and len(store) == 2, "each has more than 2,500 bytes"
    found = store.holder(None, "b2")
    assert found is not None and found.items == ("b1", "b2")
    store.put(None, "d", b"{}" * 500, ({"role": "user", "content": "d"},), None)
    assert store.holder(None, "c1") is None, "the other one was used"
    assert store.holder(None, "b1") is not None
    for name in "bd":
        store.delete(None, name)
    assert store.nbytes == 0 and store.holder(None, "b1") is None
