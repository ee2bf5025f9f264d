"""Replay of recorded session trees against a server: the clock and the sockets around `schedule`.

One asyncio task waits for the next due time or the next answer; each request has a task of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from longturn.bench.bodies import Bodies, Prompt
from longturn.bench.failures import Failures, too_long
from longturn.bench.lanes import NS_PER_S, LiveTree, Send, to_ns
from longturn.bench.presets import Rules
from longturn.bench.prompts_ahead import PromptsAhead
from longturn.bench.records import Answer, TurnRecord
from longturn.bench.schedule import Schedule
from longturn.bench.server_samples import ReadState, ServerHistory, ServerWatch, interval_s
from longturn.bench.synth import RequestKey, request_of
from longturn.bench.target import Target
from longturn.bench.traces.tree import SessionTree
from longturn.bench.validity import Asked, Conduct
from longturn.bench.warm_up import WarmUp

_TICK_S = 0.25
_NEAR_NS = 1_200_000
"""asyncio's timers are late by up to a millisecond: the last moments before a send are waited for without one."""


class AgentProgress(Protocol):
    """Is told how a measurement goes."""

    def warming_up(self, done: int, planned: int) -> None: ...

    def measuring(self, elapsed_s: float, done: int, failed: int, in_flight: int) -> None:
        """Called several times a second."""
        ...


@dataclass(frozen=True, slots=True)
class AgentTurn:
    """One measured request of one agent of one session tree."""

    record: TurnRecord
    agent: str
    """The conversation's id."""
    send: Send
    marker: str
    asked: Asked
    prefix_tokens: int = 0
    """With live carry-over: tokens at the prompt's start that the server has computed or written, template apart."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """What was measured at one concurrency."""

    turns: tuple[AgentTurn, ...]
    """In the order in which they ended; warm-up is not among them."""
    planned_turns: Mapping[str, int]
    """Requests of each replay that began with its session's first request: only these are whole jobs."""
    start_ns: int
    """Start of the measurement, `time.perf_counter_ns`."""
    window_s: float
    """How long requests were sent."""
    conduct: Conduct
    interrupted: bool
    """Stopped by Ctrl-C."""
    warmup_requests: int
    server: ServerHistory = field(default_factory=ServerHistory)
    """The server's state meanwhile."""


async def measure(
    client: Target,
    bodies: Bodies,
    trees: Sequence[SessionTree],
    rules: Rules,
    *,
    model: str,
    lanes: int,
    seed: int,
    run: str,
    token_counts: bool = False,
    progress: AgentProgress,
    read_state: ReadState | None = None,
    clock_ns: Callable[[], int] = time.perf_counter_ns,
) -> Measurement:
    """Replay with `lanes` session trees alive for `rules.duration_s`, after a warm-up.

    A cancellation (Ctrl-C under `asyncio.run`) ends it early and returns what was measured, marked as cancelled.

    Args:
        client: open.
        bodies: made for the same `trees`.
        trees: scaled and filtered already.
        rules: see there.
        model: name that the server knows.
        lanes: session trees alive at once.
        seed: of the schedule.
        run: name of the run, another one for each measurement against the same server; see `Schedule`.
        token_counts: ask for usage in every event (`continuous_usage_stats`), which tells how many tokens it bundles.
        progress: see there.
        read_state: of the server, to be called every second or so.
        clock_ns: the clock of the target's answers.

    Raises:
        TargetError: a warm-up request of a root agent failed, or the warm-up took too long.
        ConfigError: no sessions, or no lanes.
    """
    schedule = Schedule(trees, rules, lanes, seed, run)
    runner = _Runner(client, bodies, rules, schedule, model, token_counts, progress, read_state, clock_ns)
    return await runner.run()


