"""What the load client itself costs and errs by: it replays long sessions against a server that computes nothing.

The client is the whole of `agentx.measure`: prompts are made, sent and timed as in any measurement. What a client is
late by, or loses, it would blame on the server under test.
"""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from longturn.bench.agentx import AgentTurn, Measurement, measure
from longturn.bench.bodies import make_bodies
from longturn.bench.client import ChatClient
from longturn.bench.encoded import encoded
from longturn.bench.metrics import NS_PER_S, Distribution, distribution, itl_s, lag_s, ttft_s
from longturn.bench.null_protocol import NullOptions, NullStream
from longturn.bench.null_server import null_server
from longturn.bench.self_test_load import SelfTestOptions, long_session, self_test_rules, settle_s

MOST_CPU_SHARE = 0.5
"""Of one core; a client that needs more will be late on a machine that does other things."""
MOST_LAG_S = 0.005
"""At P99."""
_BUSY_SHARE = 0.02
"""Of the time; with less waiting for a processor the machine was quiet."""

_IDS = range(1000, 33000)
_SCHEDULE = Path("/proc/self/schedstat")
"""Of the main thread: time on a processor, time ready and waiting for one, time slices (Linux, `sched-stats`)."""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What was found. Errors are the client's figure less the server's; both read one clock."""

    options: SelfTestOptions
    duration_s: float
    cpu_s: float
    """User and system time of the client's process, its threads too, over `duration_s`."""
    cpu_share: float
    """Of one core."""
    cpu_wait_s: float | None
    """Time in which the client was ready to run and other processes had the processors: lag that is the machine's.
    None where the system does not tell."""
    requests: int
    failed: int
    first_error: str | None
    output_tokens_per_s: float
    """Tokens that the client received, all streams together, over `duration_s`."""
    prompt_tokens_per_s: float
    lost_events: int
    lag_s: Distribution | None
    ttft_error_s: Distribution | None
    """With the upload of the prompt."""
    itl_error_s: Distribution | None
    server_late_s: Distribution | None
    """Most by which the null server itself wrote a token of each answer too late."""
    interrupted: bool
    """Ended early by Ctrl-C."""
    problems: tuple[str, ...]
    """Why the client was the bottleneck; empty if it was not."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Clocks at one moment, seconds."""

    at_ns: int
    cpu_s: float
    """User and system time of this process and its threads so far; children are not in it."""
    wait_s: float | None
    """How long its main thread has waited for a processor so far."""


def read_clocks() -> Reading:
    used = resource.getrusage(resource.RUSAGE_SELF)
    wait_s = None
    with contextlib.suppress(OSError, IndexError, ValueError):
        wait_s = int(_SCHEDULE.read_text().split()[1]) / NS_PER_S
    return Reading(time.perf_counter_ns(), used.ru_utime + used.ru_stime, wait_s)


class CpuClock:
    """Is told how the measurement goes, and reads the clocks at the start and end of a part of it."""

    def __init__(self, start_s: float, end_s: float) -> None:
        self._start_s = start_s
        self._end_s = end_s
        self.first: Reading | None = None
        self.last: Reading | None = None

    def warming_up(self, done: int, planned: int) -> None:
        pass

    def measuring(self, elapsed_s: float, done: int, failed: int, in_flight: int) -> None:
        # While the last answers run out fewer and fewer streams are left: that time would dilute the share.
        if self._start_s <= elapsed_s < self._end_s:
            self.last = read_clocks()
            self.first = self.first or self.last


async def self_test(options: SelfTestOptions) -> SelfTest:
    """Run it: a null server in a process of its own, the client in this one.

    Raises:
        ConfigError: options out of their range.
        LongturnError: the null server did not start.
    """
    tree = long_session(options)
    server = NullOptions(ttft_s=options.ttft_s, rate=options.rate, prompt_tokens=options.prompt_tokens)
    rules = self_test_rules(options)
    clock = CpuClock(settle_s(options), rules.duration_s)
    with null_server(server) as url:
        async with ChatClient(url) as client:
            ids = _IDS if options.api == "completions" else None
            bodies = await make_bodies(options.api, [tree], options.seed, url=url, model=server.model, token_ids=ids)
            measured = await measure(
                client,
                encoded(bodies),
                [tree],
                rules,
                model=server.model,
                lanes=options.streams,
                seed=options.seed,
                run="self-test",
                progress=clock,
            )
            streams = await client.get_json("/null/log", list[NullStream])
    return evaluate(options, measured, streams, clock.first, clock.last)


