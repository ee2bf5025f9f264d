"""What agents make of a stream: the events of three APIs, checked for their order and put together again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Heard:
    """One streamed answer."""

    reasoning: str = ""
    text: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    """Names and arguments; the input of a custom tool as it is."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


def events_of(body: str) -> list[tuple[str | None, str]]:
    """Names and data of server-sent events; each has one of both at most, and ends with an empty line."""
    assert body.endswith("\n\n")
    events = []
    for block in body.removesuffix("\n\n").split("\n\n"):
        fields = [line.split(": ", 1) for line in block.split("\n") if not line.startswith(":")]
        if fields:
            values = dict(fields)
            assert len(values) == len(fields) and set(values) <= {"event", "data"}, block
            events.append((values.get("event"), values["data"]))
    return events


def heard(path: str, body: str) -> Heard:
    """A stream of the API at `path`."""
    if path.startswith("/v1/messages"):
        return messages(events_of(body))
    return responses(events_of(body)) if path == "/v1/responses" else chat(events_of(body))


def messages(events: Sequence[tuple[str | None, str]]) -> Heard:
    """Anthropic's Messages: blocks one behind the other, each opened and closed once, between start and stop."""
    made, open_at = Heard(), None
    blocks: list[dict[str, Any]] = []
    decoded = [(name, json.loads(data)) for name, data in events]
    assert all(name == event["type"] for name, event in decoded)
    decoded = [(name, event) for name, event in decoded if name != "ping"]
    assert decoded[0][0] == "message_start" and [name for name, _ in decoded[-2:]] == ["message_delta", "message_stop"]
    assert decoded[0][1]["message"]["content"] == []
    for name, event in decoded[1:-2]:
        if name == "content_block_start":
            assert open_at is None and event["index"] == len(blocks)
            open_at = event["index"]
            blocks.append({**event["content_block"], "json": ""})
            continue
        assert event["index"] == open_at
        if name == "content_block_stop":
            open_at = None
            continue
        assert name == "content_block_delta"
        delta, block = event["delta"], blocks[-1]
        kind = delta["type"].removesuffix("_delta")
        key = {"input_json": "json"}.get(kind, kind)
        assert (block["type"], key) in (("thinking", "thinking"), ("thinking", "signature"), ("text", "text"),
                                        ("tool_use", "json"))  # fmt: skip
        block[key] = block.get(key, "") + delta.get("partial_json", delta.get(kind))
    assert open_at is None
    for block in blocks:
        if block["type"] == "tool_use":
            assert block["input"] == {} and block["id"]
            made.calls.append((block["name"], json.loads(block["json"] or "{}")))
        made.reasoning += block.get("thinking", "")
        made.text += block.get("text", "")
        assert block["type"] != "thinking" or block["signature"]
    last = decoded[-2][1]
    assert last["delta"]["stop_reason"] == ("tool_use" if made.calls else "end_turn")
    usage = last["usage"]
    made.cached_tokens, made.output_tokens = usage["cache_read_input_tokens"], usage["output_tokens"]
    made.prompt_tokens = usage["input_tokens"] + made.cached_tokens + usage["cache_creation_input_tokens"]
    return made


def responses(events: Sequence[tuple[str | None, str]]) -> Heard:
    """OpenAI's Responses: numbered, and the finished items are those that were added, under the same ids."""
    made = Heard()
    decoded = [json.loads(data) for _, data in events]
    assert [event["type"] for event in decoded] == [name for name, _ in events]
    assert [event["sequence_number"] for event in decoded] == list(range(len(decoded)))
    assert [event["type"] for event in decoded[:2]] == ["response.created", "response.in_progress"]
    assert decoded[-1]["type"] == "response.completed"
    response = decoded[-1]["response"]
    assert {event["response"]["id"] for event in (*decoded[:2], decoded[-1])} == {response["id"]}
    pieces: dict[str, str] = {}
    for kind in ("added", "done"):
        items = [event for event in decoded if event["type"] == f"response.output_item.{kind}"]
        assert [event["output_index"] for event in items] == list(range(len(response["output"])))
        assert [event["item"]["id"] for event in items] == [item["id"] for item in response["output"]]
        assert kind == "added" or [event["item"] for event in items] == response["output"]
    for event in decoded:
        if event["type"].endswith(".delta"):
            assert response["output"][event["output_index"]]["id"] == event["item_id"]
            pieces[event["item_id"]] = pieces.get(event["item_id"], "") + event["delta"]
    for item in response["output"]:
        if item["type"] == "reasoning":
            whole = made.reasoning = "".join(part["text"] for part in item["content"])
        elif item["type"] == "message":
            whole = made.text = "".join(part["text"] for part in item["content"])
        elif item["type"] == "custom_tool_call":
            whole = item["input"]
            made.calls.append((item["name"], whole))
        else:
            assert item["type"] == "function_call" and item["call_id"]
            whole = item["arguments"]
            made.calls.append((item["name"], json.loads(whole)))
        assert pieces.get(item["id"], "") == whole, item
    usage = response["usage"]
    made.prompt_tokens, made.output_tokens = usage["input_tokens"], usage["output_tokens"]
    made.cached_tokens = usage["input_tokens_details"]["cached_tokens"]
    return made


def chat(events: Sequence[tuple[str | None, str]]) -> Heard:
    """OpenAI's chat completions: one id, one finish reason behind everything, usage, the word [DONE]."""
    made = Heard()
    assert events[-1] == (None, "[DONE]") and all(name is None for name, _ in events)
    chunks = [json.loads(data) for _, data in events[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    calls: list[dict[str, str]] = []
    finish = None
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert finish is None
            delta, finish = choice["delta"], choice["finish_reason"]
            made.reasoning += delta.get("reasoning_content") or ""
            made.text += delta.get("content") or ""
            for piece in delta.get("tool_calls") or ():
                if piece["index"] == len(calls):
                    assert piece["id"] and piece["type"] == "function"
                    calls.append({"name": piece["function"]["name"], "arguments": ""})
                calls[piece["index"]]["arguments"] += piece["function"].get("arguments") or ""
    assert finish == ("tool_calls" if calls else "stop")
    made.calls = [(call["name"], json.loads(call["arguments"])) for call in calls]
    usage = chunks[-1]["usage"]
    made.prompt_tokens, made.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    made.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    return made
