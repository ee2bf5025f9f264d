"""Items of a Responses request that stand for items of stored answers (`{"type": "item_reference", "id": ...}`).

Clients that rely on the store send what the model wrote by its id alone: Vercel's AI SDK does, unless it is told not to
store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from longturn.errors import NotFoundError
from longturn.server.fields import text_in
from longturn.server.response_store import ResponseStore


class _Item(msgspec.Struct):
    id: str


class _Response(msgspec.Struct):
    output: list[_Item]


def item_ids(body: bytes) -> tuple[str, ...]:
    """Ids of the items that the output of a finished response consists of."""
    return tuple(item.id for item in msgspec.json.decode(body, type=_Response).output)


def resolved(given: Sequence[dict[str, Any]], store: ResponseStore, tenant: str | None) -> list[dict[str, Any]]:
    """Input items, with the items themselves for references to them.

    Raises:
        RequestError: a reference has no id.
        NotFoundError: this client has no stored response with such an item (any more).
    """
    return [
        _found(item, f"input[{number}]", store, tenant) if item.get("type") == "item_reference" else item
        for number, item in enumerate(given)
    ]


def _found(reference: Mapping[str, Any], where: str, store: ResponseStore, tenant: str | None) -> dict[str, Any]:
    item_id = text_in(reference, "id", where)
    stored = store.holder(tenant, item_id)
    if stored is None:
        raise NotFoundError(
            f"there is no stored item '{item_id}' (it was never stored, or it was deleted or forgotten); send the item "
            "itself instead",
            param=f"{where}.id",
            code="item_not_found",
        )
    output: list[dict[str, Any]] = msgspec.json.decode(stored.body)["output"]
    return next(item for item in output if item["id"] == item_id)