class _Runner:
    def __init__(
        self,
        client: Target,
        bodies: Bodies,
        rules: Rules,
        schedule: Schedule,
        model: str,
        token_counts: bool,
        progress: AgentProgress,
        read_state: ReadState | None,
        clock_ns: Callable[[], int],
    ) -> None:
        self._client = client
        self._bodies = bodies
        self._rules = rules
        self._schedule = schedule
        self._model = model
        self._token_counts = token_counts
        self._progress = progress
        self._read_state = read_state
        self._clock_ns = clock_ns
        self._server = ServerHistory()
        self._wake = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._broken: BaseException | None = None
        """A bug in one of the tasks: without its request ending, its session would wait for ever."""
        self._prompts = PromptsAhead(bodies, schedule, self._prompt_made)
        self._turns: list[AgentTurn] = []
        self._planned: dict[str, int] = {}
        self._conduct = Conduct()
        self._origin_ns = self._clock_ns()
        self._failures = Failures(rules.error_limit)
        self._warm_up = WarmUp(schedule, rules.warmup_grace_s)

    async def run(self) -> Measurement:
        interrupted = False
        try:
            await self._warm_up.run(self._send_warm_up, self._progress.warming_up)
            while (making := self._prompts.make_next(0)) is not None:
                await making
            # What is there now stays: collections need not look at it again, which would take tens of milliseconds.
            gc.collect()
            gc.freeze()
            self._origin_ns = self._clock_ns()
            await self._replay_watched()
        except asyncio.CancelledError:
            interrupted = True
            self._conduct = replace(self._conduct, cancelled="interrupted")
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
        finally:
            gc.unfreeze()
            await self._stop_tasks()
        elapsed_s = (self._clock_ns() - self._origin_ns) / NS_PER_S
        return Measurement(
            turns=tuple(self._turns),
            planned_turns=dict(self._planned),
            start_ns=self._origin_ns,
            window_s=min(self._rules.duration_s, elapsed_s),
            conduct=replace(self._conduct, skipped=self._schedule.skipped, warmup_errors=self._warm_up.errors),
            interrupted=interrupted,
            warmup_requests=self._warm_up.requests,
            server=self._server,
        )

    async def _stop_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._prompts.close()

    # --- requests ----------------------------------------------------------------------------------------------------

    async def _send_warm_up(self, live: LiveTree, key: RequestKey) -> Answer:
        prompt = await self._prompts.make(live, key)
        return await self._client.send(self._body(prompt, 1), session_id=live.marker, path=self._bodies.path)

    def _body(self, prompt: Prompt, max_tokens: int) -> dict[str, Any]:
        body = {
            "model": self._model,
            **prompt.fields,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        return {**body, "stream_options": {"continuous_usage_stats": True}} if self._token_counts else body

    # --- measurement -------------------------------------------------------------------------------------------------

    async def _replay_watched(self) -> None:
        if self._read_state is None:
            self._server = ServerHistory(reason="this kind of target is not asked")
            await self._replay()
            return
        watch = ServerWatch(self._read_state, interval_s(self._rules.duration_s))
        try:
            async with watch:
                await self._replay()
        finally:
            self._server = watch.history

    async def _replay(self) -> None:
        schedule = self._schedule
        give_up_ns = schedule.end_ns + to_ns(self._rules.drain_s)
        while True:
            if self._broken is not None:
                raise self._broken
            now_ns = self._now_ns()
            for send in schedule.due(now_ns):
                self._launch(send)
            if schedule.closed and not (schedule.in_flight and self._conduct.cancelled is None):
                return
            if now_ns >= give_up_ns:
                self._conduct = replace(self._conduct, undrained=len(self._tasks))
                return
            self._progress.measuring(now_ns / NS_PER_S, len(self._turns), self._failures.count, len(self._tasks))
            self._prompts.make_next(now_ns)
            due_ns = schedule.next_ns()
            until_ns = due_ns if due_ns is not None else give_up_ns if schedule.closed else schedule.end_ns
            left_ns = until_ns - self._now_ns()
            if left_ns <= _NEAR_NS:
                self._wake.clear()
                while self._now_ns() < until_ns and not self._wake.is_set():
                    await asyncio.sleep(0)
                continue
            timeout_s = min(_TICK_S, (left_ns - _NEAR_NS) / NS_PER_S)
            self._wake.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()

    def _now_ns(self) -> int:
        return self._clock_ns() - self._origin_ns

    def _launch(self, send: Send) -> None:
        live = self._schedule.lanes[send.lane]
        if live.whole:
            self._planned.setdefault(live.name, sum(1 for _ in live.tree.requests()))
        task = asyncio.create_task(self._turn(send, live, self._prompts.take(send, live)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self._note_bug)

    def _prompt_made(self, task: asyncio.Task[Prompt]) -> None:
        self._note_bug(task)
        self._wake.set()  # the next one can be made

    def _note_bug(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._broken = task.exception()
            self._wake.set()

    async def _turn(self, send: Send, live: LiveTree, making: asyncio.Task[Prompt]) -> None:
        prompt = making.result() if making.done() else await making
        output_tokens = max(1, request_of(live.tree, send.key).output_tokens)
        answer = await self._client.send(
            self._body(prompt, output_tokens),
            intended_ns=self._origin_ns + send.due_ns,
            session_id=live.marker,
            path=self._bodies.path,
        )
        conversation = live.tree.conversations[send.key.conversation]
        record = TurnRecord(live.name, send.key.index, conversation.label or conversation.kind, send.lane, answer)
        asked = Asked(answer, prompt.tokens, output_tokens, prompt.slack_tokens)
        self._turns.append(AgentTurn(record, conversation.id, send, live.marker, asked, prompt.prefix_tokens))
        self._bodies.answered(live.tree, send.key, live.marker, answer)
        overflow = answer.error is not None and too_long(answer.error)
        if overflow:
            self._conduct = replace(self._conduct, overflows=self._conduct.overflows + 1)
        self._schedule.answered(send, answer.end_ns - self._origin_ns, overflow=overflow)
        if self._schedule.lanes[send.lane] is not live:
            self._bodies.forget(live.marker)
            self._prompts.drop(send.lane, send.recycle)
        reason = self._failures.add(answer)
        if reason is not None and self._conduct.cancelled is None:
            self._conduct = replace(self._conduct, cancelled=reason)
            self._schedule.close()
        self._wake.set()
