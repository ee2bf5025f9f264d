"""Replay recorded sessions against a server: a closed loop over lanes, with the recorded pauses."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from longturn.bench.client import ChatClient
from longturn.bench.records import TurnRecord
from longturn.bench.session import Session

_TICK_S = 0.2


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    pause_scale: float = 1.0
    """Recorded pauses are multiplied by this; 0 leaves none."""
    lanes: int = 1
    """Sessions alive at once; a lane takes the next session when its own ends."""
    copies: int = 1
    """How many times each session is replayed."""
    fixed_output: bool = True
    """Send `ignore_eos`, so that every answer has exactly the recorded `max_tokens`."""
    separate_caches: bool = True
    """Give every copy a `cache_salt` of its own: earlier runs and other lanes must not fill its cache."""
    temperature: float = 0.0
    token_counts: bool = True
    """Ask for `return_token_ids`, which tells how many tokens each event bundles."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What a replay measured."""

    records: tuple[TurnRecord, ...]
    """In the order in which the turns ended."""
    planned_turns: int
    interrupted: bool
    """Stopped from outside before the end."""

    @property
    def partial(self) -> bool:
        """Some planned turn has no successful record."""
        return self.interrupted or sum(record.answer.ok for record in self.records) < self.planned_turns


class ReplayProgress(Protocol):
    """Is told how a replay goes."""

    def turn_started(self, session: str, label: str) -> None: ...

    def turn_ended(self, record: TurnRecord, done: int, planned: int) -> None: ...

    def tick(self) -> None:
        """Called several times a second."""
        ...


@dataclass(slots=True)
class _State:
    waiting: deque[tuple[str, Session]]
    salt: str
    records: list[TurnRecord] = field(default_factory=list)


async def replay(
    client: ChatClient, model: str, sessions: Sequence[Session], options: ReplayOptions, progress: ReplayProgress
) -> Replay:
    """Replay all sessions.

    A turn is sent `pause_s * pause_scale` after the end of the turn before it in its session. After a failed turn the
    rest of that session is left out. A cancellation (Ctrl-C under `asyncio.run`) ends the replay early and returns what
    was measured, marked interrupted.
    """
    planned = [
        (session.id if options.copies == 1 else f"{session.id}#{copy + 1}", session)
        for copy in range(options.copies)
        for session in sessions
    ]
    total = sum(len(session.turns) for _, session in planned)
    state = _State(deque(planned), secrets.token_hex(8))

    async def tick() -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            progress.tick()

    async def lane(number: int) -> None:
        while state.waiting:
            name, session = state.waiting.popleft()
            await _replay_session(client, model, name, session, number, options, state, progress, total)

    ticker = asyncio.create_task(tick())
    lanes = [asyncio.create_task(lane(number)) for number in range(min(options.lanes, len(planned)))]
    interrupted = False
    try:
        await asyncio.gather(*lanes)
    except asyncio.CancelledError:
        interrupted = True
        task = asyncio.current_task()
        if task is not None:
            task.uncancel()
    finally:
        for task in (ticker, *lanes):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(ticker, *lanes, return_exceptions=True)
    return Replay(tuple(state.records), total, interrupted)


async def _replay_session(
    client: ChatClient,
    model: str,
    name: str,
    session: Session,
    lane: int,
    options: ReplayOptions,
    state: _State,
    progress: ReplayProgress,
    total: int,
) -> None:
    intended_ns = time.perf_counter_ns()
    for index, turn in enumerate(session.turns):
        intended_ns += int(turn.pause_s * options.pause_scale * 1e9)
        body = _request(session, index, model, options)
        if options.separate_caches:
            body["cache_salt"] = f"{state.salt}-{name}"
        await asyncio.sleep(max(0, intended_ns - time.perf_counter_ns()) / 1e9)
        progress.turn_started(name, turn.label)
        answer = await client.send(body, intended_ns=intended_ns, session_id=f"{state.salt}-{name}")
        record = TurnRecord(session=name, index=index, label=turn.label, lane=lane, answer=answer)
        state.records.append(record)
        progress.turn_ended(record, len(state.records), total)
        if not answer.ok:
            return
        intended_ns = answer.end_ns


def _request(session: Session, index: int, model: str, options: ReplayOptions) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "messages": session.prompt(index),
        "max_tokens": session.turns[index].max_tokens,
        "temperature": options.temperature,
    }
    if session.tools:
        body["tools"] = list(session.tools)
    if options.fixed_output:
        body["ignore_eos"] = True
    if options.token_counts:
        body["return_token_ids"] = True
    return body
