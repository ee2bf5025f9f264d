from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from longturn.bench.presets import rules_of
from longturn.bench.records import Answer, Chunk
from longturn.bench.validity import Asked, Conduct, Verdict, judge

MVP = rules_of("agentx-mvp")
AGENTX = rules_of("agentx")


def asked(**more: Any) -> Asked:
    """A good answer of 10 tokens to 100, with what differs."""
    answer: dict[str, Any] = {
        "intended_ns": 0,
        "sent_ns": 0,
        "end_ns": 10**9,
        "chunks": (Chunk(10**8, None),),
        "prompt_tokens": 100,
        "output_tokens": 10,
    }
    return Asked(Answer(**(answer | more)), 100, 10)


def kinds(verdict: Verdict) -> list[str]:
    return [reason.partition(":")[0] for reason in verdict.reasons]


def test_a_clean_run_is_valid_without_notes() -> None:
    assert judge(MVP, [asked()] * 100, Conduct()) == Verdict(True, ())
    assert judge(AGENTX, [asked()] * 100, Conduct()) == Verdict(True, ())


@pytest.mark.parametrize(
    ("bad", "conduct", "kind"),
    [
        ({}, Conduct(cancelled="interrupted"), "run_cancelled"),
        ({}, Conduct(overrides=("duration 30 s",)), "unsafe_override"),
        ({}, Conduct(overflows=1, skipped=1), "context_overflow_rate_exceeded"),
        ({"chunks": ()}, Conduct(), "insufficient_profile_metric_coverage"),
        ({"prompt_tokens": 101}, Conduct(), "input_length_mismatch"),
        ({"output_tokens": 9}, Conduct(), "output_length_mismatch"),
        ({"error": "HTTP 500: x"}, Conduct(), "error_rate_exceeded"),
    ],
)
def test_what_makes_a_run_invalid(bad: dict[str, Any], conduct: Conduct, kind: str) -> None:
    verdict = judge(AGENTX, [asked()] * 89 + [asked(**bad)] * 11, conduct)
    assert not verdict.valid
    assert set(kinds(verdict)) == {kind}


def test_the_first_wrong_length_is_told() -> None:
    verdict = judge(AGENTX, [asked(), asked(output_tokens=9), asked(output_tokens=8)], Conduct())
    assert verdict.reasons[0].endswith("in 2 of 3 requests, first 9 for 10")


def test_the_limits_themselves_are_allowed() -> None:
    def valid(bad: dict[str, Any], count: int, conduct: Conduct | None = None) -> bool:
        return judge(AGENTX, [asked()] * (1000 - count) + [asked(**bad)] * count, conduct or Conduct()).valid

    assert valid({"error": "HTTP 500: x"}, 100) and not valid({"error": "HTTP 500: x"}, 101)
    assert valid({"chunks": ()}, 50) and not valid({"chunks": ()}, 51)
    assert valid({"output_tokens": 9}, 10) and not valid({"output_tokens": 9}, 11)
    # 10 of 1,000 tried; skipped requests are tried ones too
    assert valid({}, 0, Conduct(overflows=10)) and not valid({}, 0, Conduct(overflows=11))
    assert valid({}, 0, Conduct(overflows=5, skipped=5)) and not valid({}, 0, Conduct(overflows=5, skipped=6))


def test_errors_alone_do_not_invalidate_under_mvp_rules() -> None:
    verdict = judge(MVP, [asked()] * 70 + [asked(error="HTTP 500: x")] * 30, Conduct())
    assert verdict.valid and verdict.reasons == ()
    none = judge(MVP, [asked(error="HTTP 500: x")] * 30, Conduct())
    assert not none.valid and kinds(none) == ["no_success"]
    assert kinds(judge(MVP, [], Conduct())) == ["no_success"]


def test_answers_of_one_token_need_no_itl() -> None:
    short = Asked(asked(output_tokens=1).answer, 100, 1)
    assert judge(MVP, [short] * 100, Conduct()).valid


def test_missing_counts_are_no_coverage_and_no_mismatch() -> None:
    verdict = judge(MVP, [asked(prompt_tokens=None)] * 100, Conduct())
    assert verdict.reasons == (
        "insufficient_profile_metric_coverage: 0 of 100 responses have token counts, at least 95% must",
    )


def test_notes_leave_a_run_valid() -> None:
    quick = replace(rules_of("quick"))
    late = asked(intended_ns=-(10**9))
    verdict = judge(quick, [late] * 5, Conduct(undrained=2, warmup_errors=1))
    assert verdict.valid
    assert kinds(verdict) == ["not_comparable", "client_lag", "few_requests", "undrained", "warmup_errors"]
    assert "1000 ms late" in verdict.reasons[1]
    # One of 200 is beyond the 99th percentile.
    assert judge(MVP, [late] + [asked()] * 199, Conduct()).reasons == ()
