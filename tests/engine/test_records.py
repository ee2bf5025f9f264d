"""Records that are made without their constructor are those that it would have made."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from longturn.engine.records import (
    RequestOutput,
    RowResult,
    RowWork,
    TokenLogprobs,
    decode_output,
    decode_results,
    decode_work,
)

numbers = st.integers(0, 1 << 20)


@given(st.lists(st.tuples(numbers, numbers)))
def test_work_and_results_of_decodes(pairs: list[tuple[int, int]]) -> None:
    rows, values = [row for row, _ in pairs], [value for _, value in pairs]
    work, results = decode_work(rows, values), decode_results(rows, values)
    assert work == [RowWork(row=row, start=start, count=1, samples=True) for row, start in pairs]
    assert results == tuple(RowResult(row=row, token_ids=(token,)) for row, token in pairs)
    assert all(type(item) is RowWork and not item.scores for item in work)
    assert all(type(item) is RowResult and item.error is None for item in results)


def test_output_of_a_decode() -> None:
    told = (TokenLogprobs(-1.0),)
    made = decode_output("r", (5,), told, 128, 2)
    assert type(made) is RequestOutput
    assert made == RequestOutput(request_id="r", token_ids=(5,), logprobs=told, cached_tokens=128, preemptions=2)
    assert made._fields == RequestOutput._fields and len(made) == len(RequestOutput._fields)
