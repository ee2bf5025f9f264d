"""Rows keep exactly what plans tell them, and refuse plans that break the contract."""

from __future__ import annotations

import numpy as np
import pytest

from longturn.engine.records import NewRow, RowWork, SamplingParams, StepPlan, pack_tokens
from longturn.executor.rows import Rows

SAMPLING = SamplingParams(max_tokens=8)


def new_row(row: int, tokens: list[int], pages: tuple[int, ...]) -> NewRow:
    return NewRow(row, f"r{row}", pack_tokens(tokens), len(tokens), pages, SAMPLING)


def test_mixed_work_becomes_flat_arrays() -> None:
    rows = Rows(4, 512, 1000)
    chunk = list(range(500, 700))
    rows.apply(StepPlan(0, (), new_rows=(new_row(2, [7, 8, 9], (5,)), new_row(0, chunk, (3, 9)))))
    rows.append(2, 42)
    inputs = rows.inputs((RowWork(2, 3, 1, True), RowWork(0, 100, 100, False)))
    assert inputs.tokens.tolist() == [42, *chunk[100:200]]
    assert inputs.positions.tolist() == [3, *range(100, 200)]
    assert inputs.rows.tolist() == [2, 0] and inputs.query_starts.tolist() == [0, 1, 101]
    assert inputs.sample_index.tolist() == [0]
    assert inputs.page_tables[0].tolist() == [3, 9, 0, 0] and inputs.page_tables[2].tolist() == [5, 0, 0, 0]


def test_a_row_is_reused_without_traces() -> None:
    rows = Rows(1, 512, 1000)
    rows.apply(StepPlan(0, (), new_rows=(new_row(0, [1] * 300, (1, 2, 3)),)))
    rows.apply(StepPlan(1, (), freed_rows=(0,), new_rows=(new_row(0, [4, 5], (7,)),), new_pages=((0, (8,)),)))
    assert rows.page_tables[0].tolist() == [7, 8, 0, 0]
    with pytest.raises(ValueError, match="row 0 has 2 tokens"):
        rows.inputs((RowWork(0, 0, 3, True),))


def test_work_beyond_the_pages_is_refused() -> None:
    rows = Rows(1, 512, 1000)
    rows.apply(StepPlan(0, (), new_rows=(new_row(0, [1] * 200, (1,)),)))
    with pytest.raises(ValueError, match="1 pages"):
        rows.inputs((RowWork(0, 0, 200, True),))
    assert len(rows.inputs((RowWork(0, 0, 128, False),)).sample_index) == 0


def test_tokens_are_copied_not_referenced() -> None:
    rows = Rows(1, 512, 1000)
    rows.apply(StepPlan(0, (), new_rows=(new_row(0, [1, 2, 3], (1,)),)))
    inputs = rows.inputs((RowWork(0, 0, 3, True),))
    rows.append(0, 9)
    np.testing.assert_array_equal(inputs.tokens, [1, 2, 3])
