"""A step between its launch and its result: what is remembered of it, and whether a result is its own."""

from __future__ import annotations

from typing import NamedTuple

from longturn.engine.records import StepPlan, StepResult
from longturn.engine.sequence import Sequence


class ResultMismatch(Exception):
    """An executor's result does not answer the plan it was given: the executor's fault."""


class Launched(NamedTuple):
    """What the scheduler must remember of a plan until its result comes."""

    sequences: list[Sequence]
    """Of each work item, in order."""
    decodes: int
    prefill_tokens: int
    prefill_pairs: float
    awaited: tuple[int, bytes] | None = None
    """Of a plan without work: the last page that is on its way, with what it will hold. Its result is to report a page,
    unless an earlier one has reported this one."""


def check_answer(plan: StepPlan, result: StepResult) -> None:
    """Raises ResultMismatch if a result is another step's, or not of the rows that the plan samples and scores."""
    if (
        result.step_id != plan.step_id
        or [i.row for i in plan.work if i.samples] != [r.row for r in result.rows]
        or [i.row for i in plan.work if i.scores] != [s.row for s in result.scores]
    ):
        raise ResultMismatch(f"step {plan.step_id} was answered by step {result.step_id} or with other rows")
