"""The requests behind a point of `bench agentx`, a line each, so that anyone can compute its figures again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from longturn.bench.agentx import AgentTurn, Measurement
from longturn.report.schema import write_whole


def requests_path(point: Path) -> Path:
    """Where the requests of a point file stand: beside it, under a name that no reader of points looks at."""
    return point.with_suffix(".requests.jsonl")


def save_requests(measured: Measurement, path: Path) -> None:
    """Write every measured request, warm-up left out, in the order in which they ended.

    Times are milliseconds since the measurement began, to the nanosecond: TTFT is `first_ms - start_ms`, end to end
    `end_ms - start_ms`, lag `start_ms - due_ms`, and ITL `(end_ms - first_ms) / (output_tokens - first_tokens)`.

    Raises:
        ResultError: the folder cannot be written.
    """
    lines = (json.dumps(_line(turn, measured.start_ns), ensure_ascii=False) + "\n" for turn in measured.turns)
    write_whole(path, "".join(lines).encode())


def _line(turn: AgentTurn, start_ns: int) -> dict[str, Any]:
    record, answer = turn.record, turn.record.answer
    first = answer.chunks[0] if answer.chunks else None

    def ms(at_ns: int) -> float:
        return round((at_ns - start_ns) / 1e6, 6)

    return {
        "session": record.session,
        "agent": turn.agent,
        "index": record.index,
        "lane": record.lane,
        "due_ms": ms(answer.intended_ns),
        "start_ms": ms(answer.sent_ns),
        "first_ms": None if first is None else ms(first.at_ns),
        "end_ms": ms(answer.end_ns),
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "output_tokens": answer.output_tokens,
        # Without the server's word the first event counts as one token.
        "first_tokens": None if first is None else 1 if first.tokens is None else first.tokens,
        "finish": answer.finish,
        "error": answer.error,
    }
