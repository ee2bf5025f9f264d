"""Small traces for tests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from longturn.bench.traces.tree import SessionTree
from longturn.bench.traces.weka import parse_weka

SHARED = Path(__file__).parents[3] / "shared" / "traces"


def shared(name: str) -> Path:
    """A folder of recorded traces, which are not part of the repository."""
    folder = SHARED / name
    if not folder.is_dir():
        pytest.skip(f"no recorded traces in {folder}")
    return folder


def row(
    t: float,
    ids: Sequence[int],
    *,
    out: int = 10,
    api: float | None = 1.0,
    model: str = "m",
    tail: int = 0,
    block: int = 4,
    **more: Any,
) -> dict[str, Any]:
    """A Weka request whose input is its blocks and a tail."""
    length = len(ids) * block + tail
    return {
        "t": t,
        "type": "n",
        "model": model,
        "in": length,
        "out": out,
        "hash_ids": list(ids),
        "api_time": api,
        **more,
    }


def session(rows: Sequence[dict[str, Any]], *, block: int = 4, **more: Any) -> dict[str, Any]:
    return {"id": "s", "block_size": block, "hash_id_scope": "local", "requests": list(rows), **more}


def tree(rows: Sequence[dict[str, Any]], *, split: bool = True, block: int = 4, **more: Any) -> SessionTree:
    return parse_weka(json.dumps(session(rows, block=block, **more)).encode(), "t.json", split=split)


EXAMPLE: dict[str, Any] = {
    "id": "demo-1",
    "models": ["big", "small"],
    "block_size": 64,
    "hash_id_scope": "local",
    "tool_tokens": 100,
    "system_tokens": 28,
    "requests": [
        row(0.0, [0, 1, 2, 3], out=70, api=2.0, model="big", block=64, tail=44, ttft=0.4),
        {
            "t": 2.5,
            "type": "subagent",
            "agent_id": "agent_001",
            "subagent_type": "Explore",
            "duration_ms": 3000,
            "status": "completed",
            "tool_tokens": 64,
            "system_tokens": 0,
            "requests": [row(2.5, [7, 8, 9], out=90, api=3.0, model="small", block=64, tail=8)],
        },
        row(6.5, [0, 1, 2, 3, 4, 5, 6], out=40, api=1.1, model="big", block=64, tail=12),
    ],
}
"""A root of two turns with one subagent between them; hits 0 of 4, 0 of 3 and 4 of 7 blocks."""


def common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Leading items that two sequences share."""
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
