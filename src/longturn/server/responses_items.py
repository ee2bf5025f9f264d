"""The input of a stored response as items of the Responses API, from the messages that were made of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from longturn.errors import NotFoundError
from longturn.server.fields import invalid

DEFAULT_LIMIT = 20
MAX_LIMIT = 100


def input_items(response_id: str, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Items in the order of the input; their ids depend on the response's and their place alone."""
    items: list[dict[str, Any]] = []

    def add(prefix: str, kind: str, **fields: Any) -> None:
        name = hashlib.blake2b(f"{response_id}/input/{len(items)}".encode(), digest_size=16).hexdigest()
        items.append({"id": f"{prefix}_{name}", "type": kind, "status": "completed", **fields})

    for message in messages:
        role, content = message["role"], message.get("content") or ""
        if role == "tool":
            add("fco", "function_call_output", call_id=message["tool_call_id"], output=content)
        elif role == "assistant":
            if reasoning := message.get("reasoning_content"):
                add("rs", "reasoning", summary=[], content=[{"type": "reasoning_text", "text": reasoning}])
            if content:
                part: dict[str, Any] = {"type": "output_text", "text": content, "annotations": [], "logprobs": []}
                add("msg", "message", role=role, content=[part])
            for call in message.get("tool_calls", ()):
                function = call["function"]
                named = {"name": function["name"], "arguments": function["arguments"]}
                add("fc", "function_call", call_id=call["id"], **named)
        else:
            add("msg", "message", role=role, content=[{"type": "input_text", "text": content}])
    return items


def page_of(items: Sequence[Mapping[str, Any]], query: Mapping[str, str]) -> dict[str, Any]:
    """A list object: part of the items, as `order`, `after` and `limit` say.

    Raises:
        RequestError: one of them has a value that it cannot have.
        NotFoundError: there is no item with the id `after`.
    """
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order", f"must be asc or desc, not {order!r}")
    text = query.get("limit", str(DEFAULT_LIMIT))
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
    if not 1 <= limit <= MAX_LIMIT:
        raise invalid("limit", f"must be between 1 and {MAX_LIMIT}, not {text!r}")
    ordered = list(items) if order == "asc" else list(reversed(items))
    begin = 0
    if (after := query.get("after")) is not None:
        places = [number for number, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise NotFoundError(f"there is no item '{after}'", param="after", code="item_not_found")
        begin = places[0] + 1
    page = ordered[begin : begin + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": begin + limit < len(ordered),
    }
