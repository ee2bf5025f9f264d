"""When a measurement is given up for its failed requests."""

from __future__ import annotations

from longturn.bench.failures import Failures
from longturn.bench.records import Answer

GOOD, BAD = Answer(0, 0, 1), Answer(0, 0, 1, error="HTTP 500: no")


def reasons(failures: Failures, answers: list[Answer]) -> list[str]:
    return [reason for answer in answers if (reason := failures.add(answer)) is not None]


def test_a_rate_counts_from_twenty_requests_on() -> None:
    failures = Failures(0.1)
    assert reasons(failures, [BAD] * 3 + [GOOD] * 16) == []
    assert reasons(failures, [GOOD]) == ["3 of 20 requests failed, last: HTTP 500: no"]
    assert reasons(failures, [GOOD] * 10) == [f"3 of {n} requests failed, last: HTTP 500: no" for n in range(21, 30)]
    assert failures.count == 3, "3 of 30 is the limit and not above it"


def test_without_a_limit_only_failures_in_a_row_end_it() -> None:
    failures = Failures(None)
    assert reasons(failures, ([BAD] * 19 + [GOOD]) * 3) == []
    assert reasons(failures, [BAD] * 20) == ["20 requests in a row failed, last: HTTP 500: no"]
