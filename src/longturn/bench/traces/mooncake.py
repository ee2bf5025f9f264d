"""Mooncake traces: one request a line, block ids common to the whole file.

`timestamp` is in milliseconds. The last block of a prompt is usually partial and still has an id. An extension adds
`session_id`, whose lines are the turns of one conversation, and `delay`, the milliseconds between the end of the
answer before and this request, in place of a timestamp.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from longturn.bench.traces.blocks import BlockTrie
from longturn.bench.traces.errors import TraceError
from longturn.bench.traces.fields import decode
from longturn.bench.traces.tree import Conversation, SessionTree, TraceRequest
from longturn.bench.traces.weka import seconds, stem

BLOCK_TOKENS = 512


class _Line(msgspec.Struct):
    input_length: int
    output_length: int
    timestamp: float | None = None
    hash_ids: list[int] | None = None
    session_id: str | int | None = None
    delay: float | None = None


@dataclass(slots=True)
class _Session:
    arrival_s: float
    requests: list[TraceRequest] = field(default_factory=list)


def parse_mooncake(data: bytes, source: str) -> list[SessionTree]:
    """Read a file of requests; sessions in the order of their first lines.

    Args:
        data: JSON lines; empty lines are skipped.
        source: what errors call it.

    Raises:
        TraceError: a line is not JSON, lacks a field, or holds a value that cannot be.
    """
    trie = BlockTrie()
    sessions: dict[str, _Session] = {}
    for number, raw in enumerate(data.splitlines(), 1):
        if not raw.strip():
            continue
        where = f"{source}: line {number}"
        line = decode(raw, _Line, where)
        name = f"{stem(source)}:{number if line.session_id is None else line.session_id}"
        at_s = None if line.timestamp is None else seconds(line.timestamp, f"{where}: timestamp") / 1000
        if name not in sessions:
            sessions[name] = _Session(at_s or 0.0)
        session = sessions[name]
        session.requests.append(_request(line, number, where, session, at_s, trie))
    if not sessions:
        raise TraceError(f"{source}: no requests")
    namespace = stem(source)
    return [
        SessionTree(
            id=name,
            source=source,
            namespace=namespace,
            block_tokens=BLOCK_TOKENS,
            trie=trie,
            conversations=(Conversation(name, "root", tuple(session.requests)),),
            arrival_s=session.arrival_s,
        )
        for name, session in sessions.items()
    ]


def _request(
    line: _Line,
    number: int,
    where: str,
    session: _Session,
    at_s: float | None,
    trie: BlockTrie,
) -> TraceRequest:
    if line.input_length < 1:
        raise TraceError(f"{where}: input_length must be at least 1, not {line.input_length}")
    if line.output_length < 0:
        raise TraceError(f"{where}: output_length must be 0 or more, not {line.output_length}")
    ids = line.hash_ids or []
    if len(ids) > -(-line.input_length // BLOCK_TOKENS):
        raise TraceError(
            f"{where}: hash_ids has {len(ids)} blocks of {BLOCK_TOKENS} tokens, more than input_length "
            f"{line.input_length} holds"
        )
    last = session.requests[-1] if session.requests else None
    delay_s = None if line.delay is None else seconds(line.delay, f"{where}: delay") / 1000
    # The format has no durations: a start that is not recorded is at least the pause after the start before it.
    earliest_s = 0.0 if last is None else last.start_s
    start_s = earliest_s + (delay_s or 0.0) if at_s is None else at_s - session.arrival_s
    if start_s < earliest_s:
        raise TraceError(f"{where}: timestamp {line.timestamp} is before that of its session's line ahead of it")
    return TraceRequest(
        place=f"line {number}",
        start_s=start_s,
        duration_s=None,
        input_tokens=line.input_length,
        output_tokens=line.output_length,
        node=trie.add(ids, f"{where}: request"),
        gap_s=start_s - earliest_s if delay_s is None else delay_s,
    )
