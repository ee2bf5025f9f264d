"""Weka session traces: one JSON object for a session, alone in a file or one a line.

Unknown fields are ignored; what is known must hold. A subagent's requests carry times of the session's clock, or, in
older captures, seconds from the subagent's start. There the entry's own `t` is when it was written down, at the end:
`t - duration_ms` falls within a second after the parent's last answer for 11 of 13 subagents in 73 public traces (and
for the other two on one instant), while children started at `t` would run past the turn that holds their results. So
where `t - duration_ms` is the closer of both to the parent's last answer, it is the start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import PurePath

import msgspec

from longturn.bench.traces.blocks import BlockTrie
from longturn.bench.traces.errors import TraceError
from longturn.bench.traces.fields import decode
from longturn.bench.traces.link import Agent, link
from longturn.bench.traces.split import Strand, split_agents
from longturn.bench.traces.tree import Kind, SessionTree, TraceRequest


class _Inner(msgspec.Struct):
    """A request, or the entry of a subagent: which fields must be there depends on `type`."""

    type: str
    t: float
    model: str | None = None
    input_tokens: int | None = msgspec.field(name="in", default=None)
    output_tokens: int | None = msgspec.field(name="out", default=None)
    hash_ids: list[int] | None = None
    api_time: float | None = None


class _Entry(_Inner):
    requests: list[_Inner] | None = None
    agent_id: str | None = None
    subagent_type: str | None = None
    duration_ms: float | None = None
    tool_tokens: int | None = None
    system_tokens: int | None = None


class _Session(msgspec.Struct):
    id: str
    block_size: int
    requests: list[_Entry]
    hash_id_scope: str = "local"
    tool_tokens: int | None = None
    system_tokens: int | None = None


def parse_weka(data: bytes, source: str, *, split: bool = True) -> SessionTree:
    """Read one session.

    Args:
        data: one JSON object.
        source: what errors call it: the file, with the line where it has several.
        split: look for agents in a flattened list.

    Raises:
        TraceError: not JSON, a missing field, a wrong type, or a value that cannot be.
    """
    session = decode(data, _Session, source)
    where = f"{source}: "
    if not session.id:
        raise TraceError(f"{where}id must not be empty")
    if session.block_size < 1:
        raise TraceError(f"{where}block_size must be at least 1, not {session.block_size}")
    if session.hash_id_scope != "local":
        raise TraceError(f"{where}hash_id_scope must be 'local', not {session.hash_id_scope!r}")
    trie = BlockTrie()
    reader = _Reader(trie, session.block_size, where)
    requests: list[TraceRequest] = []
    order: list[int] = []
    """For each request its index among all entries."""
    for index, entry in enumerate(session.requests):
        if entry.type != "subagent":
            order.append(index)
            requests.append(reader.request(entry, f"requests[{index}]", requests))
    if not requests:
        raise TraceError(f"{where}requests must hold at least one request of the session itself")
    prefix = (session.tool_tokens or 0) + (session.system_tokens or 0)
    agents = _agents(session.id, requests, trie, "root", None, 0, split, prefix)
    homes = _homes(agents, requests)
    names: set[str] = set()
    for index, entry in enumerate(session.requests):
        if entry.type == "subagent":
            before = sum(position < index for position in order)
            inner = reader.subagent(entry, f"requests[{index}]", requests[:before])
            name = entry.agent_id or f"agent_{index}"
            if name in names:
                raise TraceError(f"{where}requests[{index}].agent_id {name!r} is there twice")
            names.add(name)
            if inner:
                own = (entry.tool_tokens or 0) + (entry.system_tokens or 0)
                agents += _agents(
                    f"{session.id}::sa:{name}", inner, trie, "subagent", homes[max(before - 1, 0)], len(agents), split,
                    own, entry.subagent_type or "",
                )  # fmt: skip
    return SessionTree(
        id=session.id,
        source=source,
        namespace=session.id,
        block_tokens=session.block_size,
        trie=trie,
        conversations=link(agents),
    )


def _agents(
    name: str,
    requests: Sequence[TraceRequest],
    trie: BlockTrie,
    kind: Kind,
    parent: int | None,
    first: int,
    split: bool,
    system_tokens: int,
    label: str = "",
) -> list[Agent]:
    """The agents of one recorded list; `first` is the index that the first of them will have."""
    strands = split_agents(requests, trie) if split else [Strand(tuple(requests), "root", None)]
    made = [Agent(name, kind, strands[0].requests, parent, system_tokens, label)]
    for number, strand in enumerate(strands[1:], 1):
        tag = {"aux": "aux:", "reduction": "aux:red:", "worker": f"wg:{strand.group}_"}.get(strand.kind, "fa:")
        assert strand.parent is not None, "only the main strand has no parent"
        made.append(Agent(f"{name}::{tag}{number}", strand.kind, strand.requests, first + strand.parent))
    return made


def _homes(agents: Sequence[Agent], requests: Sequence[TraceRequest]) -> list[int]:
    """For each request of the list the agent that would have started a subagent after it: side calls start none."""
    owner = {request.place: index for index, agent in enumerate(agents) for request in agent.requests}
    homes: list[int] = []
    for request in requests:
        index = owner[request.place]
        side = agents[index].kind in ("aux", "reduction")
        homes.append((homes[-1] if homes else 0) if side else index)
    return homes


class _Reader:
    """Checks and converts the entries of one session."""

    def __init__(self, trie: BlockTrie, block_tokens: int, where: str) -> None:
        self._trie = trie
        self._block_tokens = block_tokens
        self._where = where

    def request(self, entry: _Inner, place: str, before: Sequence[TraceRequest], shift_s: float = 0.0) -> TraceRequest:
        """One request; `before` are those ahead of it in its list."""
        at = f"{self._where}{place}"
        if entry.type not in ("n", "s"):
            known = "n, s, subagent" if shift_s == 0.0 and place.count("requests") == 1 else "n, s"
            raise TraceError(f"{at}.type must be one of {known}, not {entry.type!r}")
        start_s = seconds(entry.t, f"{at}.t")
        if before and start_s + shift_s < before[-1].start_s:
            raise TraceError(f"{at}.t {entry.t} is before that of the request ahead of it")
        if entry.input_tokens is None or entry.output_tokens is None:
            raise TraceError(f"{at} has no '{'in' if entry.input_tokens is None else 'out'}'")
        if entry.input_tokens < 1:
            raise TraceError(f"{at}.in must be at least 1, not {entry.input_tokens}")
        if entry.output_tokens < 0:
            raise TraceError(f"{at}.out must be 0 or more, not {entry.output_tokens}")
        ids = entry.hash_ids or []
        if len(ids) > entry.input_tokens // self._block_tokens:
            raise TraceError(
                f"{at}.hash_ids has {len(ids)} blocks of {self._block_tokens} tokens, more than 'in' "
                f"{entry.input_tokens} holds"
            )
        return TraceRequest(
            place=place,
            start_s=start_s + shift_s,
            duration_s=None if entry.api_time is None else seconds(entry.api_time, f"{at}.api_time"),
            input_tokens=entry.input_tokens,
            output_tokens=entry.output_tokens,
            node=self._trie.add(ids, at),
            model=entry.model or "",
        )

    def subagent(self, entry: _Entry, place: str, parents: Sequence[TraceRequest]) -> list[TraceRequest]:
        """The requests of a subagent on the session's clock; `parents` are those ahead of it in the session."""
        at = f"{self._where}{place}"
        written_s = seconds(entry.t, f"{at}.t")
        if entry.requests is None:
            raise TraceError(f"{at} has no 'requests'")
        shift_s = 0.0
        if entry.requests and entry.requests[0].t < written_s:
            shift_s = written_s
            if entry.duration_ms is not None and parents:
                began_s = written_s - seconds(entry.duration_ms, f"{at}.duration_ms") / 1000
                if abs(began_s - parents[-1].end_s) < abs(written_s - parents[-1].end_s):
                    shift_s = max(0.0, began_s)
        made: list[TraceRequest] = []
        for index, inner in enumerate(entry.requests):
            made.append(self.request(inner, f"{place}.requests[{index}]", made, shift_s))
        return made


def seconds(value: float, name: str) -> float:
    """`value` if it can be a time.

    Raises:
        TraceError: negative or not finite.
    """
    if not (math.isfinite(value) and value >= 0):
        raise TraceError(f"{name} must be 0 or more, not {value}")
    return value


def stem(source: str) -> str:
    """A file's name without folders and endings."""
    name = PurePath(source).name
    for ending in (".gz", ".jsonl", ".json"):
        name = name.removesuffix(ending)
    return name
