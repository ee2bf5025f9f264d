"""The CPU executor over a made-up model whose next token is a function of the tokens it was really given."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import pytest

from longturn.config import PAGE_TOKENS
from longturn.engine.records import NewRow, RowWork, SamplingParams, StepPlan, pack_tokens
from longturn.executor.cpu import CpuExecutor
from longturn.executor.rows import StepInputs

VOCAB = 50


class ToyModel:
    """Keeps token ids in its pages instead of keys; the next token is the sum of the whole sequence mod VOCAB."""

    vocab_size = VOCAB
    max_context_tokens = 1024
    pages = 16
    page_bytes = 4 * PAGE_TOKENS
    description = "toy"

    def __init__(self) -> None:
        self.cache = np.full((self.pages, PAGE_TOKENS), 10**6, np.int64)
        self.poison: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()
        self.closed = False

    def sums(self, inputs: StepInputs) -> list[int]:
        self.gate.wait(10)
        out = {}
        for i, row in enumerate(inputs.rows):
            begin, end = inputs.query_starts[i : i + 2]
            table = inputs.page_tables[row]
            for token, position in zip(inputs.tokens[begin:end], inputs.positions[begin:end], strict=True):
                self.cache[table[position // PAGE_TOKENS], position % PAGE_TOKENS] = token
            last = int(inputs.positions[end - 1])
            out[int(end - 1)] = int(self.cache[table].reshape(-1)[: last + 1].sum()) % VOCAB
        return [out[int(i)] for i in inputs.sample_index]

    def logits(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        logits = np.zeros((len(inputs.sample_index), VOCAB), np.float32)
        for i, best in enumerate(self.sums(inputs)):
            logits[i, best] = np.nan if best in self.poison else 30.0
        return logits

    def greedy(self, inputs: StepInputs) -> npt.NDArray[np.int32]:
        return np.array([-1 if s in self.poison else s for s in self.sums(inputs)], np.int32)

    def close(self) -> None:
        self.closed = True


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(sum(tokens) % VOCAB)
    return tokens[len(prompt) :]


def start(row: int, prompt: list[int], pages: tuple[int, ...], **sampling: object) -> NewRow:
    params = SamplingParams(max_tokens=100, **{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
    return NewRow(row, f"r{row}", pack_tokens(prompt), len(prompt), pages, params)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.5, "seed": 3}])
def test_steps_launched_ahead_use_the_tokens_of_steps_not_yet_read(sampling: dict[str, object]) -> None:
    model = ToyModel()
    executor = CpuExecutor(model, rows=4)
    prompt = list(range(1, 40)) * 5
    model.gate.clear()
    plans = [StepPlan(0, (RowWork(2, 0, 100, False),), new_rows=(start(2, prompt, (3, 5), **sampling),))]
    plans += [StepPlan(1, (RowWork(2, 100, 95, True),))]
    plans += [StepPlan(2 + i, (RowWork(2, 195 + i, 1, True),)) for i in range(20)]
    handles = [executor.launch(plan) for plan in plans]
    assert not handles[0].done()
    model.gate.set()
    results = [handle.result() for handle in handles]
    assert [r.step_id for r in results] == list(range(22))
    assert results[0].rows == ()
    assert [r.rows[0].token_ids[0] for r in results[1:]] == expected(prompt, 21)
    assert all(r.elapsed_ns > 0 for r in results)
    executor.close()
    assert model.closed


def test_one_bad_row_does_not_spoil_the_step() -> None:
    model = ToyModel()
    executor = CpuExecutor(model, rows=4)
    model.poison = {6}
    rows = (start(0, [1, 2, 3], (1,)), start(1, [4, 5], (2,), logprobs=2))
    work = (RowWork(0, 0, 3, True), RowWork(1, 0, 2, True))
    result = executor.launch(StepPlan(0, work, new_rows=rows)).result()
    assert result.rows[0].error is not None and result.rows[0].token_ids == ()
    assert result.rows[1].token_ids == (9,) and result.rows[1].logprobs[0].top_ids[0] == 9
    # A step that was launched before the failure was seen goes on for the others.
    ahead = executor.launch(StepPlan(1, (RowWork(0, 3, 1, True), RowWork(1, 2, 1, True)))).result()
    assert ahead.rows[1].token_ids == (18,)
    executor.close()


def test_a_broken_plan_fails_alone() -> None:
    executor = CpuExecutor(ToyModel(), rows=2)
    bad = executor.launch(StepPlan(0, (RowWork(0, 5, 1, True),)))
    with pytest.raises(ValueError, match="row 0"):
        bad.result()
    good = executor.launch(StepPlan(1, (RowWork(1, 0, 2, True),), new_rows=(start(1, [4, 5], (2,)),)))
    assert good.result().rows[0].token_ids == (9,)
    executor.close()
