"""The test of the load client itself: its arithmetic by hand, and one short run of all of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from longturn.bench.agentx import AgentTurn, Measurement
from longturn.bench.lanes import Send
from longturn.bench.null_protocol import NullStream
from longturn.bench.records import Answer, Chunk, TurnRecord
from longturn.bench.self_test import Reading, evaluate, self_test
from longturn.bench.self_test_load import SelfTestOptions, long_session
from longturn.bench.synth import RequestKey
from longturn.bench.validity import Asked, Conduct
from longturn.cli.main import main
from longturn.errors import ConfigError

MS = 10**6
OPTIONS = SelfTestOptions(streams=1)


def turn(sent: int, *, lag: int = 1, chunks: int = 3, error: str | None = None, marker: str = "a") -> AgentTurn:
    """A request sent at `sent` ms whose events come 110, 120, 130 ms after it."""
    answer = Answer(
        intended_ns=(sent - lag) * MS,
        sent_ns=sent * MS,
        end_ns=(sent + 130) * MS,
        chunks=tuple(Chunk((sent + 110 + 10 * n) * MS, None) for n in range(chunks)),
        output_tokens=3,
        error=error,
    )
    key = RequestKey("t", 0, 0)
    record = TurnRecord("s", 0, "", 0, answer)
    return AgentTurn(record, "c", Send(0, 0, key, 0), marker, Asked(answer, 1000, 3))


def stream(received: int, *, session: str = "a", events: int = 3) -> NullStream:
    """The first token 100 ms after the request, the last 20 ms later."""
    at = received * MS
    return NullStream(session, at, at + 100 * MS, at + 120 * MS, 2 * MS, 3, events)


def measured(*turns: AgentTurn) -> Measurement:
    return Measurement(turns, {}, 0, 1.0, Conduct(), False, 0)


def test_errors_are_the_clients_figures_less_the_servers() -> None:
    turns = [turn(100), turn(300, lag=2), turn(100, marker="b")]
    streams = [stream(301), stream(104), stream(102, session="b"), stream(-50)]
    first, last = Reading(150 * MS, 5.0, 1.0), Reading(350 * MS, 5.05, 1.002)
    found = evaluate(OPTIONS, measured(*turns), streams, first, last)
    assert (found.duration_s, found.cpu_s, found.cpu_share) == pytest.approx((0.2, 0.05, 0.25))
    assert found.cpu_wait_s == pytest.approx(0.002)
    assert found.lost_events == 0 and found.failed == 0 and found.problems == ()
    assert found.lag_s is not None and found.lag_s.max == pytest.approx(0.002)
    # TTFT is 110 ms for the client and 100 for the server; ITL 20 ms / 2 for both.
    assert found.ttft_error_s is not None and found.ttft_error_s.count == 3
    assert found.ttft_error_s.min == found.ttft_error_s.max == pytest.approx(0.010)
    assert found.itl_error_s is not None and found.itl_error_s.max == pytest.approx(0.0)
    assert found.server_late_s is not None and found.server_late_s.p50 == pytest.approx(0.002)
    # From 150 to 350 ms come the events of the two requests at 100 ms, and one prompt is sent.
    assert found.output_tokens_per_s == pytest.approx(6 / 0.2)
    assert found.prompt_tokens_per_s == pytest.approx(1000 / 0.2)


def test_what_makes_the_client_the_bottleneck() -> None:
    first, last = Reading(0, 0.0, 0.0), Reading(1000 * MS, 0.6, 0.1)
    turns = [turn(100, lag=20), turn(400, chunks=2), turn(700, error="timed out")]
    found = evaluate(OPTIONS, measured(*turns), [stream(101), stream(401), stream(701)], first, last)
    assert found.lost_events == 1
    assert found.problems == (
        "1 of 3 requests failed, first: timed out",
        "the client used 60% of one core, more than 50%",
        "the client sent 19.6 ms late (P99), more than 5 ms; other processes kept it from a processor 10% of the time",
        "1 events were lost",
    )
    nothing = evaluate(OPTIONS, measured(), [], None, None)
    assert nothing.problems == ("no request was measured",) and nothing.cpu_share == 0.0


def test_a_request_that_never_arrived_shifts_no_pair() -> None:
    turns = [turn(100, error="connection lost"), turn(400)]
    found = evaluate(OPTIONS, measured(*turns), [stream(401)], None, None)
    assert found.ttft_error_s is not None and found.ttft_error_s.count == 1
    assert found.ttft_error_s.max == pytest.approx(0.010)


def test_the_session_grows_by_blocks_and_shares_all_that_came_before() -> None:
    tree = long_session(SelfTestOptions(prompt_tokens=20_000))
    inputs = [request.input_tokens for request in tree.requests()]
    assert inputs == [20_000 + 1200 * n for n in range(40)]
    one, other = tree.root.requests[3], tree.root.requests[4]
    assert tree.trie.common(one.node, other.node) == one.node
    with pytest.raises(ConfigError, match="prompt_tokens must be at least 9392, not 100"):
        long_session(replace(OPTIONS, prompt_tokens=100))


@pytest.mark.parametrize("api", ["chat", "completions"])
async def test_a_short_run_loses_nothing(api: str) -> None:
    options = SelfTestOptions(
        streams=3, rate=200.0, prompt_tokens=10_000, output_tokens=20, duration_s=0.5, ttft_s=0.02,
        api="chat" if api == "chat" else "completions",
    )  # fmt: skip
    found = await self_test(options)
    assert found.failed == 0 and found.lost_events == 0 and found.requests >= 6
    assert found.ttft_error_s is not None and found.ttft_error_s.min > 0, "an answer cannot come before it was written"
    assert found.itl_error_s is not None and found.itl_error_s.count == found.requests
    assert found.cpu_share > 0


def test_the_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "self-test", "--streams", "0"]) == 2
    assert "--streams must be between 1 and 4096" in capsys.readouterr().err
    assert main(["bench", "self-test", "--rate", "nan"]) == 2
    assert main(["bench", "self-test", "--prompt-tokens", "5"]) == 2