def evaluate(
    options: SelfTestOptions,
    measured: Measurement,
    streams: Sequence[NullStream],
    first: Reading | None,
    last: Reading | None,
) -> SelfTest:
    """Compare what the client saw with what the server did.

    Args:
        options: of the test.
        measured: by the client.
        streams: the server's log, warm-up too.
        first: clocks when all streams ran.
        last: clocks at the end of the test.
    """
    start_ns, end_ns, duration_s, spent_s, wait_s = 0, 0, 0.0, 0.0, None
    if first is not None and last is not None:
        start_ns, end_ns = first.at_ns, last.at_ns
        duration_s, spent_s = (end_ns - start_ns) / NS_PER_S, last.cpu_s - first.cpu_s
        if first.wait_s is not None and last.wait_s is not None:
            wait_s = last.wait_s - first.wait_s
    pairs = pair(measured.turns, [item for item in streams if item.received_ns >= measured.start_ns])
    good = [(turn, stream) for turn, stream in pairs if turn.record.answer.ok]
    answers = [turn.record.answer for turn in measured.turns]
    failures = [answer.error for answer in answers if answer.error is not None]
    ttft_errors = []
    itl_errors = []
    lost = 0
    for turn, stream in good:
        answer = turn.record.answer
        lost += abs(stream.events - len(answer.chunks))
        ttft, itl = ttft_s(answer), itl_s(answer)
        if ttft is not None:
            ttft_errors.append(ttft - (stream.first_ns - stream.received_ns) / NS_PER_S)
        if itl is not None and stream.tokens > 1:
            itl_errors.append(itl - (stream.last_ns - stream.first_ns) / NS_PER_S / (stream.tokens - 1))
    received = sum(start_ns <= chunk.at_ns < end_ns for answer in answers for chunk in answer.chunks)
    sent = sum(turn.asked.input_tokens for turn in measured.turns if start_ns <= turn.record.answer.sent_ns < end_ns)
    lags = distribution(map(lag_s, answers))
    share = spent_s / duration_s if duration_s > 0 else 0.0
    return SelfTest(
        options=options,
        duration_s=duration_s,
        cpu_s=spent_s,
        cpu_share=share,
        cpu_wait_s=wait_s,
        requests=len(answers),
        failed=len(failures),
        first_error=failures[0] if failures else None,
        output_tokens_per_s=received / duration_s if duration_s > 0 else 0.0,
        prompt_tokens_per_s=sent / duration_s if duration_s > 0 else 0.0,
        lost_events=lost,
        lag_s=lags,
        ttft_error_s=distribution(ttft_errors),
        itl_error_s=distribution(itl_errors),
        server_late_s=distribution(stream.late_ns / NS_PER_S for _, stream in pairs),
        interrupted=measured.interrupted,
        problems=problems(share, lags, lost, failures, len(answers), (wait_s or 0.0) / max(duration_s, 1e-9)),
    )


def problems(
    share: float, lags: Distribution | None, lost: int, failures: Sequence[str], requests: int, waited: float
) -> tuple[str, ...]:
    """Why the client was the bottleneck, one line each."""
    found = []
    if not requests:
        found.append("no request was measured")
    if failures:
        found.append(f"{len(failures)} of {requests} requests failed, first: {failures[0]}")
    if share > MOST_CPU_SHARE:
        found.append(f"the client used {share:.0%} of one core, more than {MOST_CPU_SHARE:.0%}")
    if lags is not None and lags.p99 > MOST_LAG_S:
        busy = f"; other processes kept it from a processor {waited:.0%} of the time" if waited > _BUSY_SHARE else ""
        found.append(f"the client sent {lags.p99 * 1e3:.1f} ms late (P99), more than {MOST_LAG_S * 1e3:g} ms{busy}")
    if lost:
        found.append(f"{lost} events were lost")
    return tuple(found)


def pair(turns: Sequence[AgentTurn], streams: Sequence[NullStream]) -> list[tuple[AgentTurn, NullStream]]:
    """Each turn with what the server did for it: a session sends one request at a time, so order tells."""
    by_session: dict[str, list[NullStream]] = {}
    for stream in sorted(streams, key=lambda stream: stream.received_ns):
        by_session.setdefault(stream.session, []).append(stream)
    pairs = []
    for turn in sorted(turns, key=lambda turn: turn.record.answer.sent_ns):
        answer = turn.record.answer
        known = by_session.get(turn.marker, [])
        # A request that failed may never have reached the server.
        while known and known[0].last_ns < answer.sent_ns:
            known.pop(0)
        if known and known[0].received_ns <= answer.end_ns:
            pairs.append((turn, known.pop(0)))
    return pairs
