"""Whether a measurement may be compared: pure rules over what was measured.

A reason starts with a word that tools can match, then a colon and the figures. A note is what a reader of a valid point
should know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from longturn.bench.metrics import itl_s, lag_s, percentile, ttft_s
from longturn.bench.presets import Rules
from longturn.bench.records import Answer

OVERFLOW_LIMIT = 0.01
COVERAGE = 0.95
WRONG_LENGTH_LIMIT = 0.01
LAG_P99_S = 0.5
FEW_REQUESTS = 60


@dataclass(frozen=True, slots=True)
class Asked:
    """One measured request and what was asked of it."""

    answer: Answer
    input_tokens: int
    """The tokens that were sent."""
    output_tokens: int
    """The tokens that were asked for, with `ignore_eos`."""
    input_slack: int = 0
    """How many tokens the server may count more or fewer than were sent: an answer in the history may have others when
    it is tokenised as part of a prompt."""


@dataclass(frozen=True, slots=True)
class Conduct:
    """How the run went, beyond its answers."""

    cancelled: str | None = None
    """Why it ended before its time."""
    overflows: int = 0
    """Requests that the server refused as longer than its context."""
    skipped: int = 0
    """Requests left out because one before them in their session overflowed."""
    undrained: int = 0
    """Requests still in flight when the time for draining was over."""
    warmup_errors: int = 0
    overrides: tuple[str, ...] = ()
    """Settings that depart from the preset, as text."""


@dataclass(frozen=True, slots=True)
class Verdict:
    valid: bool
    reasons: tuple[str, ...]
    """Why not; then what a reader should know."""


def judge(rules: Rules, requests: Sequence[Asked], conduct: Conduct) -> Verdict:
    """Apply the rules.

    Args:
        rules: under which it was measured.
        requests: all measured ones, failed ones too; warm-up is not among them.
        conduct: see there.
    """
    good = [item for item in requests if item.answer.ok]
    reasons = []
    if conduct.cancelled is not None:
        reasons.append(f"run_cancelled: {conduct.cancelled}, the results are partial")
    if not good:
        reasons.append("no_success: no measured request succeeded")
    if conduct.overrides:
        reasons.append(f"unsafe_override: {', '.join(conduct.overrides)}")
    reasons += _shares(rules, requests, conduct)
    if good:
        reasons += _coverage(good)
        reasons += _lengths(good)
    notes = _notes(rules, requests, good, conduct)
    return Verdict(not reasons, (*reasons, *notes))


def _shares(rules: Rules, requests: Sequence[Asked], conduct: Conduct) -> list[str]:
    reasons = []
    tried = len(requests) + conduct.skipped
    over = conduct.overflows + conduct.skipped
    if tried and over / tried > OVERFLOW_LIMIT:
        reasons.append(
            f"context_overflow_rate_exceeded: {over} of {tried} requests ({over / tried:.1%}) were too long for the "
            f"server, at most {OVERFLOW_LIMIT:.0%} may be"
        )
    failed = sum(not item.answer.ok for item in requests)
    if rules.error_limit is not None and requests and failed / len(requests) > rules.error_limit:
        reasons.append(
            f"error_rate_exceeded: {failed} of {len(requests)} requests ({failed / len(requests):.1%}) failed, at "
            f"most {rules.error_limit:.0%} may"
        )
    return reasons


def _coverage(good: Sequence[Asked]) -> list[str]:
    """Percentiles over a part of the responses would be those of a selection."""
    several = [item for item in good if item.output_tokens > 1]  # an answer of one token has no ITL
    measured = {
        "TTFT": [ttft_s(item.answer) is not None for item in good],
        "ITL": [itl_s(item.answer) is not None for item in several],
        "token counts": [
            item.answer.prompt_tokens is not None and item.answer.output_tokens is not None for item in good
        ],
    }
    return [
        f"insufficient_profile_metric_coverage: {sum(has)} of {len(has)} responses have {name}, at least "
        f"{COVERAGE:.0%} must"
        for name, has in measured.items()
        if has and sum(has) / len(has) < COVERAGE
    ]


def _lengths(good: Sequence[Asked]) -> list[str]:
    """A server that computes other lengths than recorded does other work."""
    reasons = []
    pairs = {
        "input_length_mismatch": [(item.answer.prompt_tokens, item.input_tokens, item.input_slack) for item in good],
        "output_length_mismatch": [(item.answer.output_tokens, item.output_tokens, 0) for item in good],
    }
    for name, found in pairs.items():
        told = [(count, wanted, slack) for count, wanted, slack in found if count is not None]
        wrong = [(count, wanted) for count, wanted, slack in told if abs(count - wanted) > slack]
        if told and len(wrong) / len(told) > WRONG_LENGTH_LIMIT:
            count, wanted = wrong[0]
            reasons.append(
                f"{name}: the server counted other tokens than were asked for in {len(wrong)} of {len(told)} "
                f"requests, first {count} for {wanted}"
            )
    return reasons


def _notes(rules: Rules, requests: Sequence[Asked], good: Sequence[Asked], conduct: Conduct) -> list[str]:
    notes = []
    if not rules.comparable:
        notes.append(f"not_comparable: preset {rules.preset} is not comparable with published results")
    if requests and (lag := percentile([lag_s(item.answer) for item in requests], 99)) > LAG_P99_S:
        notes.append(
            f"client_lag: the client sent up to {lag * 1000:.0f} ms late (P99), more than {LAG_P99_S * 1000:.0f}"
        )
    if good and len(good) < FEW_REQUESTS:
        notes.append(f"few_requests: {len(good)} requests were answered, tails of fewer than {FEW_REQUESTS} say little")
    if conduct.undrained:
        notes.append(f"undrained: {conduct.undrained} requests had not ended when the time for draining was over")
    if conduct.warmup_errors:
        notes.append(f"warmup_errors: {conduct.warmup_errors} warm-up requests of subagents failed")
    return notes
